"""Counted dropout: the right share, no pattern, and nothing but sample, place and layer count."""

from __future__ import annotations

import pytest
import torch

from agents.errors import ExpectedError
from agents.trainer.model.dropout import CountedDropout, DropoutClock, replace_dropouts

CPU = torch.device("cpu")


def make(share=0.1, name="layer.0", features=257, seed=1):
    clock = DropoutClock(seed)
    return clock, CountedDropout(share, name, features, clock)


def mask(positions, tokens=64, **settings):
    clock, dropout = make(**settings)
    clock.set(positions, [tokens] * len(positions), tokens * len(positions), CPU)
    features = settings.get("features", 257)
    ones = torch.ones(1, len(positions) * tokens, features, dtype=torch.float64)
    return dropout(ones).reshape(len(positions), tokens, features)


@pytest.mark.parametrize("share", [0.05, 0.1, 0.5])
def test_the_share_is_right_and_the_mean_is_kept(share):
    kept = mask(list(range(16)), share=share)
    num = kept.numel()
    zeros = (kept == 0).double().mean().item()
    assert abs(zeros - share) < 5 * (share * (1 - share) / num) ** 0.5 + 1e-5
    assert kept.mean().item() == pytest.approx(1.0, abs=0.01)
    assert kept.unique().numel() == 2


def test_a_share_just_below_one_is_one_that_can_be_had():
    kept = mask([0], share=0.9999999)
    assert (kept != 0).double().mean() < 1e-3
    assert kept.isfinite().all()


def test_features_and_tokens_do_not_move_together():
    kept = (mask([3], tokens=2048, features=512)[0] != 0).double() - 0.9
    for rows in (kept.T, kept):
        correlation = rows @ rows.T / rows.shape[1] / 0.09
        correlation.fill_diagonal_(0)
        root_mean_square = correlation.square().mean().sqrt().item()
        assert root_mean_square == pytest.approx(rows.shape[1] ** -0.5, rel=0.05)


def test_a_row_has_the_same_mask_in_every_batch_and_width():
    together = mask([5, 9, 12])
    assert torch.equal(mask([9]), together[1:2])
    assert torch.equal(mask([12, 5], tokens=40), together[[2, 0], :40])


def test_position_layer_and_seed_each_change_the_mask():
    first = mask([5])
    others = [mask([6]), mask([5], name="layer.1"), mask([5], seed=2)]
    for other in others:
        agreement = (first == other).double().mean().item()
        assert agreement == pytest.approx(0.9 * 0.9 + 0.1 * 0.1, abs=0.02)


def test_the_gradient_has_the_mask_of_the_value():
    clock, dropout = make()
    clock.set([1], [8], 8, CPU)
    x = torch.ones(1, 8, 257, requires_grad=True)
    y = dropout(x)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_evaluation_changes_nothing():
    _, dropout = make()
    x = torch.randn(2, 3, 257)
    assert dropout(x) is x


def test_examples_of_any_length_keep_their_masks_side_by_side():
    clock, dropout = make()
    clock.set([5, 9], [3, 4], 10, CPU)  # three tokens of filling
    together = dropout(torch.ones(1, 10, 257, dtype=torch.float64))[0]
    assert torch.equal(together[:3], mask([5], tokens=3)[0])
    assert torch.equal(together[3:7], mask([9], tokens=4)[0])
    with clock.limited_to(3, 7):
        assert torch.equal(dropout(torch.ones(1, 4, 257, dtype=torch.float64))[0], together[3:7])


def test_flattened_tokens_are_matched_and_others_refused():
    clock, dropout = make()
    clock.set([1, 2], [8, 8], 16, CPU)
    flat = dropout(torch.ones(16, 257))
    assert torch.equal(flat, dropout(torch.ones(1, 16, 257)).reshape(16, 257))
    with pytest.raises(ExpectedError, match="mixture of experts"):
        dropout(torch.ones(5, 257))


def test_every_adapter_layer_gets_its_own(tiny_model):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    model = get_peft_model(base, LoraConfig(r=2, lora_dropout=0.1, target_modules="all-linear"))
    assert replace_dropouts(model, 0.1, DropoutClock(0)) == 2 * 7
    names = [m._name for m in model.modules() if isinstance(m, CountedDropout)]
    assert len(set(names)) == 14
