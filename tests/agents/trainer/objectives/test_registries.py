"""What a run file may name is what the trainer has a row for."""

from __future__ import annotations

from typing import get_args, get_type_hints

from agents.contract.objectives import OBJECTIVES
from agents.contract.parallel import PARALLEL
from agents.contract.spec import RunSpec
from agents.trainer.objectives.registry import LOSSES
from agents.trainer.parallel.registry import STRATEGIES


def test_every_runnable_way_of_parallel_training_has_a_strategy():
    assert STRATEGIES.keys() == {"auto", *(row.name for row in PARALLEL.values() if row.runnable)}


def test_every_objective_of_a_spec_has_a_row():
    assert set(LOSSES) == set(OBJECTIVES)
    assert set(OBJECTIVES) == set(get_args(get_type_hints(RunSpec)["objective"]))
