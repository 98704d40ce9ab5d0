"""Show what a run will learn: three rendered rows, with the tokens that count marked.

Written to the journal at a run's start; before a run, by hand on any PC with the environment:
`python -m agents.trainer.data.preview RUN_SPEC.json` prints it as JSON.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from agents.errors import UserError
from agents.spec import RunSpec
from agents.trainer.data.hub import find_data
from agents.trainer.data.rows import RowReader
from agents.trainer.data.tally import Skipped, Tally
from agents.trainer.data.tokens import tokenize_rows
from agents.trainer.examples import Segment
from agents.wire import WireError, from_wire

NUM_SHOWN = 3
_NUM_READ = 64
_MOST_TOKENS = 256
"""Shown of one conversation; the rest is counted."""


def preview(spec: RunSpec, tokenizer: Any, path: str) -> dict[str, Any]:
    """Return format, and the first rows as runs of text that are learned or not.

    Reads no more than the first rows, so it is as quick for ten million of them.

    Raises:
        UserError: the data cannot be read, or none of its first rows is of use.
    """
    files = find_data(path)
    tally = Tally(name=files.name)
    reader = RowReader(files, spec.data.format, spec.objective, tally)
    rows = islice(iter(reader), _NUM_READ)
    shown: list[dict[str, Any]] = []
    for row in tokenize_rows(tokenizer, rows, spec.sequence_tokens):
        if isinstance(row, Skipped):
            reader.skip(row)
        elif len(shown) < NUM_SHOWN:
            shown.append(show_row(tokenizer, row.segments))
    tally.judge(len(shown))
    return {
        "format": reader.format,
        "rows": shown,
        "skipped": [{"row": one.row, "reason": one.in_words} for one in tally.named],
    }


def show_row(tokenizer: Any, segments: tuple[Segment, ...]) -> dict[str, Any]:
    """Return one row as parts: texts in order, and whether each is learned."""
    return {
        "row": segments[0].row,
        "conversations": [
            {
                "num_tokens": len(segment.ids),
                "num_targets": segment.num_targets,
                "parts": _cut_parts(tokenizer, segment),
            }
            for segment in segments
        ],
    }


def _cut_parts(tokenizer: Any, segment: Segment) -> list[dict[str, Any]]:
    ids, is_target = segment.ids[:_MOST_TOKENS], segment.is_target[:_MOST_TOKENS]
    changes = [i for i in range(1, len(ids)) if is_target[i] != is_target[i - 1]]
    ends = [*changes, len(ids)]
    return [
        {"text": tokenizer.decode(ids[start:end]), "learned": bool(is_target[start])}
        for start, end in zip([0, *changes], ends, strict=True)
    ]


def main(path: Path) -> int:
    """Print the preview of the spec in a JSON file; return the exit status."""
    from agents.trainer.model import load_tokenizer

    try:
        spec = from_wire(RunSpec, json.loads(path.read_bytes()), "spec")
        tokenizer, _ = load_tokenizer(Path(spec.model))
        print(json.dumps({"kind": "preview", **preview(spec, tokenizer, spec.data.train)}))
    except (OSError, ValueError, WireError) as error:
        print(json.dumps({"kind": "failed", "message": f"{path}: {error}", "hint": ""}))
        return 1
    except UserError as error:
        print(json.dumps({"kind": "failed", "message": error.message, "hint": error.hint}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
