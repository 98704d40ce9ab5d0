"""Data files that unpack to far more than they hold, or never end, cost neither memory nor time."""

from __future__ import annotations

import asyncio
import gzip
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agents.contract.spec import DataSpec, RunSpec
from app.errors import UserError
from app.runs.inputs.preview import preview_data
from tests.agents.trainer.ranks import DEMO
from tests.fakes.cluster import FakeCluster, make_services

ROOT = Path(__file__).parents[2]
MOST_MB = 1000
MOST_S = 60

_READ = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
path, reader = sys.argv[2:]
if reader == "node":
    from agents.contract.spec import DataSpec
    from agents.errors import ExpectedError as Declared
    from agents.trainer.data.rows import RowReader, find_files
    from agents.trainer.data.tally import Tally
    def read():
        tally = Tally(name=path)
        reader = RowReader(find_files(Path(path)), DataSpec(train="-"), "sft", tally)
        tally.check_usable(sum(1 for _ in reader))
elif reader == "master":
    from app.errors import UserError as Declared
    from app.library.data import check_form
    def read():
        check_form(Path(path))
else:
    from app.errors import UserError as Declared
    from app.library.data_size import guess_data
    def read():
        guess_data(Path(path))
try:
    read()
    said = "it was read"
except Declared as error:
    said = str(error)
children_kb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
# Not ru_maxrss, which begins with the memory of the process that was forked.
own_kb = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
print(max(own_kb, children_kb) // 1024, said)
"""


def repeat(path: Path, text: str, count: int) -> None:
    """Write a table of one text, kept once and named `count` times."""
    indices = pa.array(np.zeros(count, dtype=np.int32))
    column = pa.DictionaryArray.from_arrays(indices, pa.array([text]))
    pq.write_table(pa.table({"text": column}), path, compression="zstd")


def nest(path: Path) -> None:
    """Write one row whose list has more messages than memory has room for."""
    offsets = pa.array([0, 60_000_000], type=pa.int32())
    column = pa.ListArray.from_arrays(offsets, pa.nulls(60_000_000, pa.string()))
    pq.write_table(pa.table({"messages": column}), path, compression="zstd")


def endless(path: Path, start: bytes = b"") -> None:
    with path.open("wb") as file:
        file.write(start)
        file.truncate(20 << 30)  # takes no room on the disk


BOMBS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a text of 50 MB, 5,000 times": ("a.parquet", lambda p: repeat(p, "a" * (50 << 20), 5000)),
    "a text of 100 KB, 10^6 times": ("a.parquet", lambda p: repeat(p, "a" * 100_000, 10**6)),
    "a word, 10^8 times": ("a.parquet", lambda p: repeat(p, "ab", 10**8)),
    "one row of 6 * 10^7 messages": ("a.parquet", nest),
    "one text of 100 MB": ("a.parquet", lambda p: repeat(p, "a" * (100 << 20), 1)),
    "a line of 20 GiB": ("a.jsonl", endless),
    "a line of text of 20 GiB": ("a.txt", endless),
    "a list that never ends": ("a.json", lambda p: endless(p, b"[")),
    "an object that never ends": ("a.json", lambda p: endless(p, b'{"data": [{')),
    "a quote that never ends": ("a.csv", lambda p: endless(p, b'text\n"')),
    "a quote over many lines": ("a.csv", lambda p: p.write_text('text\n"' + "a,b\n" * (8 << 20))),
    "a million columns": ("a.csv", lambda p: p.write_text("," * 10**6 + "\n" + "," * 10**6)),
    "deep brackets": ("a.jsonl", lambda p: p.write_text("[" * 10**6 + "\n")),
    "a gzip by another name": ("a.jsonl", lambda p: p.write_bytes(gzip.compress(b" " * 10**8))),
}  # fmt: skip

CASES = [(bomb, "node") for bomb in sorted(BOMBS)]
CASES += [(bomb, "master") for bomb in ("a line of 20 GiB", "a quote over many lines")]
CASES += [("an object that never ends", "master"), ("a line of 20 GiB", "plan")]


def read(path: Path, reader: str) -> tuple[int, float, str]:
    """Return the memory in MB, the seconds and the outcome of reading a file in its own process."""
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _READ, str(ROOT), str(path), reader],
        capture_output=True,
        text=True,
        timeout=MOST_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    memory, _, said = done.stdout.partition(" ")
    return int(memory), time.monotonic() - began_s, said.strip()


@pytest.mark.parametrize(("bomb", "reader"), CASES)
def test_a_data_file_that_unpacks_to_gigabytes_fills_neither_memory_nor_time(
    tmp_path: Path, attack: Callable[..., None], bomb: str, reader: str
) -> None:
    name, make = BOMBS[bomb]
    path = tmp_path / name
    make(path)
    memory_mb, took_s, said = read(path, reader)
    size = path.stat().st_size
    attack(
        given=f"{bomb}, a file of {size:,} bytes",
        tried=f"reading it as the {reader} does",
        happened=f"{said} ({memory_mb} MB, {took_s:.1f} s)",
    )
    assert memory_mb < MOST_MB
    if reader == "node":
        assert str(path) in said


def test_a_preview_on_this_pc_refuses_a_bomb_by_its_name(
    tmp_path: Path, attack: Callable[..., None]
) -> None:
    path = tmp_path / "a.parquet"
    repeat(path, "a" * (50 << 20), 5000)
    spec = RunSpec(model=str(DEMO / "model"), data=DataSpec(train=str(path)))
    services = make_services(tmp_path / "home", FakeCluster("alpha"))
    with pytest.raises(UserError) as refused:
        asyncio.run(preview_data(services, spec, whole=False))
    attack(
        given=f"a Parquet file of {path.stat().st_size:,} bytes that unpacks to 250 GB",
        tried="a preview of it",
        happened=str(refused.value),
    )
    assert str(path) in refused.value.message
    assert "memory" in refused.value.message
