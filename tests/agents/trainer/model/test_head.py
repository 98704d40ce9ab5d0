"""The chunked head: values and gradients of the plain computation, whatever the chunk."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it

from agents.trainer.model import head as head_module
from agents.trainer.model.head import FullLogitsHead, Head
from tests.draws import seed


@pytest.fixture(autouse=True, params=[1, 1 << 25], ids=["small-chunks", "one-chunk"])
def chunk(request, monkeypatch):
    monkeypatch.setattr(head_module, "_CHUNK_VALUES", request.param)


def make(*, bias, scale, softcap):
    draw = torch.Generator().manual_seed(seed(5))

    def values(*shape):
        one = torch.randn(*shape, generator=draw, dtype=torch.float64)
        return one.requires_grad_()

    hidden, weight = values(37, 12), values(50, 12)
    offset = values(50) if bias else None
    label = torch.randint(50, (37,), generator=draw)
    return hidden, Head(weight, offset, scale, softcap, torch.float64), label


def plain(hidden, head, label):
    logits = F.linear(hidden, head.weight_VH, head.bias_V) * head.scale
    if head.softcap:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    return -F.cross_entropy(logits, label, reduction="none")


def gradients(value, hidden, head):
    inputs = [x for x in (hidden, head.weight_VH, head.bias_V) if x is not None]
    return torch.autograd.grad(value, inputs, retain_graph=True)


KINDS = pytest.mark.parametrize(
    ("bias", "scale", "softcap"), [(False, 1.0, None), (True, 0.25, None), (True, 2.0, 3.0)]
)


@KINDS
def test_the_sum_of_losses_is_that_of_torch(bias, scale, softcap):
    hidden, head, label = make(bias=bias, scale=scale, softcap=softcap)
    expected = -plain(hidden, head, label).sum()
    found = head.sum_loss(hidden, label)
    assert found.item() == pytest.approx(expected.item(), rel=1e-13)
    for one, other in zip(
        gradients(found, hidden, head), gradients(expected, hidden, head), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)
    scaled = gradients(head.sum_loss(hidden, label, 8.0) * 0.5, hidden, head)
    torch.testing.assert_close(scaled[0], 4 * gradients(expected, hidden, head)[0])


@KINDS
def test_weights_multiply_losses_and_gradients(bias, scale, softcap):
    hidden, head, label = make(bias=bias, scale=scale, softcap=softcap)
    weight = torch.linspace(0.1, 3, 37)
    expected = -(plain(hidden, head, label) * weight).sum()
    found = head.sum_loss(hidden, label, 8.0, weight)
    assert found.item() == pytest.approx(expected.item(), rel=1e-13)
    for one, other in zip(
        gradients(found, hidden, head), gradients(expected, hidden, head), strict=True
    ):
        torch.testing.assert_close(one, 8 * other, rtol=1e-11, atol=1e-12)
    logits = F.linear(hidden, head.weight_VH, head.bias_V)
    if scale == 1.0:
        own = FullLogitsHead.sum_loss(logits, label, 8.0, weight)
        assert own.item() == pytest.approx(expected.item(), rel=1e-13)
        torch.testing.assert_close(
            torch.autograd.grad(own, hidden)[0], 8 * gradients(expected, hidden, head)[0]
        )


@KINDS
def test_log_probabilities_are_those_of_torch(bias, scale, softcap):
    hidden, head, label = make(bias=bias, scale=scale, softcap=softcap)
    factor = torch.linspace(-1, 2, 37, dtype=torch.float64)
    expected = plain(hidden, head, label)
    found = head.log_probabilities(hidden, label)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for one, other in zip(
        gradients((found * factor).sum(), hidden, head),
        gradients((expected * factor).sum(), hidden, head),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def test_evaluation_makes_no_gradient_and_no_tokens_are_no_loss():
    hidden, head, label = make(bias=False, scale=1.0, softcap=None)
    with torch.no_grad():
        assert head.sum_loss(hidden, label).grad_fn is None
    none = head.sum_loss(hidden[:0], label[:0])
    assert none.item() == 0.0


def test_the_model_s_own_logits_give_the_same():
    hidden, head, label = make(bias=False, scale=1.0, softcap=None)
    logits = F.linear(hidden, head.weight_VH)
    expected = head.sum_loss(hidden, label)
    found = FullLogitsHead.sum_loss(logits, label, 4.0)
    assert found.item() == pytest.approx(expected.item(), rel=1e-13)
    gradient = torch.autograd.grad(found, hidden)[0]
    torch.testing.assert_close(gradient, 4 * torch.autograd.grad(expected, hidden)[0])
    torch.testing.assert_close(
        FullLogitsHead.log_probabilities(hidden @ head.weight_VH.T, label),
        head.log_probabilities(hidden, label),
    )


def test_nothing_is_held_once_the_gradients_are_handed_on():
    hidden, head, label = make(bias=False, scale=1.0, softcap=None)
    loss = head.sum_loss(hidden, label)
    loss.backward()
    assert loss.grad_fn.gradients is None
