"""What the optimizer takes is known and held; on the meta device, which has sizes and no memory."""

import contextlib

import pytest
import torch

from agents.trainer.optim.optimizer_reserve import OPTIMIZER_COPIES, Reserve

NUM_VALUES = 1000
FLAT_BYTES = 4 * NUM_VALUES


def make_reserve(device, kind="adamw"):
    values = torch.zeros(NUM_VALUES, device=device, requires_grad=True)
    optimizer = torch.optim.AdamW([values], foreach=False)
    return Reserve(kind, [values], optimizer, torch.device(device)), optimizer


@pytest.mark.parametrize(
    ("kind", "held_bytes"),
    [("adamw", 2 * FLAT_BYTES), ("adamw_8bit", FLAT_BYTES // 2), ("paged_adamw_8bit", 0)],
)
def test_its_state_is_held_and_what_a_step_needs_beside_it_is_counted(kind, held_bytes):
    reserve, _ = make_reserve("meta", kind)
    assert reserve.missing_bytes == OPTIMIZER_COPIES * FLAT_BYTES
    assert reserve.lasting_bytes == held_bytes
    with reserve.held():
        assert reserve.lasting_bytes == 0
        assert reserve.missing_bytes == OPTIMIZER_COPIES * FLAT_BYTES - held_bytes
    assert reserve.missing_bytes == OPTIMIZER_COPIES * FLAT_BYTES


def test_what_the_optimizer_has_by_now_is_not_missing():
    reserve, optimizer = make_reserve("meta")
    (values,) = optimizer.param_groups[0]["params"]
    values.grad = torch.zeros_like(values)
    optimizer.step()
    for hold in (reserve.held, contextlib.nullcontext):
        with hold():
            assert reserve.missing_bytes == (OPTIMIZER_COPIES - 2) * FLAT_BYTES, "two are there"
            assert reserve.lasting_bytes == 0


def test_where_it_is_not_free_it_stays_missing(monkeypatch):
    reserve, _ = make_reserve("meta")

    def refuse(*size, **how):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(torch, "empty", refuse)
    with reserve.held():
        assert reserve.missing_bytes == OPTIMIZER_COPIES * FLAT_BYTES
        assert reserve.lasting_bytes == 2 * FLAT_BYTES


def test_a_processor_has_nothing_to_reserve():
    reserve, _ = make_reserve("cpu")
    with reserve.held():
        assert reserve.missing_bytes == 0
