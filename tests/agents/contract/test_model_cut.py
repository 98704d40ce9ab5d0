"""A cut that comes from the other side holds every layer once in each chain of stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.contract.messages import from_wire, to_wire
from agents.contract.model_cut import ModelCut, Stage
from agents.contract.wire import WireError

# Two replicas of ten layers: ranks 0 and 1, and rank 2 alone.
CUT = ModelCut(
    mode="pipeline",
    stages=(
        Stage(rank=0, first_layer=0, stop_layer=6, has_head=False, max_in_flight=3),
        Stage(rank=1, first_layer=6, stop_layer=10, has_embedding=False),
        Stage(rank=2, replica=1, first_layer=0, stop_layer=10, num_resident=4),
    ),
    micro_sequences=1,
)


def test_cut_survives_the_wire_and_knows_its_replicas() -> None:
    found = from_wire(ModelCut, to_wire(CUT))
    assert found == CUT
    assert (found.num_replicas, found.num_layers, found.stages[1].num_layers) == (2, 10, 4)
    assert found.without_stages() == ModelCut(mode="pipeline")


@pytest.mark.parametrize(
    ("rank", "change", "words"),
    [
        (1, {"first_layer": 7}, "begins at layer 7; it must be 6"),
        (1, {"first_layer": 5}, "begins at layer 5; it must be 6"),
        (1, {"has_head": False}, "lack an end of the model"),
        (2, {"has_embedding": False}, "lack an end of the model"),
        (2, {"stop_layer": 0}, "stop_layer is 0"),
        (2, {"num_resident": 11}, "num_resident is 11"),
        (2, {"rank": 1}, "one per rank"),
        (0, {"max_in_flight": 0}, "max_in_flight is 0"),
    ],
)
def test_cut_that_contradicts_itself_is_refused(
    rank: int, change: dict[str, int | bool], words: str
) -> None:
    stages = list(CUT.stages)
    stages[rank] = replace(stages[rank], **change)  # type: ignore[arg-type]
    bad = to_wire(replace(CUT, stages=tuple(stages)))
    with pytest.raises(WireError, match=words):
        from_wire(ModelCut, bad)
