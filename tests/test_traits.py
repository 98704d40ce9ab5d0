"""Objectives, modes and formats of rows are asked for their traits; their names are not compared.

The rows are in `agents/contract/objectives.py` and `agents/contract/parallel.py`. A comparison
elsewhere would be one more place that a new objective or mode has to change.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from agents.contract.objectives import OBJECTIVES, ROW_FORMATS
from agents.contract.parallel import PARALLEL
from tests.import_graph import source_files

ROOT = Path(__file__).parents[1]
NAMES = {*OBJECTIVES, *PARALLEL, "preference"}
OWN_MODULES = (
    "agents/contract/objectives.py",
    "agents/contract/parallel.py",
    # modules of one objective or mode
    "agents/trainer/objectives/",
    "agents/trainer/parallel/",
    "app/planning/strategies/",
    # readers of one format of rows
    "agents/shared/data/columns.py",
    "agents/shared/data/findings.py",
    "agents/trainer/data/conversations.py",
)


def find_comparisons(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of each comparison with the name of an objective, mode or format."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            sides = [node.value]
        else:
            continue
        for side in sides:
            items = side.elts if isinstance(side, (ast.Tuple, ast.List, ast.Set)) else [side]
            for one in items:
                if isinstance(one, ast.Constant) and one.value in NAMES:
                    yield node.lineno if isinstance(node, ast.Compare) else one.lineno, one.value


def test_no_name_of_an_objective_or_mode_is_compared_outside_its_modules():
    found = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in source_files(ROOT, "app", "agents")
        if not str(file.relative_to(ROOT)).startswith(OWN_MODULES)
        for line, name in find_comparisons(file.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def test_comparisons_are_found():
    source = 'a = spec.objective == "dpo"\nb = mode in ("auto", "data")\nc = {"dpo": 1}["dpo"]\n'
    assert list(find_comparisons(source)) == [(1, "dpo"), (2, "data")]


def test_rows_know_each_other():
    assert all(set(row.formats) <= set(ROW_FORMATS) for row in OBJECTIVES.values())
    assert all(any(name in row.formats for row in OBJECTIVES.values()) for name in ROW_FORMATS)
