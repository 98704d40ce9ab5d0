"""Every promise of SECURITY.md names tests that exist; each file of attacks holds one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_TEST_ID = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def promises() -> list[tuple[str, list[tuple[str, str]]]]:
    """Return each row's promise and its tests as (file, function)."""
    rows = []
    page = (ROOT / "SECURITY.md").read_text()
    # The table before, of who may do what, leads to these rows by links.
    for line in page.partition("\n## Promises\n")[2].splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        is_head = cells[0] == "promise" or set(cells[0]) <= set("-")
        if line.startswith("|") and not is_head:
            rows.append((cells[0], _TEST_ID.findall(cells[1])))
    return rows


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


@pytest.mark.parametrize(("promise", "tests"), promises(), ids=lambda value: str(value)[:40])
def test_a_promise_names_tests_that_exist(promise, tests):
    assert tests, f"no test holds: {promise}"
    for file, name in tests:
        assert (ROOT / file).is_file(), f"{file} is gone; it held: {promise}"
        assert name in functions_of(ROOT / file), f"{file} has no {name}; it held: {promise}"


def test_each_limit_of_a_party_leads_to_its_promises():
    page = (ROOT / "SECURITY.md").read_text()
    rows = re.findall(r"^\|.*\|$", page.partition("\n## Promises\n")[0], re.MULTILINE)[2:]
    limits = [row.split("|")[3].strip() for row in rows]
    assert len(rows) > 6
    assert [text for text in limits if text and "](#" not in text] == []


def test_every_file_of_attacks_holds_a_promise():
    named = {file for _, tests in promises() for file, _ in tests}
    files = {str(p.relative_to(ROOT)) for p in (ROOT / "tests/hostile").glob("test_*.py")}
    assert files <= named, f"no promise of SECURITY.md names {sorted(files - named)}"
