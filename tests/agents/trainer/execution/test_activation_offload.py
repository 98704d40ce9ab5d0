"""What layers save comes back to the bit from wherever it was, whatever the other layers do."""

import weakref
from itertools import pairwise

import pytest
import torch

from agents.contract.layer_plan import LayerPlan
from agents.trainer.execution.activation_offload import Arena, Offloader, Region
from agents.trainer.execution.layers import LayerStack
from agents.trainer.model.forward import Forward
from tests.agents.trainer.execution.test_compiled_families import differentiate
from tests.agents.trainer.execution.test_layers import CPU, make_executor, make_part
from tests.agents.trainer.model.families import adapt, make_family
from tests.agents.trainer.ranks import make_tiny_model

PLANS = [
    LayerPlan(num_moved=2),
    LayerPlan(num_moved=1),
    LayerPlan(num_moved=1, num_recomputed=1),
    LayerPlan(num_recomputed=2),
]


def with_offloader(executor, plan, max_bytes=1 << 29):
    module = executor._model.module
    fixed = [*module.parameters(), *module.buffers()]
    executor.layers.offloader = Offloader(CPU, fixed, max_bytes, min_bytes=64)
    executor.layers.set(plan)
    return executor


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_gradients_are_the_same_to_the_bit(tiny_model, plan):
    plain, expected = make_executor(tiny_model, LayerPlan(), compiled=False)
    moving, found = make_executor(tiny_model, LayerPlan(), compiled=False)
    with_offloader(moving, plan)
    assert moving.layers.plan == plan
    for lengths in ((30, 5, 17), (9,), (21, 4)):
        part = make_part(*lengths)
        plain.add_gradients(part)
        moving.add_gradients(part)
        assert torch.equal(found.gradients, expected.gradients)
        moved = moving.layers.offloader.max_layer_bytes
        assert (moved > sum(lengths) * 32 * 4 * 3) == (plan.num_moved > 0)


