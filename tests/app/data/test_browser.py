"""Rows are listed before all are read, searched, filtered and shown as a run learns them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents.contract.data import SourceSpec
from agents.contract.requests.rows import DataFigures, RowRequest
from agents.contract.spec import DataSpec, RunSpec
from app.data.browser import _PROGRAM, BrowsedData, DataBrowser
from app.errors import UserError
from app.planning.advice.changes import apply_change
from app.presentation.offer_text import find_offer
from tests.agents.trainer.ranks import DEMO

GOOD = {"instruction": "Say hello", "output": "Hello."}
ROWS = [
    *({**GOOD, "instruction": f"Question {number}"} for number in range(50)),
    {**GOOD, "instruction": "Question 7"},  # repeats an earlier one
    {"instruction": "No answer", "output": ""},
    {"instruction": "Tell", "output": "a long story, " * 200},
    {"instruction": "Umlaut", "output": "\u00dcber."},
]


def write(path: Path) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    elif path.suffix == ".json":
        path.write_text(json.dumps(ROWS, indent=1))
    else:
        lines = [",".join(f'"{row[name]}"' for name in GOOD) for row in ROWS]
        path.write_text("\n".join(["instruction,output", *lines, ""]))
    return path


def source(path: Path, model: str = "org/m") -> BrowsedData:
    return BrowsedData(
        spec=RunSpec(model=model, data=DataSpec(train=str(path)), sequence_tokens=128)
    )


def browse(home: Path, work: Callable[[DataBrowser], Any]) -> Any:
    async def run() -> Any:
        browser = DataBrowser(home)
        try:
            return await work(browser)
        finally:
            await browser.close()

    return asyncio.run(run())


async def read_all(browser: DataBrowser, wanted: BrowsedData) -> DataFigures:
    while not (found := await browser.figures(wanted)).is_whole:
        assert not found.problem
        await asyncio.sleep(0.05)
    return found


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
def test_rows_of_each_kind_are_listed_filtered_and_shown(tmp_path: Path, suffix: str) -> None:
    wanted = source(write(tmp_path / f"rows{suffix}"))

    async def look(browser: DataBrowser) -> None:
        first = await browser.rows(wanted, RowRequest(count=3))
        assert [row.text for row in first.rows] == [f"Question {n} \u2192 Hello." for n in range(3)]
        figures = await read_all(browser, wanted)
        assert (figures.num_rows, figures.num_left_out, figures.num_cut) == (54, 1, 1)
        assert (figures.num_duplicates, figures.columns) == (1, ("instruction", "output"))
        assert sum(figures.lengths) == 53
        for which, text in (
            ("duplicate", "Question 7"),
            ("left_out", "No answer"),
            ("cut", "Tell"),
            ("longest", "Tell"),
        ):
            found = await browser.rows(wanted, RowRequest(which=which, count=1))  # type: ignore[arg-type]
            assert text in found.rows[0].text
        later = await browser.rows(wanted, RowRequest(start=51, count=10))
        assert [row.state for row in later.rows] == ["left_out", "cut", "kept"]
        row = await browser.row(wanted, later.rows[2].place)
        assert json.loads(row.raw)["output"] == "\u00dcber."
        assert row.shown is not None
        assert (row.shown.conversations[0].parts[-1].text.strip(), row.brief.row) == (
            "\u00dcber.",
            later.rows[2].row,
        )

    browse(tmp_path, look)


@pytest.mark.parametrize(
    ("text", "number"), [("question 4", 11), ("\u00fcBER", 0), ("\u00dcber", 1)]
)
def test_a_search_finds_rows_in_any_case(tmp_path: Path, text: str, number: int) -> None:
    wanted = source(write(tmp_path / "rows.jsonl"))

    async def look(browser: DataBrowser) -> int:
        await read_all(browser, wanted)
        return (await browser.rows(wanted, RowRequest(search=text))).num_rows

    assert browse(tmp_path, look) == number


def test_with_a_tokenizer_rows_are_shown_as_learned(tmp_path: Path) -> None:
    wanted = source(write(tmp_path / "rows.jsonl"), str(DEMO / "model"))

    async def look(browser: DataBrowser) -> None:
        figures = await read_all(browser, wanted)
        assert figures.is_tokenized
        assert 0 < figures.num_targets < figures.num_tokens
        row = await browser.row(wanted, 1)
        assert row.shown is not None
        parts = row.shown.conversations[0].parts
        assert [(part.text, part.learned) for part in parts] == [
            ("<|begin|><|user|>Question 0<|end|><|assistant|>", False),
            ("Hello.<|end|>", True),
        ]
        assert row.brief.num_tokens == row.shown.conversations[0].num_tokens

    browse(tmp_path, look)


def test_files_of_a_folder_are_sources_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "a.jsonl")
    (folder / "b.jsonl").write_text(f"{json.dumps(GOOD)}\n\n{{broken\n")

    async def look(browser: DataBrowser) -> None:
        figures = await read_all(browser, source(folder))
        assert [(one.name, one.num_rows, one.num_left_out) for one in figures.sources] == [
            ("a.jsonl", 54, 1),
            ("b.jsonl", 2, 1),
        ]
        (row,) = (await browser.rows(source(folder), RowRequest(start=56))).rows
        assert (row.file, row.row, row.state) == ("b.jsonl", 3, "left_out")
        assert row.reason.startswith("not valid JSON")

    browse(tmp_path, look)


def test_an_index_is_kept_until_the_data_changes(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl")
    assert browse(tmp_path, lambda browser: read_all(browser, source(path))).num_rows == 54
    indexes = list((tmp_path / "cache" / "rows").iterdir())
    again = browse(tmp_path, lambda browser: browser.figures(source(path)))
    assert (again.num_rows, again.is_whole) == (54, True)
    assert list((tmp_path / "cache" / "rows").iterdir()) == indexes
    path.write_text(json.dumps(GOOD) + "\n")
    assert browse(tmp_path, lambda browser: read_all(browser, source(path))).num_rows == 1


def test_mapped_columns_are_read_as_a_run_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"frage": "Hi", "antwort": "Ho"}) + "\n")
    wanted = source(path)
    columns = ("instruction=frage", "output=antwort")
    mapped = replace(
        wanted, spec=replace(wanted.spec, data=replace(wanted.spec.data, columns=columns))
    )

    async def look(browser: DataBrowser) -> list[tuple[str, tuple[str, ...]]]:
        found = []
        for one in (wanted, mapped):
            (row,) = (await browser.rows(one, RowRequest())).rows
            found.append((row.state, (await browser.figures(one)).columns))
        return found

    names = ("frage", "antwort")
    assert browse(tmp_path, look) == [("left_out", names), ("kept", names)]


def test_data_that_is_not_here_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        browse(tmp_path, lambda browser: browser.figures(source(tmp_path / "absent.jsonl")))
    with pytest.raises(UserError, match="org/absent"):
        browse(tmp_path, lambda browser: browser.figures(source(Path("org/absent"))))


def test_each_source_of_a_run_and_its_evaluation_data_are_read(tmp_path: Path) -> None:
    first, second = write(tmp_path / "first.jsonl"), tmp_path / "second.csv"
    second.write_text("q,a\nWho?,Ann.\n")
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text(f"{json.dumps(GOOD)}\n" * 2)
    sources = (
        SourceSpec(path=str(first)),
        SourceSpec(path=str(second), columns=("instruction=q", "output=a")),
    )
    data = DataSpec(train=str(first), sources=sources, eval=str(held_out))
    one = BrowsedData(spec=RunSpec(model="org/m", data=data))

    async def look(browser: DataBrowser) -> list[int]:
        found = [await read_all(browser, other) for other in one.list_others()]
        assert (await browser.rows(one.list_others()[1], RowRequest())).rows[0].state == "kept"
        return [figures.num_rows for figures in found]

    assert browse(tmp_path, look) == [54, 1, 2]


def test_rows_that_only_a_mapping_reads_come_with_an_offer(tmp_path: Path) -> None:
    (tmp_path / "qa.jsonl").write_text('{"query": "q", "response": "a"}\n' * 3)
    wanted = source(tmp_path / "qa.jsonl")

    async def look(browser: DataBrowser) -> None:
        found = await read_all(browser, wanted)
        assert found.has_nothing
        offer = find_offer(UserError("nothing", found.offer), wanted.spec.data)
        assert offer is not None
        mapped = replace(wanted, spec=apply_change(wanted.spec, offer.change))
        found = await read_all(browser, mapped)
        assert (found.format, found.has_nothing) == ("alpaca", False)

    browse(tmp_path, look)


def test_rows_are_read_without_the_training_packages() -> None:
    """Their imports take longer than the first rows may."""
    code = f"import sys, {_PROGRAM}; print({{'torch', 'transformers'}} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
