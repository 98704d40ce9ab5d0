"""Real previews of one row of each kind, as docs/which-data.md has them, for pictures."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from agents.contract.data import DataPreview
from agents.contract.spec import DataSpec, RunSpec

_PAGE = Path(__file__).parents[2] / "docs" / "which-data.md"
_USER = {"role": "user", "content": "What is the weather in Oslo?"}
_ROWS: dict[str, dict[str, Any]] = {
    "tools": {
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "weather",
                    "description": "Weather of a city",
                    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
                },
            }
        ],
        "messages": [
            _USER,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "type": "function",
                        "function": {"name": "weather", "arguments": {"city": "Oslo"}},
                    }
                ],
            },
            {"role": "tool", "name": "weather", "content": "4 degrees, rain"},
            {"role": "assistant", "content": "It is 4 degrees and raining in Oslo."},
        ],
    },
    "reasoning": {
        "messages": [
            {"role": "user", "content": "What is 12 times 12?"},
            {
                "role": "assistant",
                "reasoning_content": "12 times 10 is 120, and 12 times 2 is 24.",
                "content": "144",
            },
        ]
    },
}
KINDS = ("chat", "tools", "reasoning", "alpaca", "text", "preference")


def preview_of(kind: str) -> DataPreview:
    """Return the preview of rows of one kind, by the template of Qwen3."""
    # Imported on use: only these pictures need the training packages.
    from agents.trainer.data.preview import describe_first
    from agents.trainer.data.rows import find_files
    from tests.agents.trainer.data.test_matrix import load

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{kind}.jsonl"
        path.write_text(_lines_of(kind), "utf-8")
        objective = "dpo" if kind == "preference" else "sft"
        spec = RunSpec(model="-", data=DataSpec(train=str(path)), objective=objective)
        return describe_first(spec, load("qwen3"), find_files(path), plain_template=False)


def _lines_of(kind: str) -> str:
    if kind in _ROWS:
        return f"{json.dumps(_ROWS[kind])}\n" * 3
    found = re.search(rf"^```json {kind}\n(.*?)^```", _PAGE.read_text("utf-8"), re.M | re.S)
    assert found is not None
    return found[1].splitlines()[0] + "\n"
