"""Micro-batches of one shape are replayed; played here by doing the recorded work again."""

import pytest
import torch

from agents.contract.layer_plan import LayerPlan
from agents.trainer.autotune import make_replayer
from agents.trainer.data.examples import Example
from agents.trainer.execution import executor as compute_module
from agents.trainer.execution.cuda_graphs import GraphReplayer
from agents.trainer.objectives.dpo import Preference
from agents.trainer.objectives.objective import LOSS
from tests.agents.trainer.execution.test_layers import make_executor, make_part
from tests.agents.trainer.ranks import make_spec

ALIKE = make_part(12, 12, 12, 12, 12)
SIX = make_part(12, 12, 12, 12, 12, 12).examples
POSITIONS = [[5, 9, 3, 4, 8], [7, 1, 2, 6, 0]]


class Again:
    """Does the work again with the tensors that it had when it was recorded."""

    held_bytes = 7

    def __init__(self, clock, work, log):
        self._clock, self._work, self._log = clock, work, log
        self._tokens = clock.tokens_BT1
        log.append("record")

    def replay(self):
        new, self._clock.tokens_BT1 = self._clock.tokens_BT1, self._tokens
        self._work()
        self._clock.tokens_BT1 = new
        self._log.append("replay")

    def reset(self):
        self._log.append("drop")


@pytest.fixture
def make(tiny_model):
    def make_one(plan=None, micro_tokens=12):
        executor, flat = make_executor(tiny_model, plan or LayerPlan(), compiled=False)
        executor.micro_tokens = micro_tokens
        return executor, flat

    return make_one


def replaying(executor):
    log = []
    clock = executor._model.clock
    executor.replayer = GraphReplayer(clock, lambda work: Again(clock, work, log))
    return log


def at(part, positions):
    return compute_module.Part(examples=part.examples, places=part.places, positions=positions)


@pytest.mark.parametrize("plan", [LayerPlan(), LayerPlan(num_recomputed=1)])
def test_replayed_micro_batches_give_the_same_bits(make, plan):
    (plain, expected), (executor, found) = make(plan), make(plan)
    log = replaying(executor)
    for positions in POSITIONS:  # other places in the order: other dropouts
        for one in (plain, executor):
            one.add_gradients(at(ALIKE, positions))
        assert torch.equal(found.gradients, expected.gradients)
        assert torch.equal(executor.sums, plain.sums)
    assert log == ["record", *["replay"] * 9]
    assert executor.replayer.num_replayed == 9
    assert executor.held_bytes == 7


def test_pairs_are_replayed_with_the_reference_that_is_the_model_itself(make):
    (plain, expected), (executor, found) = make(micro_tokens=24), make(micro_tokens=24)
    log = replaying(executor)
    for one in (plain, executor):
        one._objective = Preference(one._objective._forward, beta=0.1)
    examples = [Example((*a.segments, *b.segments)) for a, b in zip(*[iter(SIX)] * 2, strict=True)]
    part = compute_module.Part(examples=examples, places=[0, 1, 2], positions=[4, 2, 9])
    for one in (plain, executor):
        one.add_gradients(part)
    assert torch.equal(found.gradients, expected.gradients)
    assert torch.equal(executor.sums, plain.sums)
    assert executor.sums[LOSS] > 0
    assert found.gradients.any()
    assert log == ["record", "replay", "replay"]


def test_the_tokens_are_those_of_the_new_micro_batch(make):
    (plain, expected), (executor, found) = make(), make()
    log = replaying(executor)
    for row in range(3):
        part = make_part(12)
        part.examples[0].segments[0].ids[:] += row
        for one in (plain, executor):
            one.add_gradients(part)
        assert torch.equal(found.gradients, expected.gradients)
    assert log == ["record", "replay", "replay"]


def test_another_shape_or_setting_or_an_evaluation_drops_what_was_recorded(make):
    (plain, expected), (executor, found) = make(), make()
    log = replaying(executor)
    executor.add_gradients(ALIKE)
    assert log == ["record", *["replay"] * 4]
    other = make_part(12, 12, 9)  # the shorter one comes last
    for one in (plain, executor):
        one.add_gradients(other)
    assert torch.equal(found.gradients, expected.gradients)
    assert log[5:] == ["replay", "replay", "drop"]
    assert executor.held_bytes == 0
    executor.add_gradients(ALIKE)
    executor.evaluate(other)
    assert log[8:] == ["record", *["replay"] * 4, "drop"]
    executor.layers.set(LayerPlan(num_recomputed=2))
    executor.add_gradients(ALIKE)
    assert log[14:] == ["record", *["replay"] * 4]
    plain.add_gradients(ALIKE)
    assert torch.equal(found.gradients, expected.gradients)


def test_recordings_are_paid_for_by_replays(make):
    executor, _ = make()
    log = replaying(executor)
    for _ in range(40):
        executor.add_gradients(make_part(12, 12, 9))
    assert log.count("record") == 2
    for _ in range(10):
        executor.add_gradients(ALIKE)
    assert log.count("record") == 2
    executor, _ = make()
    log = replaying(executor)
    for _ in range(9):
        executor.add_gradients(make_part(*[12] * 18, 9))
    assert log.count("record") == 9


def test_what_cannot_be_recorded_is_computed_as_ever(make, capfd):
    (plain, expected), (executor, found) = make(), make()
    asked = []

    def refuse(work):
        asked.append(work)
        raise torch.OutOfMemoryError("CUDA out of memory")

    executor.replayer = GraphReplayer(executor._model.clock, refuse)
    for _ in range(3):
        executor.add_gradients(ALIKE)
    plain.add_gradients(ALIKE)
    assert torch.equal(found.gradients, expected.gradients)
    assert len(asked) == 1
    executor.drop_graphs()
    executor.add_gradients(ALIKE)
    assert len(asked) == 2
    assert "launched one by one" in capfd.readouterr().err


def test_a_recording_that_fails_ends_its_copies_first(make, monkeypatch):
    """Copies of a line that is not joined again would keep the memory of the recording for ever."""
    (plain, expected), (executor, found) = make(), make()
    log = []

    def record(work):
        monkeypatch.setattr(executor, "_add", refuse)
        try:
            work()
        finally:
            monkeypatch.undo()
            log.append("ended")

    def refuse(batch, places):
        monkeypatch.setattr(executor.layers, "begin", lambda: log.append("joined"))
        raise torch.OutOfMemoryError("CUDA out of memory")

    executor.replayer = GraphReplayer(executor._model.clock, record)
    executor.add_gradients(ALIKE)
    plain.add_gradients(ALIKE)
    assert log == ["joined", "ended"]
    assert torch.equal(found.gradients, expected.gradients)


class Ready:
    """What is known of a run when its layers were compiled."""

    compiled = True

    def __init__(self, dtype=torch.bfloat16):
        self.model = self.flat = self
        self.values = torch.zeros(3)
        self.dtype = dtype
        self.clock = None


@pytest.mark.parametrize(
    ("changes", "dtype", "world_size", "expected"),
    [
        ({}, torch.bfloat16, 1, True),
        ({"objective": "dpo"}, torch.bfloat16, 1, True),
        ({}, torch.bfloat16, 2, False),
        ({"compression": "bf16"}, torch.bfloat16, 1, False),
        ({}, torch.float16, 1, False),
    ],
)
def test_what_changes_from_pass_to_pass_is_never_replayed(changes, dtype, world_size, expected):
    ready = Ready(dtype)
    found = make_replayer(make_spec(**changes), ready, ready, None, world_size=world_size)
    assert (found is not None) == expected
