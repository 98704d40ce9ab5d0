"""Every family's own class is the witness: packed rows, adapters, dropout and recomputation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import nn

from agents.contract.layer_plan import LayerPlan
from agents.trainer.data.examples import Example, Segment
from agents.trainer.execution.layers import LayerStack
from agents.trainer.model.dropout import DropoutClock
from agents.trainer.model.forward import Forward
from agents.trainer.model.head import Head
from agents.trainer.model.micro_batch import build_micro_batch
from agents.trainer.model.model import TrainedModel
from tests.agents.trainer.model.families import FAMILIES, adapt, make_family

CPU = torch.device("cpu")


def make_row(number: int, length: int) -> Example:
    ids = (np.arange(length, dtype=np.int32) * (3 + number) + number) % 90 + 3
    return Example((Segment(number, ids, np.arange(length) % 3 != 0),))


ROWS = [make_row(1, 13), make_row(2, 4), make_row(3, 9), make_row(4, 2)]
# Follows the rows as padding does on GPUs: a segment of its own without targets.
PADDING = Example((Segment(9, np.full(7, 50, dtype=np.int32), np.zeros(7, dtype=np.bool_)),))


def loss_of_class(model: nn.Module) -> torch.Tensor:
    """Let the class compute each row by itself, with its own attention and logits."""
    total = torch.zeros((), dtype=torch.float64)
    for row in ROWS:
        ids = torch.from_numpy(row.segments[0].ids.astype(np.int64))
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        place = np.flatnonzero(row.segments[0].is_target)
        total = total + F.cross_entropy(logits[place - 1], ids[place], reduction="sum")
    return total


def loss_of_packs(
    forward: Forward, adapted: TrainedModel, packs: list[list[int]], *, drops: bool = False
) -> torch.Tensor:
    """Compute the loss of the rows with these numbers, each list in one pass."""
    total = torch.zeros((), dtype=torch.float64)
    for numbers in packs:
        rows = [ROWS[number] for number in numbers] + [PADDING] * (len(numbers) > 1)
        batch = build_micro_batch(rows, CPU)
        places = [*numbers, 99][: len(rows)]
        if drops:
            adapted.clock.set(places, batch.lengths, batch.num_tokens, CPU)
        total = total + forward.head.sum_loss(forward.features(batch), batch.label_N)
        adapted.clock.clear()
    return total


def differentiate(model: nn.Module, loss: torch.Tensor) -> tuple[float, torch.Tensor]:
    trained = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, trained, allow_unused=True)
    return loss.item(), torch.cat([g.flatten() for g in found if g is not None])


def check_equal(found: tuple[float, torch.Tensor], expected: tuple[float, torch.Tensor]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=2e-6)
    assert found[1].abs().max() > 0
    assert (found[1] - expected[1]).abs().max() < 2e-5 * expected[1].abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_of_packed_rows_are_those_of_the_class(family):
    model = make_family(family)
    expected = differentiate(model, loss_of_class(model))
    plain = TrainedModel(
        module=model, tokenizer=None, clock=DropoutClock(0), dtype=torch.float32, autocast=False,
        lora=None, plain_template=False,
    )  # fmt: skip
    forward = Forward(plain, CPU)
    assert (forward.flat, forward.limits) == (True, ())
    assert isinstance(forward.head, Head)
    check_equal(differentiate(model, loss_of_packs(forward, plain, [[0, 1, 2, 3]])), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_packed_rows_are_trained_as_by_the_class(family):
    adapted = adapt(make_family(family), dropout=0.25)
    expected = differentiate(adapted.module, loss_of_class(adapted.module))
    forward = Forward(adapted, CPU)
    stack = LayerStack(adapted)

    def train(packs: list[list[int]], *, drops: bool = True) -> tuple[float, torch.Tensor]:
        loss = loss_of_packs(forward, adapted, packs, drops=drops)
        return differentiate(adapted.module, loss)

    check_equal(train([[0, 1, 2, 3]], drops=False), expected)
    dropped = train([[0], [1], [2], [3]])
    assert abs(dropped[0] - expected[0]) > 1e-5 * expected[0], "nothing is dropped"
    check_equal(train([[3, 1], [0, 2]]), dropped)
    stack = LayerStack(adapted)
    stack.set(LayerPlan(num_recomputed=stack.num_layers))
    assert stack.num_layers == adapted.module.config.get_text_config().num_hidden_layers
    check_equal(train([[0, 1, 2, 3]]), dropped)
