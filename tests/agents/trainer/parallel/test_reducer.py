"""Buckets leave in one order, whatever comes in between, and lossy wires keep what they lose."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from agents.trainer.optim.flat_parameters import FlatParameters, cut_buckets
from agents.trainer.parallel.compression import Bf16Transport, PowerSgdTransport
from agents.trainer.parallel.reducer import ExactTransport, Reducer
from tests.draws import seed

CPU = torch.device("cpu")


class Echo:
    """A group of `count` ranks that all hold the same; sums are done when waited for."""

    def __init__(self, count=2):
        self.count = count
        self.sizes = []

    def start_sum(self, tensor):
        self.sizes.append(tensor.numel())
        return lambda: tensor.mul_(self.count)


def make_net():
    torch.manual_seed(seed(5))
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 5))


def make(wire_of=lambda flat, group: ExactTransport(group), least=4, count=2):
    net = make_net()
    flat = FlatParameters(list(net.named_parameters()), CPU, min_bucket_bytes=least)
    group = Echo(count)
    return net, flat, group, Reducer(flat, wire_of(flat, group), world_size=count)


def backward(net, number):
    torch.manual_seed(seed(number))
    net(torch.randn(2, 3)).square().sum().backward()


def expected(seeds):
    net = make_net()
    for number in seeds:
        backward(net, number)
    return {name: parameter.grad for name, parameter in net.named_parameters()}


def assert_sums(flat, seeds):
    for name, gradient in expected(seeds).items():
        assert torch.allclose(flat.parameters[name].grad, 2 * gradient, rtol=1e-6), name


def test_the_last_layers_come_first_and_norms_last():
    _, flat, _, _ = make()
    assert list(flat.views) == [
        "3.weight", "2.weight", "0.weight", "3.bias", "2.bias", "1.bias", "1.weight", "0.bias",
    ]  # fmt: skip
    assert flat.num_decayed == 30 + 24 + 12
    many = [(f"layers.{i}.w", nn.Parameter(torch.zeros(2, 2))) for i in range(12)]
    assert next(iter(FlatParameters(many, CPU).views)) == "layers.11.w"  # not layers.9


def test_the_older_layout_is_by_name():
    flat = FlatParameters(list(make_net().named_parameters()), CPU, layout="sorted")
    assert list(flat.views)[:3] == ["0.weight", "2.weight", "3.weight"]


def test_buckets_are_the_buffer_without_gap():
    buckets = cut_buckets({str(n): n + 1 for n in range(40)}, 100)
    assert [b.start for b in buckets] == [0, *(b.stop for b in buckets[:-1])]
    assert buckets[-1].stop == sum(range(41))


def test_buckets_travel_during_the_last_backward_pass_only():
    net, flat, group, reducer = make()
    assert len(flat.buckets) >= 4
    for _ in range(2):  # two steps
        group.sizes.clear()
        reducer.begin()
        flat.gradients.zero_()
        backward(net, 1)
        assert not group.sizes
        reducer.arm()
        backward(net, 2)
        assert group.sizes == [b.stop - b.start for b in flat.buckets]
        reducer.finish()
        assert_sums(flat, (1, 2))


def test_a_rank_without_work_takes_part():
    _, flat, group, reducer = make()
    reducer.begin()
    reducer.finish()
    assert group.sizes == [b.stop - b.start for b in flat.buckets]


def test_memory_that_runs_out_amid_the_last_pass_costs_no_sum():
    net, flat, group, reducer = make()
    handle = net[0].weight.register_hook(lambda grad: (_ for _ in ()).throw(MemoryError()))
    flat.gradients.zero_()
    reducer.begin()
    reducer.arm()
    with pytest.raises(MemoryError):
        backward(net, 1)
    num_sent = len(group.sizes)
    assert 0 < num_sent < len(flat.buckets)
    handle.remove()
    for _ in range(2):  # the next try runs out of memory, too, before its last pass
        reducer.begin()
        flat.gradients.zero_()
    backward(net, 7)  # whatever is computed now for what was sent does not count
    flat.gradients.zero_()
    reducer.arm()
    backward(net, 1)
    reducer.finish()
    assert group.sizes == [b.stop - b.start for b in flat.buckets]
    assert_sums(flat, (1,))


@pytest.mark.parametrize(
    "wire_of",
    [Bf16Transport, lambda flat, group: PowerSgdTransport(flat, group, 3)],
    ids=["bf16", "psgd"],
)
def test_what_a_lossy_wire_loses_comes_later(wire_of):
    """The mean over many equal steps nears the exact gradient: the loss is carried, not dropped."""
    torch.manual_seed(seed(2))
    net = nn.Sequential(nn.Linear(40, 30, bias=False), nn.Linear(30, 3))
    named = list(net.named_parameters())
    flat = FlatParameters(named, CPU, min_bucket_bytes=4)
    reducer = Reducer(flat, wire_of(flat, Echo()), world_size=2)
    gradient = torch.randn(30, 40) @ torch.diag(torch.linspace(1, 0.01, 40))
    total, first_error = torch.zeros(30, 40), 0.0
    for step in range(1, 201):
        reducer.divisor = 10.0 + step % 3  # weights differ from step to step
        flat.gradients.zero_()
        reducer.begin()
        flat.parameters["0.weight"].grad.copy_(gradient * reducer.divisor)
        reducer.finish()
        total += flat.parameters["0.weight"].grad / reducer.divisor
        error = float((total / step - 2 * gradient).norm() / (2 * gradient).norm())
        first_error = first_error or error
    assert 1e-4 < first_error < 0.9
    assert error < first_error / 5


def test_powersgd_sends_less_and_is_the_same_for_a_seed():
    def total(number):
        flat = FlatParameters([("w", nn.Parameter(torch.ones(64, 64)))], CPU)
        group = Echo()
        reducer = Reducer(flat, PowerSgdTransport(flat, group, number), world_size=2)
        torch.manual_seed(seed(1))
        flat.gradients.normal_()
        reducer.begin()
        reducer.finish()
        assert sum(group.sizes) == 2 * 64 * 4
        return flat.gradients

    assert torch.equal(total(3), total(3))
    assert not torch.equal(total(3), total(4))


def test_an_overflow_is_not_carried_over():
    net, flat, _, reducer = make(Bf16Transport)
    flat.gradients.fill_(float("inf"))
    reducer.begin()
    reducer.finish()
    assert flat.gradients.isinf().all()
    flat.gradients.zero_()
    reducer.begin()
    reducer.arm()
    backward(net, 1)
    reducer.finish()
    assert flat.gradients.isfinite().all()
