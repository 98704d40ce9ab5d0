"""Key of a run's data, including everything that decides how many tokens it has.

Files count as unchanged while their size and modification time are the same; a data set of the hub
is identified by its name alone.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from agents.contract.spec import RunSpec
from app.library.data_size import list_files


def make_data_key(spec: RunSpec) -> str:
    """Return a text that is equal for equal data, model and settings. Does not read content."""
    said = [
        spec.data.train,
        _stat(Path(os.path.expanduser(spec.data.train))),
        spec.model,
        spec.data.format,
        spec.objective,
        spec.sequence_tokens,
        spec.packing,
    ]
    if spec.data.ignore_columns:  # left out when empty, as in keys of earlier versions
        said.append(sorted(spec.data.ignore_columns))
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def _stat(path: Path) -> list[tuple[str, int, int]]:
    try:
        # None: too many entries to look through; the key then rests on the name alone.
        stats = [(one.name, one.stat()) for one in list_files(path) or ()]
    except (OSError, ValueError):
        return []
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
