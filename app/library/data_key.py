"""Key of a run's data and of all settings that decide its number of tokens.

Files count as unchanged while their size and modification time are the same. A data set of the hub
is identified only by its name.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from agents.contract.spec import RunSpec
from agents.contract.wire import to_wire
from app.library.data_size import list_files


def make_data_key(spec: RunSpec) -> str:
    """Return a text that is equal for equal data, model and settings; reads no content."""
    parts = [
        spec.data.train,
        _stat(Path(os.path.expanduser(spec.data.train))),
        spec.model,
        spec.data.format,
        spec.objective,
        spec.sequence_tokens,
        spec.packing,
    ]
    if spec.data.ignore_columns:  # left out if empty, to keep the keys of earlier versions
        parts.append(sorted(spec.data.ignore_columns))
    if spec.data.columns:
        parts.append(["columns", *sorted(spec.data.columns)])
    if spec.data.sources:
        parts.append(
            [
                [to_wire(source), _stat(Path(os.path.expanduser(source.path)))]
                for source in spec.data.sources
            ]
        )
    if spec.data.chooses_rows or not spec.data.shuffle:
        parts.append([spec.data.deduplicate, spec.data.shuffle, spec.data.eval])
    if spec.data.encoding != "utf-8":
        parts.append(["encoding", spec.data.encoding])
    if spec.data.rendered != "auto":
        parts.append(spec.data.rendered)
    if (texts := [spec.data.documents, spec.data.long_text]) != ["file", "split"]:
        parts.append(texts)
    data = spec.data
    other = [data.learn, data.chat_template, data.template_options, data.new_tokens]
    if other != ["answers", None, (), ()]:
        parts.append(other)
    if spec.data.reasoning != "learn":
        parts.append(spec.data.reasoning)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _stat(path: Path) -> list[tuple[str, int, int]]:
    try:
        # With too many entries (None) the key depends only on the name.
        stats = [(file.name, file.stat()) for file in list_files(path) or ()]
    except (OSError, ValueError):
        return []
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
