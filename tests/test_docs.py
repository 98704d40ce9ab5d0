"""What people read agrees with what there is: keys of run files, links, benchmarks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agents.contract.spec import run_keys
from tests.run_file_table import PAGE, make_table, split_page

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    *("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "RELIABILITY.md", "tests/bench/README.md"),
    "resources/help/troubleshooting.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")),
)
MAX_README_LINES = 150
MAX_GUIDE_WORDS = 1200
"""Five minutes of reading, at 240 words a minute."""
_LINK = re.compile(r"\]\((?!https?://)([^)#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in _LINK.findall(path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


def test_the_table_of_keys_is_that_of_today() -> None:
    _, table, _ = split_page(PAGE.read_text(encoding="utf-8"))
    assert table == make_table(), "write it: python -m tests.run_file_table"
    assert all(f"| `{name}` |" in table for name in run_keys())


def test_every_benchmark_is_listed() -> None:
    text = (ROOT / "tests/bench/README.md").read_text(encoding="utf-8")
    for path in (ROOT / "tests/bench").glob("bench_*.py"):
        assert re.search(rf"tests\.bench\.{path.stem}\b", text), path.name


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < MAX_README_LINES


@pytest.mark.parametrize("page", [p for p in PAGES if p.startswith("docs/") and "measure" not in p])
def test_every_guide_reads_in_five_minutes(page: str) -> None:
    # A table that is made from the program is searched, not read from its start.
    before, _, after = split_page((ROOT / page).read_text(encoding="utf-8"))
    assert len(f"{before}{after}".split()) <= MAX_GUIDE_WORDS
