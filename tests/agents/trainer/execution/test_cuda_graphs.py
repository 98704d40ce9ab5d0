"""Micro-batches of one shape are replayed; played here by doing the recorded work again."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from agents.contract.layer_plan import LayerPlan
from agents.trainer.autotune import make_replayer, record_shapes
from agents.trainer.data.examples import Example
from agents.trainer.execution import cuda_graphs as graphs_module
from agents.trainer.execution import executor as compute_module
from agents.trainer.execution.cuda_graphs import GraphReplayer
from agents.trainer.execution.shapes import ShapeGrid
from agents.trainer.execution.workload import Workload
from agents.trainer.objectives.dpo import Preference
from agents.trainer.parallel.batch import sample_steps
from tests.agents.trainer.execution.all_examples import AllExamples
from tests.agents.trainer.execution.test_layers import make_executor, make_part
from tests.agents.trainer.ranks import make_spec

ALIKE = make_part(12, 12, 12, 12, 12)
POSITIONS = [[5, 9, 3, 4, 8], [7, 1, 2, 6, 0]]


class Again:
    """Does the work again with the tensors that it had when it was recorded."""

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


class Recorder:
    """Records by remembering what to do."""

    held_bytes = 7

    def __init__(self, clock):
        self.log = []
        self._clock = clock

    def record(self, work):
        return Again(self._clock, work, self.log)

    def sharing(self):
        return nullcontext()

    def release(self):
        self.log.append("release")


class Refusing(Recorder):
    """Records nothing."""

    def __init__(self, clock, error):
        super().__init__(clock)
        self._error = error

    def record(self, work):
        self.log.append("asked")
        raise self._error


@pytest.fixture
def make(tiny_model):
    def make_one(plan=None, micro_tokens=12):
        executor, flat = make_executor(tiny_model, plan or LayerPlan(), compiled=False)
        executor.micro_tokens = micro_tokens
        return executor, flat

    return make_one


def replaying(executor, recorder=None):
    """Let micro-batches repeat; the log tells what was recorded and replayed."""
    clock = executor._model.clock
    recorder = recorder or Recorder(clock)
    executor.grid = ShapeGrid(AllExamples([*ALIKE.examples, *make_part(50, 31, 20).examples]), 50)
    executor.is_repeating = True
    executor.replayer = GraphReplayer(clock, recorder)
    return recorder.log


def at(part, positions):
    return compute_module.BatchPart(examples=part.examples, places=part.places, positions=positions)


@pytest.mark.parametrize("plan", [LayerPlan(), LayerPlan(num_recomputed=1)])
def test_replayed_micro_batches_give_the_numbers_of_their_own_size(make, plan):
    """Other rows, lengths and dropouts: one shape, with padding that counts for nothing."""
    (plain, expected), (executor, found) = make(plan, 120), make(plan, 120)
    log = replaying(executor)
    chat = [make_part(*lengths) for lengths in ((50, 31, 20, 9), (48, 44, 17), (12, 30, 40, 20))]
    for number in range(6):
        part = at(chat[number % 3], [number + place for place in range(4)])
        for one in (plain, executor):
            one.add_gradients(part)
        error = (found.gradients - expected.gradients).abs().max()
        assert error < 1e-5 * expected.gradients.abs().max()
        assert torch.allclose(executor.sums, plain.sums, rtol=1e-6)
    assert log == ["record", *["replay"] * 5]
    assert executor.held_bytes == 7


def weigh(part, start):
    """Return the part with other weights for each start."""
    weighted = []
    for example in part.examples:
        (one,) = example.segments
        weights = (np.arange(start, start + len(one.ids)) % 4 / 4 + 0.25).astype(np.float32)
        weighted.append(Example((replace(one, weights=weights),)))
    return compute_module.BatchPart(examples=weighted, places=part.places, positions=part.positions)


def test_a_replay_reads_the_weights_of_its_own_tokens(make):
    (plain, expected), (executor, found) = make(micro_tokens=120), make(micro_tokens=120)
    log = replaying(executor)
    chat = make_part(50, 31, 20, 9)
    for part in (weigh(chat, 0), weigh(chat, 1), weigh(chat, 2), chat, chat):
        for one in (plain, executor):
            one.add_gradients(part)
        error = (found.gradients - expected.gradients).abs().max()
        assert error < 1e-5 * expected.gradients.abs().max()
        assert torch.allclose(executor.sums, plain.sums, rtol=1e-6)
    # A pass without weights has a recording of its own.
    assert log == ["record", "replay", "replay", "record", "replay"]


def test_a_shape_that_was_launched_gives_the_same_bits_when_it_is_replayed(make):
    (launched, expected), (executor, found) = make(), make()
    log = replaying(executor)
    replaying(launched, Refusing(launched._model.clock, RuntimeError("refused")))
    for positions in POSITIONS:  # other places in the order: other dropouts
        for one in (launched, executor):
            one.add_gradients(at(ALIKE, positions))
        assert torch.equal(found.gradients, expected.gradients)
        assert torch.equal(executor.sums, launched.sums)
    assert log == ["record", *["replay"] * 9]
    assert executor.replayer.num_replayed == 9


@pytest.mark.parametrize("has_table", [False, True])
def test_pairs_of_a_padded_shape_have_the_sums_of_their_own(make, has_table):
    (plain, expected), (executor, found) = make(micro_tokens=70), make(micro_tokens=70)
    log = replaying(executor)
    table = torch.tensor([[-90.0, -80.0], [-70.0, -95.0], [-60.0, -66.0]], dtype=torch.float64)
    for one in (plain, executor):
        one._objective = Preference(
            one._objective._forward, beta=0.1, reference_P2=table if has_table else None
        )
        one.sums = torch.zeros(len(one._objective.sums), dtype=torch.float64)
    rows = make_part(12, 20, 9, 31, 17, 12).examples
    examples = [Example((*a.segments, *b.segments)) for a, b in zip(*[iter(rows)] * 2, strict=True)]
    for positions in ([4, 2, 9], [5, 6, 7]):
        part = compute_module.BatchPart(examples=examples, places=[0, 1, 2], positions=positions)
        for one in (plain, executor):
            one.add_gradients(part)
        error = (found.gradients - expected.gradients).abs().max()
        assert error < 1e-5 * expected.gradients.abs().max()
        assert torch.allclose(executor.sums, plain.sums, rtol=1e-6)
    assert executor.sums[0] > 0
    assert "replay" in log


def test_each_shape_keeps_its_recording(make):
    executor, _ = make(micro_tokens=120)
    log = replaying(executor)
    small, large = make_part(12, 9), make_part(50, 31, 20, 9)
    for _ in range(3):
        executor.add_gradients(small)
        executor.add_gradients(large)
    assert log == ["record", "replay"] * 2 + ["replay"] * 2
    assert executor.replayer.num_graphs == 2
    executor.evaluate(large)
    executor.add_gradients(small)
    assert log[-1] == "replay"
    executor.layers.set(LayerPlan(num_recomputed=2))
    executor.add_gradients(small)
    executor.add_gradients(small)
    assert log[-2:] == ["record", "replay"]
    executor.drop_graphs()
    assert log[-4:] == ["drop"] * 3 + ["release"]
    assert executor.replayer.num_graphs == 0


def test_usual_shapes_are_recorded_before_they_occur(make):
    executor, _ = make(micro_tokens=120)
    log = replaying(executor)
    examples = AllExamples(make_part(50, 31, 20, 9, 44, 12, 17, 8, 40).examples)
    workload = Workload(examples, sample_steps(make_spec(batch_sequences=4), examples))
    record_shapes(executor, workload)
    assert executor.replayer.num_graphs == log.count("record") > 1
    before = log.count("record")
    for number in range(3):
        executor.add_gradients(workload.choose_step(number, 1e9))
    assert log.count("record") == before
    executor.is_repeating = False
    executor.drop_graphs()
    record_shapes(executor, workload)
    assert log.count("record") == before


@pytest.mark.parametrize("begins_with_usual", [True, False])
def test_weights_in_spare_memory_give_way_to_recordings(make, monkeypatch, begins_with_usual):
    """Recordings of unlike sizes cut the memory into pieces that fit nothing else."""
    executor, _ = make(micro_tokens=120)
    (plain, expected) = make(micro_tokens=120)
    recorder, filled = Recorder(executor._model.clock), [100.0]
    record = recorder.record

    def record_beside_weights(work):
        if executor.replayer.num_graphs and filled[-1] > 30:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return record(work)

    monkeypatch.setattr(recorder, "record", record_beside_weights)
    kind = type(executor.layers)
    monkeypatch.setattr(kind, "filled_bytes", property(lambda layers: filled[-1]))
    monkeypatch.setattr(kind, "fill", lambda layers, most: filled.append(most))
    log = replaying(executor, recorder)
    examples = AllExamples(make_part(50, 31, 20, 9, 44, 12, 17, 8, 40).examples)
    workload = Workload(examples, sample_steps(make_spec(batch_sequences=4), examples))
    steps = [workload.choose_step(number, 1e9) for number in range(3)]
    if begins_with_usual:
        record_shapes(executor, workload)
        assert filled == [100, 50, 25]
    for step in steps * 6:
        executor.add_gradients(step)
    assert filled == [100, 50, 25]
    before = log.count("record"), log.count("replay")
    for step in steps:
        executor.add_gradients(step)
    assert log.count("record") == before[0]
    assert log.count("replay") > before[1]
    found = executor._flat.gradients
    plain.add_gradients(steps[-1])
    assert torch.allclose(found, expected.gradients, rtol=1e-4, atol=1e-6)


def test_the_last_micro_batch_is_launched_where_it_is_sent_meanwhile(make):
    executor, _ = make()
    log = replaying(executor)
    overlap = SimpleNamespace(begin=lambda: None, arm=lambda: True)
    for _ in range(3):
        executor.add_gradients(ALIKE, overlap)
    assert log == ["record", *["replay"] * 11]  # 15 less the first and the last of each


def test_recordings_are_few_and_paid_for_by_replays(make, monkeypatch):
    monkeypatch.setattr(graphs_module, "_MAX_FREE_RECORDINGS", 2)
    monkeypatch.setattr(graphs_module, "_MAX_GRAPHS", 2)
    executor, _ = make(micro_tokens=1000)
    log = replaying(executor)
    parts = [make_part(*[12] * count) for count in (1, 12, 22, 33)]
    for _ in range(3):
        for part in parts:
            executor.add_gradients(part)
    assert log.count("record") == 2
    for _ in range(8):
        executor.add_gradients(parts[0])
    executor.add_gradients(parts[3])
    assert log.count("record") == 3
    assert log.count("drop") == 1


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), None),
        (RuntimeError("operation not permitted\nmore"), "operation not permitted"),
    ],
)
def test_what_cannot_be_recorded_is_launched(make, capfd, error, failure):
    (plain, expected), (executor, found) = make(), make()
    log = replaying(executor, Refusing(executor._model.clock, error))
    for _ in range(3):
        executor.add_gradients(ALIKE)
    plain.add_gradients(ALIKE)
    assert torch.allclose(found.gradients, expected.gradients, rtol=1e-5, atol=1e-7)
    assert log == ["asked", "release"]
    assert executor.replayer.failure == failure
    executor.drop_graphs()
    executor.add_gradients(ALIKE)
    assert log.count("asked") == 2
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

    def refuse(batch, known):
        monkeypatch.setattr(executor.layers, "begin", lambda: log.append("joined"))
        raise torch.OutOfMemoryError("CUDA out of memory")

    recorder = Recorder(executor._model.clock)
    recorder.record = record
    replaying(executor, recorder)
    executor.add_gradients(ALIKE)
    plain.add_gradients(ALIKE)
    assert log == ["joined", "ended"]
    assert torch.allclose(found.gradients, expected.gradients, rtol=1e-5, atol=1e-7)


def test_after_a_recording_that_failed_others_are_made_in_new_memory(make, monkeypatch):
    """torch may take the memory of a failed recording as recording for ever."""
    monkeypatch.setattr(graphs_module, "_MAX_FREE_RECORDINGS", 3)
    executor, _ = make(micro_tokens=120)
    recorder = Recorder(executor._model.clock)
    log = replaying(executor, recorder)
    small, large = make_part(12, 9), make_part(50, 31, 20, 9)
    record, is_whole = recorder.record, True

    def record_in_new_memory(work):
        nonlocal is_whole
        if executor.replayer.num_graphs:
            is_whole = False
            raise torch.OutOfMemoryError("CUDA out of memory")
        assert is_whole or "release" in log
        return record(work)

    recorder.record = record_in_new_memory
    for part in (small, small, large, large, small, large, small):
        executor.add_gradients(part)
    assert log == ["record", "replay", "drop", "release", "record", "replay", "replay"]
    assert executor.replayer.failure is None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"device": "cpu"}, False),
        ({"compiled": False}, False),
        ({"is_flat": False}, False),
        ({"stage": "of a pipeline"}, False),
        ({"stream": "of layers"}, False),
    ],
)
def test_what_waits_for_the_device_is_never_recorded(change, expected):
    case = {"device": "cuda", "compiled": True, "is_flat": True, "stage": None, "stream": None}
    case |= change
    model = SimpleNamespace(clock=None, stage=case["stage"])
    state = SimpleNamespace(is_flat=case["is_flat"], model=model)
    layers = SimpleNamespace(compiled=case["compiled"], stream=case["stream"])
    assert (make_replayer(state, layers, torch.device(case["device"])) is not None) == expected
