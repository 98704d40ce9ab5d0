"""What the optimizer takes is known and held; on the meta device, which has sizes and no memory."""

from types import SimpleNamespace

import torch

from agents.layer_plan import OPTIMIZER_COPIES
from agents.trainer.reserve import Reserve

NUM_VALUES = 1000
FLAT_BYTES = 4 * NUM_VALUES


def make_reserve(device):
    values = torch.zeros(NUM_VALUES, device=device, requires_grad=True)
    optimizer = torch.optim.AdamW([values], foreach=False)
    return Reserve(SimpleNamespace(values=values), optimizer, torch.device(device)), optimizer


def test_what_is_held_is_not_missing_and_comes_back():
    reserve, _ = make_reserve("meta")
    assert reserve.missing_bytes == OPTIMIZER_COPIES * FLAT_BYTES
    with reserve.held():
        assert reserve.missing_bytes == 0
    assert reserve.missing_bytes == OPTIMIZER_COPIES * FLAT_BYTES


def test_what_the_optimizer_has_by_now_is_not_missing():
    reserve, optimizer = make_reserve("meta")
    (values,) = optimizer.param_groups[0]["params"]
    values.grad = torch.zeros_like(values)
    optimizer.step()
    assert reserve.missing_bytes == (OPTIMIZER_COPIES - 2) * FLAT_BYTES, "two averages are there"


def test_where_it_is_not_free_it_stays_missing(monkeypatch):
    reserve, _ = make_reserve("meta")

    def refuse(*size, **how):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(torch, "empty", refuse)
    with reserve.held():
        assert reserve.missing_bytes == OPTIMIZER_COPIES * FLAT_BYTES


def test_a_processor_has_nothing_to_reserve():
    reserve, _ = make_reserve("cpu")
    with reserve.held():
        assert reserve.missing_bytes == 0
