"""A state that is cut, put together, and cut elsewhere is the same bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from agents.contract.spec import DataSpec, RunSpec
from agents.trainer.optim.flat_parameters import FlatParameters, Layout
from agents.trainer.optim.optimizer import export_state, import_state, make_optimizer
from agents.trainer.parallel.pipeline.whole_state import (
    WholeState,
    WholeValues,
    load_optimizer,
    read_rows,
    read_step,
    write_rows,
)
from tests.draws import seed

SPEC = RunSpec(model="m", data=DataSpec(train="t"), weight_decay=0.1)
SHAPES = {
    **{f"layers.{n}.{part}": (3, n + 2) for n in range(4) for part in ("a", "b")},
    **{f"layers.{n}.magnitude": (n + 1,) for n in range(1, 4)},
}
CPU = torch.device("cpu")


def make_flat(names: Sequence[str], layout: Layout) -> FlatParameters:
    ordered = [(name, nn.Parameter(torch.randn(SHAPES[name]))) for name in SHAPES if name in names]
    return FlatParameters(ordered, CPU, layout=layout)


def names_of(first: int, stop: int) -> list[str]:
    return [name for name in SHAPES if first <= int(name.split(".")[1]) < stop]


def put_together(
    stages: list[tuple[FlatParameters, torch.optim.Optimizer]], layout: Layout
) -> tuple[Tensor, dict[str, Tensor], list[str]]:
    whole = WholeValues(SHAPES, layout)
    state = WholeState(whole, torch.float32)
    for flat, optimizer in stages:
        for row, numbers in enumerate(read_rows(flat, optimizer)):
            state.put(row, list(flat.views), numbers)
        state.note_step(read_step(optimizer))
    found = state.export()
    return found.parameters.values, found.optimizer, list(found.parameters.views)


@pytest.mark.parametrize("layout", ["backward", "sorted"])
@pytest.mark.parametrize("cuts", [(0, 1, 4), (0, 2, 3, 4), (0, 4)])
def test_a_state_survives_every_cut(layout, cuts):
    torch.manual_seed(seed(2))
    one = make_flat(list(SHAPES), layout)
    optimizer = make_optimizer(SPEC, one)
    for _ in range(2):
        one.gradients.normal_()
        optimizer.step()
    expected, _ = export_state(optimizer)
    whole = WholeValues(SHAPES, layout)
    stages = []
    for first, stop in pairwise(cuts):
        flat = make_flat(names_of(first, stop), layout)
        for name, view in flat.views.items():
            view.copy_(one.views[name])
        mine = make_optimizer(SPEC, flat)
        load_optimizer(mine, flat, whole, expected)
        stages.append((flat, mine))
    values, found, names = put_together(stages, layout)
    assert names == list(one.views)
    assert torch.equal(values, one.values)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)
        assert found[name].shape == tensor.shape
    again = make_optimizer(SPEC, make_flat(list(SHAPES), layout))
    import_state(again, found, {})
    # A step after it is that of the state which was never cut.
    for flat, mine in stages:
        for name, parameter in flat.parameters.items():
            assert parameter.grad is not None
            parameter.grad.copy_(one.parameters[name].grad)
        mine.step()
    optimizer.step()
    values, _, _ = put_together(stages, layout)
    assert torch.equal(values, one.values)


def test_rows_can_be_put_back_and_without_a_step_there_are_only_values():
    flat = make_flat(names_of(1, 4), "backward")
    optimizer = make_optimizer(SPEC, flat)
    assert len(read_rows(flat, optimizer)) == 1
    assert read_step(optimizer) is None
    load_optimizer(optimizer, flat, WholeValues(SHAPES, "backward"), {})
    assert put_together([(flat, optimizer)], "backward")[1] == {}
    flat.gradients.normal_()
    optimizer.step()
    rows = [torch.full_like(row, place) for place, row in enumerate(read_rows(flat, optimizer))]
    write_rows(rows, optimizer)
    assert [float(row.mean()) for row in read_rows(flat, optimizer)[1:]] == [1.0, 2.0]
