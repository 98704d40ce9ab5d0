"""Data files: how they are split into rows, what rows mean, and what a plan reads of them."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from agents.contract.spec import DataSpec
from agents.errors import ExpectedError
from agents.shared.data.columns import choose_format
from agents.shared.data.findings import RowMeanings, hint_for, say_finding
from agents.trainer.data.rows import RowReader, find_files
from agents.trainer.data.tally import Tally
from app.errors import UserError
from app.library.data import check_form
from app.library.data_size import guess_data
from tests.hostile.fuzzing import Target, json_values, mutated

CHAT = {"messages": [{"role": "user", "content": "<image>Hi"}, {"role": "gpt", "value": "Ho"}]}
ROWS = (
    {**CHAT, "images": ["a.png"], "weight": 0},
    {"instruction": "Hi", "input": "", "output": "Ho", "history": [["a", "b"]], "label": False},
    {"prompt": "Hi", "chosen": "Ho", "rejected": "Hm", "score_chosen": 1, "score_rejected": 2},
    {"text": "Hi", "role": "user", "split": "test", "mask": [0, 1]},
)
NAMES = (
    "label", "is_good", "images", "history", "context", "system_prompt", "weight", "loss_mask",
    "score_chosen", "reasoning", "split", "role", "tools", "text", "prompt", "messages", "\x00",
    "\ud800", "x" * 500, "",
)  # fmt: skip


def _lines(rows: tuple[dict[str, Any], ...]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _parquet() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([CHAT, CHAT]), sink)
    return bytes(sink.getvalue())


SAMPLES = {
    ".jsonl": (_lines(ROWS),),
    ".json": (json.dumps(ROWS).encode(), json.dumps({"data": ROWS[:2]}).encode(), _lines(ROWS)),
    ".csv": (b'instruction,output,label\nHi,"Ho, ""x""",true\nHi,Ho,false\n',),
    ".txt": (b"Hi\r\n\xef\xbb\xbfHo\n",),
}
FILES = st.sampled_from(sorted(SAMPLES)).flatmap(
    lambda suffix: st.tuples(st.just(suffix), mutated(SAMPLES[suffix]))
)


def _with_file(name: str, content: bytes, read: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        read(path)


def _read_rows(path: Path) -> None:
    tally = Tally(name=str(path))
    reader = RowReader(find_files(path), DataSpec(train="-"), "sft", tally, enforce=True)
    tally.check_usable(sum(1 for _ in reader))
    for found in reader.findings:
        say_finding(found).encode()


def _judge(row: Any) -> None:
    meanings = RowMeanings(("label",))
    formats = ["chat", "alpaca", "preference", "text"]
    if isinstance(row, dict):
        with contextlib.suppress(ValueError):
            formats = [choose_format(row), *formats]
        for data_format in formats:
            meanings.add(row, data_format, 1)
    for found in meanings.find():
        assert 0 < found.count <= found.total
        (say_finding(found) + hint_for(found)).encode("utf-8", "backslashreplace")


ROW = st.dictionaries(st.sampled_from(NAMES), json_values(), max_size=8)
TARGETS = (
    Target(
        name="data: rows on a node",
        inputs=FILES,
        read=lambda one: _with_file(f"a{one[0]}", one[1], _read_rows),
        allowed=(ExpectedError,),
    ),
    Target(
        name="data: parquet on a node",
        inputs=mutated((_parquet(),)),
        read=lambda content: _with_file("a.parquet", content, _read_rows),
        allowed=(ExpectedError,),
        limit_s=20.0,
    ),
    Target(
        name="data: form on the master",
        inputs=FILES,
        read=lambda one: _with_file(
            f"a{one[0]}", one[1], lambda path: check_form(path, data=DataSpec(train="-"))
        ),
        allowed=(UserError,),
    ),
    Target(
        name="data: a plan's guess",
        inputs=FILES,
        read=lambda one: _with_file(f"a{one[0]}", one[1], guess_data),
        allowed=(),
    ),
    Target(name="data: meaning of a row", inputs=ROW, read=_judge, allowed=()),
)