@pytest.mark.parametrize(
    "plan",
    [
        LayerPlan(num_recomputed=4),  # the layer that writes, and all that read
        LayerPlan(num_recomputed=2),  # the same layer, and one of the readers
        LayerPlan(num_moved=4),
        LayerPlan(num_moved=1, num_recomputed=2),
        LayerPlan(num_moved=2, num_recomputed=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["Gemma 3n, three readers", "Gemma 4"])
def test_gradients_into_shared_keys_and_values_are_summed_to_the_bit(family, plan):
    adapted = adapt(make_family(family), dropout=0.1)
    forward, layers = Forward(adapted, CPU), LayerStack(adapted)
    features, gradients = differentiate(adapted, forward, (13, 4, 9))
    fixed = [*adapted.module.parameters(), *adapted.module.buffers()]
    layers.offloader = Offloader(CPU, fixed, 1 << 29, min_bytes=64)
    layers.set(plan)
    assert layers.plan == plan
    layers.begin()
    found = differentiate(adapted, forward, (13, 4, 9), start_backward=layers.start_backward)
    layers.end()
    assert torch.equal(found[0], features)
    assert torch.equal(found[1], gradients)
    assert gradients.norm() > 0


def test_what_has_no_room_in_the_host_stays(tiny_model):
    plain, expected = make_executor(tiny_model, LayerPlan(), compiled=False)
    moving, found = make_executor(tiny_model, LayerPlan(), compiled=False)
    with_offloader(moving, LayerPlan(num_moved=2), max_bytes=0)
    plain.add_gradients(make_part(30, 5))
    moving.add_gradients(make_part(30, 5))
    assert torch.equal(found.gradients, expected.gradients)
    assert moving.layers.offloader.max_layer_bytes > 0


@pytest.mark.parametrize("plan", [LayerPlan(num_recomputed=12), LayerPlan(num_moved=12)], ids=str)
def test_rows_that_go_through_one_at_a_time_come_back_one_at_a_time(tmp_path, monkeypatch, plan):
    monkeypatch.setattr(Forward, "_find_obstacle", lambda *batch: "rows shall go through apart")
    model = make_tiny_model(tmp_path / "deep", num_layers=12)
    plain, expected = make_executor(model, LayerPlan(), compiled=False)
    moving, found = make_executor(model, LayerPlan(), compiled=False)
    offloader = with_offloader(moving, plan).layers.offloader
    most = 0

    def look(saved):
        nonlocal most
        away = offloader.current.tensors.values()
        most = max(most, sum(any(one.back is not None for one in some) for some in away))
        return Offloader._unpack(offloader, saved)

    monkeypatch.setattr(offloader, "_unpack", look)
    part = make_part(30, 5, 17)
    plain.add_gradients(part)
    moving.add_gradients(part)
    assert torch.equal(found.gradients, expected.gradients)
    assert 0 < most <= 5


def test_an_error_in_between_leaves_nothing_behind(tiny_model, monkeypatch):
    moving, found = make_executor(tiny_model, LayerPlan(), compiled=False)
    with_offloader(moving, LayerPlan(num_moved=2))
    moving.add_gradients(make_part(30, 5))
    expected = found.gradients.clone()
    head = type(moving._objective)
    real = head.compute

    def fail(self, *args):
        real(self, *args)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(head, "compute", fail)
        assert not moving.try_gradients(make_part(30, 5))
    offloader = moving.layers.offloader
    assert not offloader._batches
    assert not offloader._in_flight
    moving.add_gradients(make_part(30, 5))
    assert torch.equal(found.gradients, expected)


@pytest.mark.parametrize(
    ("plan", "most_leaving", "most_coming", "most_whole"),
    [
        (LayerPlan(num_recomputed=12), 5, 5, 0),
        (LayerPlan(num_moved=12), 2, 2, 2),
        (LayerPlan(num_moved=4, num_recomputed=8), 5, 3, 1),
        (LayerPlan(num_moved=4, num_recomputed=4), 5, 3, 2),  # one that keeps has gone by then
        (LayerPlan(num_moved=6, num_recomputed=6), 5, 5, 2),
    ],
    ids=str,
)
def test_few_layers_are_on_their_way_at_once(
    tmp_path, monkeypatch, plan, most_leaving, most_coming, most_whole
):
    model = make_tiny_model(tmp_path / "deep", num_layers=12)
    moving, _ = make_executor(model, LayerPlan(), compiled=False)
    offloader = with_offloader(moving, plan).layers.offloader
    away = [mode for mode in plan.modes(12) if mode != "keep"]
    whole = {turn for turn, mode in enumerate(away) if mode == "move"}
    seen = []

    def look(place):
        def looking(*args):
            leaving = {layer for _, layer, _, _ in offloader._in_flight}
            coming = {
                n
                for n, away in offloader.current.tensors.items()
                if any(a.back is not None for a in away)
            }
            seen.append([len(some) for some in (leaving, coming, leaving & whole, coming & whole)])
            return place(*args)

        return looking

    for name in ("_pack", "_unpack"):
        monkeypatch.setattr(offloader, name, look(getattr(offloader, name)))
    moving.add_gradients(make_part(30, 5))
    most = [max(counts) for counts in zip(*seen, strict=True)]
    assert 0 < most[0] <= most_leaving
    assert 0 < most[1] <= most_coming
    assert max(most[2:]) == most_whole


def test_what_the_backward_pass_needs_first_is_on_its_way_when_it_begins(tmp_path, monkeypatch):
    model = make_tiny_model(tmp_path / "deep", num_layers=12)
    moving, _ = make_executor(model, LayerPlan(), compiled=False)
    plan = LayerPlan(num_moved=4)
    offloader = with_offloader(moving, plan).layers.offloader
    turn, seen = offloader.start_backward, []

    def look(batch=None):
        turn(batch)
        seen.append((list(offloader.current.arrived), len(offloader._in_flight)))

    monkeypatch.setattr(offloader, "start_backward", look)
    moving.add_gradients(make_part(30, 5))
    assert seen == [([plan.num_moved - 1], 0)]
    assert plan.modes(12)[-1] != "move"


def test_regions_give_out_pieces_that_do_not_overlap():
    arena = Arena(3 << 29, is_pinned=False)
    one, other = Region(arena), Region(arena)
    sizes = [300 << 20, 100 << 20, 200 << 20, 7]
    pieces = [one.allocate(size) for size in sizes]
    starts = [piece.data_ptr() for piece in pieces]
    starts.append(other.allocate(500 << 20).data_ptr())
    spans = sorted(zip(starts, [*sizes, 500 << 20], strict=True))
    assert all(a + size <= b for (a, size), (b, _) in pairwise(spans))
    assert one.allocate(400 << 20) is None
    one.clear()
    assert other.allocate(400 << 20).data_ptr() == starts[0]
    assert other.allocate(1 << 30) is None


def test_a_host_that_pins_no_more_is_told_once_and_nothing_is_lost(monkeypatch, capsys):
    arena = Arena(3 << 20, is_pinned=True, chunk_bytes=1 << 20)
    empty, calls = torch.empty, []

    def pin_one(*args, pin_memory=False, **more):
        calls.append(pin_memory)
        if len(calls) > 1:
            raise RuntimeError("CUDA error: out of memory\nand more")
        return empty(*args, **more)

    monkeypatch.setattr(torch, "empty", pin_one)
    region = Region(arena)
    assert region.allocate(1 << 20) is not None
    assert region.allocate(1 << 20) is None
    assert region.allocate(1 << 20) is None
    assert arena.capacity_bytes == 1 << 20
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1
    assert "after 1 pieces of 1 MiB" in said[0]
    assert said[0].endswith("(CUDA error: out of memory).")


class PassedOn:
    """A layer stack over which micro-batches pass forward and back as in a stage of a pipeline."""

    def __init__(self, folder, plan=None):
        self.executor, flat = make_executor(folder, LayerPlan(), compiled=False)
        self.trained = list(flat.parameters.values())
        self.layers = self.executor.layers
        if plan is not None:
            module = self.executor._model.module
            fixed = [*module.parameters(), *module.buffers()]
            self.layers.offloader = Offloader(CPU, fixed, 1 << 30, holds_several=True)
            self.layers.set(plan)

    def go_forward(self, *lengths):
        batch = self.executor.prepare_micro_batch(make_part(*lengths), dropout=True)
        loss, _ = self.executor.objective.compute(batch, None, None)
        return loss, self.layers.offloaded

    def go_back(self, loss, offloaded):
        self.layers.start_backward(offloaded)
        found = torch.autograd.grad(loss, self.trained)
        self.layers.drop(offloaded)
        return found


@pytest.mark.parametrize("plan", [LayerPlan(num_recomputed=2), LayerPlan(num_moved=1)], ids=str)
def test_several_micro_batches_wait_in_the_host_at_once(tiny_model, plan):
    plain, moving = PassedOn(tiny_model), PassedOn(tiny_model, plan)
    lengths = [(30, 5), (9,), (21, 4), (17,)]
    expected = [plain.go_back(*plain.go_forward(*one)) for one in lengths]
    waiting = [moving.go_forward(*one) for one in lengths[:3]]
    offloader = moving.layers.offloader
    assert offloader._batches == [offloaded for _, offloaded in waiting]
    found = [moving.go_back(*waiting[0])]
    waiting.append(moving.go_forward(*lengths[3]))
    found += [moving.go_back(*one) for one in waiting[1:]]
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert offloader._batches == []
    assert offloader.arena._num_chunks == 3  # the first one's chunk served the last one


@pytest.mark.parametrize("holds_several", [False, True])
def test_what_a_failed_pass_has_fetched_is_free_again(holds_several):
    """The micro-batch itself is held on, as the offloader does until the next one begins."""
    offloader = Offloader(CPU, [], 1 << 29, min_bytes=64, holds_several=holds_several)
    offloader.begin()
    x = torch.randn(8, 8, requires_grad=True)
    for _ in range(3):
        with offloader.offloading([], is_whole=False):
            x = x.sin()
    batch = offloader.current
    offloader.start_backward()
    fetched = [weakref.ref(one.back) for some in batch.tensors.values() for one in some]
    assert len(fetched) == 3
    del x  # memory runs out here
    assert all(one() is not None for one in fetched)
    if holds_several:
        offloader.drop(batch)
    else:
        offloader.release()
    assert all(one() is None for one in fetched)
