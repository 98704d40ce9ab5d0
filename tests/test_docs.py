"""What the documents say agrees with the code: keys of run files, links, commands, paths."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.contract.spec import run_keys
from app.cli.main import build_parser
from tests import commands_page
from tests.run_file_table import PAGE, make_table, split_page

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    *sorted(path.name for path in ROOT.glob("*.md")),
    "tests/bench/README.md",
    "resources/help/troubleshooting.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
)
GUIDES = [
    page
    for page in PAGES
    if Path(page).parent == Path("docs")
    and page not in {"docs/commands.md", "docs/measurements.md"}
]
"""Pages for users to read from the start to the end; the others are looked things up in."""
QUOTING = {
    *("docs/commands.md", "docs/run-file.md"),
    *("tests/bench/README.md", "resources/help/troubleshooting.md"),
}
"""Pages that repeat words of the code and of its messages."""
MAX_LINES = {"README.md": 110, "ARCHITECTURE.md": 130}
MAX_GUIDE_WORDS = 1200
"""Five minutes of reading, at 240 words a minute."""
_LINK = re.compile(r"\]\((?!https?://)([^)#]*)(?:#([^)]*))?\)")
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
_PATH = re.compile(r"(?:agents|app|tests|docs|installers|resources)/[\w./-]*\w")
_RETIRED = re.compile(
    r"\b(beside|go(?:es)? on|nobody|somebody|a person|whatever|whoever|anew|of ours|there is none"
    r"|at all|look(?:ed)? at)\b"
)
_PLACEHOLDER = re.compile(r"\b[A-Z]{3,}\b|\.\.\.|\*")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target, anchor in _LINK.findall(path.read_text(encoding="utf-8")):
        linked = path.parent / target if target else path
        assert linked.exists(), target
        if anchor:
            assert anchor in _anchors_of(linked.read_text(encoding="utf-8")), f"{target}#{anchor}"


def _anchors_of(text: str) -> set[str]:
    """Return what links into a page can name: its headings as GitHub spells them, and its marks."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    spelled = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in headings}
    return spelled | set(re.findall(r'<a id="([^"]+)">', text))


def test_decisions_are_numbered_once_and_indexed() -> None:
    folder = ROOT / "docs/decisions"
    texts = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    index = texts.pop("README.md")
    numbers = [int(n) for text in texts.values() for n in re.findall(r"^## (\d+)\. ", text, re.M)]
    assert sorted(numbers) == list(range(1, len(numbers) + 1))
    assert sorted(int(n) for n in re.findall(r"^- (\d+): \[", index, re.M)) == sorted(numbers)
    for name in texts:
        assert f"({name})" in index


def test_the_table_of_keys_is_that_of_today() -> None:
    _, table, _ = split_page(PAGE.read_text(encoding="utf-8"))
    assert table == make_table(), "write it: python -m tests.run_file_table"
    assert all(f"| `{name}` |" in table for name in run_keys())


def test_every_benchmark_is_listed() -> None:
    text = (ROOT / "tests/bench/README.md").read_text(encoding="utf-8")
    for path in (ROOT / "tests/bench").glob("bench_*.py"):
        assert re.search(rf"tests\.bench\.{path.stem}\b", text), path.name


def test_the_page_of_commands_is_made_from_the_parsers() -> None:
    page = commands_page.PAGE.read_text(encoding="utf-8")
    assert page == commands_page.make_page(), "run: python -m tests.commands_page"


@pytest.mark.parametrize("page", PAGES)
def test_every_command_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for command in _commands_in(text):
        parser = build_parser()
        words = command.split()[1:]
        while words and words[0] in (verbs := commands_page.verbs_of(parser)):
            parser = verbs[words.pop(0)]
        verbs = commands_page.verbs_of(parser)
        is_complete = (
            not verbs or not words or words[0].startswith(("-", "[")) or words[0].isupper()
        )
        assert is_complete, command
        known = parser._option_string_actions
        unknown = [word for word in words if word.startswith("--") and word not in known]
        assert not unknown, command


def _commands_in(text: str) -> Iterator[str]:
    for code in _CODE.findall(text):
        for line in code.strip("`").splitlines():
            command = re.split(r"\s#|[<>]|\s&&\s", line.strip())[0]
            if command.startswith("rackless "):
                yield re.sub(r"[\[\]()]", " ", command)


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_path_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for code in _CODE.findall(text):
        for path in _PATH.findall(code) if code.startswith("`") and "\n" not in code else ():
            if code.startswith(f"`{path}") and not _PLACEHOLDER.search(path):
                assert (ROOT / path).exists(), code


@pytest.mark.parametrize("page", sorted({*PAGES} - QUOTING))
def test_no_retired_idiom_is_used(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [match[0] for match in _RETIRED.finditer(text)] == []


@pytest.mark.parametrize("page", MAX_LINES)
def test_a_page_is_short(page: str) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= MAX_LINES[page]


@pytest.mark.parametrize("page", GUIDES)
def test_every_guide_reads_in_five_minutes(page: str) -> None:
    # A table that is made from the program is searched, not read from its start.
    before, _, after = split_page((ROOT / page).read_text(encoding="utf-8"))
    assert len(f"{before}{after}".split()) <= MAX_GUIDE_WORDS
