"""Folders of documents: Markdown with its README, source code, and web pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.contract.spec import DataSpec
from agents.errors import ExpectedError
from agents.shared.data.files import UnreadableData
from agents.trainer.data.rows import RowReader, find_files
from agents.trainer.data.tally import Tally
from app.library.data import check_form
from app.library.data_size import guess_data


def read(folder: Path, **files: str) -> list[str]:
    for name, text in files.items():
        path = folder / name.replace("__", ".")
        path.write_text(text)
    found = find_files(folder)
    check_form(*found.paths, data=DataSpec(train="-"))
    rows = list(RowReader(found, DataSpec(train="-"), "sft", Tally(name="d")))
    assert guess_data(folder).num_rows
    return [row.text for row in rows]


def test_readme_is_a_document_among_markdown_only(tmp_path: Path) -> None:
    assert read(tmp_path, README__md="# About", a__md="# Rivers") == ["# About", "# Rivers"]
    assert read(tmp_path, b__txt="Lakes.") == ["# Rivers", "Lakes."]


def test_code_is_one_document_per_file(tmp_path: Path) -> None:
    read(tmp_path, README__md="about", main__py="if a:\n\n    b()\n", deep__c="int x;\n")
    assert read(tmp_path) == ["int x;", "if a:\n\n    b()"]
    assert read(tmp_path / "main.py") == ["if a:\n\n    b()"]


def test_script_next_to_rows_is_no_data(tmp_path: Path) -> None:
    assert read(tmp_path, a__jsonl='{"text": "row"}\n', load__py="x = 1\n") == ["row"]


def test_pages_are_read_without_markup(tmp_path: Path) -> None:
    page = (
        "<!DOCTYPE html><html><head><title>T</title><style>p {}</style></head><body><nav>Menu</nav>"
        "<h1>Rivers &amp; lakes</h1><p>They <b>run</b>\n  far.</p><ul><li>one<li>two</ul>"
        "<script>alert(1)</script><pre>a\n  b</pre><img src='x.png' alt='no'></body></html>"
    )
    (text,) = read(tmp_path, a__html=page)
    assert text == "Menu\n\nRivers & lakes\n\nThey run far.\n\none\ntwo\n\na\n  b"


def test_pages_and_code_are_of_two_kinds(tmp_path: Path) -> None:
    with pytest.raises(ExpectedError, match="several kinds: 1 html, 1 text"):
        read(tmp_path, a__html="<p>x</p>", b__js="x()\n")


def test_huge_page_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agents.shared.data.files.MAX_PAGE_CHARS", 8)
    with pytest.raises(ExpectedError, match="longer than 8 characters") as refused:
        list(RowReader(find_files(_page(tmp_path)), DataSpec(train="-"), "sft", Tally(name="d")))
    assert isinstance(refused.value.__cause__, UnreadableData)


def _page(folder: Path) -> Path:
    path = folder / "a.html"
    path.write_text("<p>far too long</p>")
    return path
