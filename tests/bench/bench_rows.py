"""Time and memory of the Data page on big data: `python -m tests.bench.bench_rows [--million 10]`.

The program that answers the page reads a file of short rows, made on the fly, without a tokenizer.
Prints seconds until the first rows, rows at the end of the file, a filter and a search for the last
row, until all rows are read, and until the first rows of an index from before; memory is the peak
of the program.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

from agents.contract.requests.rows import RowRequest
from agents.contract.spec import DataSpec, RunSpec
from app.data.browser import BrowsedData, DataBrowser

MOST_FIRST_S = 1.0
MOST_BYTES = 2 << 30
_BLOCK_ROWS = 100_000
_POLL_S = 0.2

T = TypeVar("T")


def write_rows(path: Path, num_rows: int) -> None:
    """Write conversations of two turns, of which one in a thousand has no answer."""
    with path.open("w", encoding="ascii") as file:
        for start in range(0, num_rows, _BLOCK_ROWS):
            places = range(start, min(start + _BLOCK_ROWS, num_rows))
            file.writelines(
                json.dumps({"instruction": f"Who is {n}?", "output": "Oren Dale." * (n % 1000 > 0)})
                + "\n"
                for n in places
            )


def read_peak_bytes(pid: int) -> int:
    """Return the peak memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


async def measure(folder: Path, num_rows: int) -> bool:
    """Print the figures of one file; return whether the targets are met."""
    path = folder / "rows.jsonl"
    write_rows(path, num_rows)
    print(f"{num_rows:,} rows, {path.stat().st_size / 2**20:,.0f} MiB")
    source = BrowsedData(spec=RunSpec(model="-", data=DataSpec(train=str(path))))
    browser = DataBrowser(folder / "home")
    first_s = await _time("first rows", browser.rows(source, RowRequest()))
    started_s = time.perf_counter()
    while not (found := await browser.figures(source)).is_whole:
        assert not found.problem
        await asyncio.sleep(_POLL_S)
    print(f"{'all rows read':<24}{time.perf_counter() - started_s:8.2f} s")
    await _time("last rows", browser.rows(source, RowRequest(start=num_rows - 100)))
    await _time("left out", browser.rows(source, RowRequest(which="left_out")))
    search = RowRequest(search=f"who is {num_rows - 1}?")
    await _time("search for the last row", _search(browser, source, search))
    assert browser._process is not None
    peak_bytes = read_peak_bytes(browser._process.pid)
    await browser.close()
    await _time("first rows once more", browser.rows(source, RowRequest()))
    await browser.close()
    print(f"{'peak memory':<24}{peak_bytes / 2**20:8.0f} MiB")
    return first_s <= MOST_FIRST_S and peak_bytes <= MOST_BYTES


async def _search(browser: DataBrowser, source: BrowsedData, request: RowRequest) -> None:
    while not (await browser.rows(source, request)).is_whole:
        pass


async def _time(what: str, work: Awaitable[T]) -> float:
    started_s = time.perf_counter()
    await work
    took_s = time.perf_counter() - started_s
    print(f"{what:<24}{took_s:8.2f} s", flush=True)
    return took_s


def main() -> int:
    """Return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--million", type=float, default=1.0, help="number of rows, in millions")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        is_met = asyncio.run(measure(Path(folder), round(args.million * 10**6)))
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
