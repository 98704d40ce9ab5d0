"""Every rank has its layers, as planned or in equal parts, and what no replica cuts is found."""

from __future__ import annotations

import pytest

from agents.contract.model_cut import ModelCut, Stage
from agents.errors import ExpectedError
from agents.trainer.model.layer_holdings import ModelOutline
from agents.trainer.parallel.pipeline.cut import Replicas, choose_stages


def outline(num_layers: int) -> ModelOutline:
    return ModelOutline(
        class_name="Tiny", layer_bytes=(10,) * num_layers, embedding_bytes=1, head_bytes=1
    )


def test_without_a_plan_stages_are_equal_and_the_last_is_not_the_longest():
    stages = choose_stages(None, outline(8), 3)
    assert [(one.first_layer, one.stop_layer) for one in stages] == [(0, 3), (3, 6), (6, 8)]
    assert [one.has_embedding for one in stages] == [True, False, False]
    assert [one.has_head for one in stages] == [False, False, True]


def test_a_plan_is_followed_but_not_for_another_model_or_other_ranks():
    planned = (
        Stage(rank=0, first_layer=0, stop_layer=1, has_head=False),
        Stage(rank=1, first_layer=1, stop_layer=4, has_embedding=False),
    )
    cut = ModelCut(mode="pipeline", stages=planned)
    assert choose_stages(cut, outline(4), 2) == planned
    # An election leaves fewer ranks than were planned for.
    assert len(choose_stages(cut, outline(4), 1)) == 1
    with pytest.raises(ExpectedError, match=r"divides 4 layers, but the model has 5"):
        choose_stages(cut, outline(5), 2)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ExpectedError, match=r"3 stages, but the model has 2 layers"):
        choose_stages(None, outline(2), 3)
    with pytest.raises(ExpectedError, match=r"cannot be distinguished"):
        choose_stages(None, outline(0), 1)


def test_stretches_are_whole_in_every_replica():
    ends = [(0, 0, 3), (0, 3, 8), (1, 0, 5), (1, 5, 8)]
    replicas = Replicas(
        [
            Stage(rank=rank, replica=number, first_layer=first, stop_layer=stop)
            for rank, (number, first, stop) in enumerate(ends)
        ]
    )
    found = [(one.first, one.stop, one.holders) for one in replicas.stretches()]
    assert found == [(0, 3, (0, 2)), (3, 5, (1, 2)), (5, 8, (1, 3))]
    assert [replicas.find(rank) for rank in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert replicas.share_of(1) == 5 / 8
