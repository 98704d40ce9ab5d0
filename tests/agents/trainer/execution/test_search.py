"""The whole search for a setting, on a card that is played: memory, retries and seconds of passes.

The card holds a 7B in NF4; bytes and seconds are near to those of an H200 under a cap. Its host
launches a pass in `start_s`, unless the pass is replayed.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from agents.contract.layer_plan import MEMORY_SHARE, LayerPlan
from agents.shared.micro_shapes import find_size, group_examples, round_up_tokens
from agents.trainer.execution import needs, tuner
from agents.trainer.execution import setting as setting_module
from agents.trainer.execution.setting import fill_spare_memory
from agents.trainer.execution.tuner import Tuner
from agents.trainer.execution.workload import Workload, count_tokens
from agents.trainer.parallel.batch import sample_steps
from tests.agents.trainer.ranks import make_spec
from tests.draws import seed

GIB = 1 << 30
LAYERS = 32
ROW = 2048
REST_BYTES = 3.8 * GIB
LAYER_S, AGAIN_S, UNPACK_S, START_S = 3.3e-3, 1.3e-3, 0.3e-3, 0.3
"""Of a row through a layer, of its second forward pass, of a layer's weights, and of launching all
kernels of a micro-batch."""
MISSING_BYTES = 0.2 * GIB


class Card:
    """A GPU with an executor, as far as the search uses them."""

    def __init__(
        self,
        limit_gib,
        *,
        tidy_share=1.0,
        start_s=START_S,
        can_replay=True,
        failure=None,
        slowness=1,
        moving_s=0.0,
        tiring_s=0.0,
        missing_bytes=MISSING_BYTES,
    ):
        self.limit_bytes = limit_gib * GIB
        self.tidy_share = tidy_share
        """Of the memory that pieces can fill before free ones are too small for anything."""
        self.start_s = start_s
        self.slowness = slowness
        self.moving_s = moving_s
        """Of a row of a layer that moves."""
        self.tiring_s = tiring_s
        """The same, when the card has worked for a second."""
        self.reserve = SimpleNamespace(lasting_bytes=0, missing_bytes=missing_bytes)
        """Of the optimizer."""
        self.failure = failure
        """Why nothing can be recorded."""
        self.busy_s = 0.0
        self.clock_s = 0.0
        self.done_s = 0.0
        """When the card will have done what was launched."""
        self.retries = 0
        self.peak_bytes = 0.0
        self.passes = []
        """Plan and rows of each micro-batch."""
        self.micro_tokens = ROW
        self.is_repeating = False
        self.replayer = (
            SimpleNamespace(num_graphs=0, num_replayed=0, failure=None) if can_replay else None
        )
        self.shortage = ""
        self.held_bytes = 0
        self.shapes = {}
        self.plan = LayerPlan()
        self.dequantized_bytes = 0.0
        self.offloader = SimpleNamespace(
            max_layer_bytes=0, arena=SimpleNamespace(capacity_bytes=64 * GIB)
        )
        self.layers = self
        self.num_layers, self.can_fill = LAYERS, True

    # What the search uses of the layers and the executor.
    def set(self, plan):
        self.plan = plan

    def empty(self):
        self.dequantized_bytes = 0.0

    def fill(self, most_bytes):
        layer_bytes = 0.4 * GIB
        self.dequantized_bytes = max(0, min(LAYERS, most_bytes // layer_bytes)) * layer_bytes

    @property
    def filled_bytes(self):
        return self.dequantized_bytes

    @property
    def dequantizable_bytes(self):
        return LAYERS * 0.4 * GIB - self.dequantized_bytes

    def drop_graphs(self):
        self.held_bytes, self.busy_s = 0, 0.0
        self.shapes = {}
        if self.replayer:
            self.replayer.num_graphs = 0

    def make_room_for_graphs(self):
        return False  # all recordings fit as large as the first one

    def add_gradients(self, part):
        assert self.try_gradients(part)

    def release_memory(self):
        pass

    def try_gradients(self, part):
        lengths = [one.num_tokens for one in part.examples]
        for group in group_examples(lengths, self.micro_tokens, is_filled=self.is_repeating):
            chosen = [lengths[place] for place in group]
            tokens = sum(chosen)
            if self.is_repeating:
                tokens = find_size(chosen, self.micro_tokens, ROW)
            if not self.try_micro_batch(round_up_tokens(tokens) / ROW):
                return False
        return True

    def synchronize(self):
        self.clock_s = max(self.clock_s, self.done_s)

    def try_micro_batch(self, rows):
        rest_bytes = REST_BYTES + self.dequantized_bytes
        in_flight = self.plan.count_in_flight(LAYERS)
        num_moved, num_recomputed = self.plan.num_moved, self.plan.num_recomputed
        num_kept = LAYERS - num_moved - num_recomputed
        pass_bytes = (0.1 + (0.4 if num_recomputed else 0.3) * rows) * GIB
        pass_bytes += (num_kept + in_flight) * 0.2 * rows * GIB
        self.offloader.max_layer_bytes = (0.2 if num_moved else 0.016) * rows * GIB
        self.passes.append((self.plan, rows))
        self.peak_bytes = rest_bytes + pass_bytes
        if self.peak_bytes > self.limit_bytes:
            self.retries += 1
            return False
        is_tidy = self.peak_bytes <= self.tidy_share * self.limit_bytes
        seconds = self.slowness * rows * (LAYERS * LAYER_S + num_recomputed * AGAIN_S)
        is_tired = self.busy_s > 1.0
        seconds += rows * num_moved * (self.tiring_s if is_tired else self.moving_s)
        seconds += (LAYERS - self.dequantized_bytes / (0.4 * GIB)) * UNPACK_S
        start_s = 0.0 if self.replay(rows) else self.start_s
        if start_s and not is_tidy:  # the allocator has to find memory
            self.retries += 5
            seconds *= 1.4
        # The host launches while the card computes what was launched before.
        began_s = max(self.done_s, self.clock_s)
        self.clock_s += start_s
        self.done_s = max(began_s + seconds, self.clock_s)
        self.busy_s += seconds
        return True

    def replay(self, rows):
        """Record what occurs for the second time; tell whether it was replayed."""
        if not (self.is_repeating and self.replayer):
            return False
        count = self.shapes[rows] = self.shapes.get(rows, 0) + 1
        if count == 1:
            return False
        if self.failure:
            self.replayer.failure = self.failure
            return False
        if count == 2:
            self.replayer.num_graphs += 1
            self.held_bytes = self.peak_bytes - REST_BYTES - self.dequantized_bytes
            self.clock_s += self.start_s
        self.replayer.num_replayed += 1
        return True

    def rate(self, setting, workload):
        """Return the tokens per second of many real steps, and retries on the way."""
        setting_module.apply_setting(self, setting)
        largest = workload.choose_part(setting.micro_tokens)
        self.try_gradients(largest)
        fill_spare_memory(self, "cuda", largest, self.reserve)
        steps = [workload.choose_step(number, 1e9) for number in range(3)]
        for _ in range(3):
            for step in steps:
                self.try_gradients(step)
        self.synchronize()
        began_s, before = self.clock_s, self.retries
        for step in steps:
            self.try_gradients(step)
            self.synchronize()
        seconds = self.clock_s - began_s
        return sum(map(count_tokens, steps)) / seconds, self.retries - before


class Rows:
    """Data of a run by its lengths."""

    def __init__(self, lengths):
        self.num_tokens = np.array(lengths, dtype=np.int32)
        self.parts = (len(lengths),)

    def __len__(self):
        return len(self.num_tokens)

    def __getitem__(self, index):
        return SimpleNamespace(num_tokens=int(self.num_tokens[index]))


ALIKE = Rows([ROW] * 64)
CHAT = Rows(
    np.minimum(ROW, np.random.default_rng(seed(7)).lognormal(6.4, 0.8, 400).astype(int) + 8)
)


@pytest.fixture
def play(monkeypatch):
    def play(card, rows=ALIKE, *, recompute="auto", is_kept=False):
        fakes = {
            "synchronize": lambda device: card.synchronize(),
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda device: None,
            "memory_allocated": lambda device: REST_BYTES + card.dequantized_bytes,
            "max_memory_allocated": lambda device: card.peak_bytes,
            "memory_stats": lambda device: {"num_alloc_retries": card.retries},
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(setting_module, "read_most_bytes", lambda device: card.limit_bytes)
        monkeypatch.setattr(needs, "measure_bus", lambda device: 40e9)
        monkeypatch.setattr(tuner.time, "perf_counter", lambda: card.clock_s)
        monkeypatch.setattr(tuner.time, "monotonic", lambda: card.clock_s)
        workload = Workload(rows, sample_steps(make_spec(batch_sequences=16), rows))
        most = int(workload.mean_tokens)
        found = Tuner(
            card, "cuda", workload, max_tokens=most, recompute=recompute, reserve=card.reserve,
            is_kept=is_kept,
        )  # fmt: skip
        return found, found.choose(), workload

    return play


@pytest.mark.parametrize("limit_gib", [6, 8, 12, 16, 24])
@pytest.mark.parametrize(("tidy_share", "start_s"), [(1.0, 0.0), (0.88, START_S), (1.0, START_S)])
@pytest.mark.parametrize("rows", [ALIKE, CHAT], ids=["alike", "chat"])
def test_what_is_chosen_is_the_fastest_and_as_fast_as_believed(
    play, limit_gib, tidy_share, start_s, rows
):
    card = Card(limit_gib, tidy_share=tidy_share, start_s=start_s)
    tuner, chosen, workload = play(card, rows)
    last = tuner.finalists or tuner.tried
    assert chosen.tokens_per_s == max(setting.tokens_per_s for setting in last)
    rate, retries = card.rate(chosen, workload)
    assert retries == 0
    assert rate == pytest.approx(chosen.tokens_per_s, rel=0.08)
    assert card.peak_bytes <= MEMORY_SHARE * card.limit_bytes + 1
    # Large micro-batches take the card longer than their launches the host.
    assert chosen.is_repeating == (start_s > 0 and chosen.micro_tokens <= 2 * ROW)


@pytest.mark.parametrize("limit_gib", [6, 12, 24])
@pytest.mark.parametrize("rows", [ALIKE, CHAT], ids=["alike", "chat"])
def test_no_setting_is_faster_in_a_run_than_the_chosen_one(play, limit_gib, rows):
    card = Card(limit_gib)
    tuner, chosen, workload = play(card, rows)
    assert len(tuner.tried) >= 2
    best, _ = card.rate(chosen, workload)
    for setting in tuner.tried:
        rate, _ = card.rate(setting, workload)
        assert best > 0.94 * rate, setting
        assert rate == pytest.approx(setting.tokens_per_s, rel=0.1), setting


def test_layers_move_where_that_makes_room_for_weights(play, monkeypatch):
    moving, staying = Card(24), Card(24)
    _, chosen, workload = play(moving)
    rate, _ = moving.rate(chosen, workload)
    assert chosen.num_recomputed == 0 < chosen.num_moved
    monkeypatch.setattr(Tuner, "_offload_for_weights", lambda self, needs, best: best)
    other = play(staying)[1]
    assert other.num_moved == 0
    assert rate > other.tokens_per_s


def test_where_moving_costs_more_than_it_brings_nothing_moves(play):
    assert play(Card(24, moving_s=0.01))[1].num_moved == 0


def test_what_is_fast_in_a_burst_only_is_not_chosen(play, monkeypatch):
    card = Card(24, tiring_s=0.002)
    tuner, chosen, workload = play(card)
    lasting, _ = card.rate(chosen, workload)
    assert len(tuner.finalists) == 2
    assert max(one.num_moved for one in tuner.finalists) > 0 == chosen.num_moved
    assert chosen.tokens_per_s == pytest.approx(lasting, rel=0.02)


def test_memory_that_cannot_be_filled_is_left_and_costs_nothing_else(play):
    tidy = play(Card(6, start_s=0.0))[1]
    card = Card(6, start_s=0.0, tidy_share=0.8)
    _, untidy, workload = play(card)
    assert untidy.tokens_per_s > 0.7 * tidy.tokens_per_s
    assert card.rate(untidy, workload)[1] == 0


def test_passes_are_replayed_where_the_host_is_slower_than_the_card(play):
    quick, slow = (play(Card(8, start_s=start_s))[1] for start_s in (0.0, 5.0))
    stuck = play(Card(8, start_s=5.0, can_replay=False))[1]
    assert slow.tokens_per_s > 0.9 * quick.tokens_per_s
    assert slow.is_repeating
    assert not quick.is_repeating
    assert stuck.tokens_per_s < 0.2 * slow.tokens_per_s


def test_a_card_without_memory_to_spare_replays_the_smallest_setting(play):
    card = Card(4.31, start_s=5.0)
    _, chosen, workload = play(card)
    assert (chosen.micro_tokens, chosen.num_recomputed, chosen.is_repeating) == (ROW, LAYERS, True)
    assert card.rate(chosen, workload)[0] == pytest.approx(chosen.tokens_per_s, rel=0.1)


def test_what_cannot_be_recorded_is_launched(play):
    card = Card(12, failure="operation not permitted when stream is capturing")
    tuner, chosen, workload = play(card, CHAT)
    assert not chosen.is_repeating
    assert sum(one.is_repeating for one in tuner.tried) <= 1
    assert card.rate(chosen, workload)[0] == pytest.approx(chosen.tokens_per_s, rel=0.1)


@pytest.mark.parametrize(("limit_gib", "recomputes"), [(48, False), (24, True), (12, True)])
@pytest.mark.parametrize("rows", [ALIKE, CHAT], ids=["alike", "chat"])
def test_layers_that_recompute_are_left_out_until_a_size_needs_them(
    play, limit_gib, recomputes, rows
):
    card = Card(limit_gib)
    _, chosen, _ = play(card, rows, is_kept=True)
    first = next((rows for plan, rows in card.passes if plan.num_recomputed), None)
    # What the compiler makes depends on the first size that it sees.
    assert first == (1 if recomputes else None)
    usual = play(Card(limit_gib), rows)[1]
    assert replace(chosen, tokens_per_s=0) == replace(usual, tokens_per_s=0)
    assert chosen.tokens_per_s == pytest.approx(usual.tokens_per_s, rel=0.01)


@pytest.mark.parametrize(("recompute", "num_recomputed"), [("all", LAYERS), ("none", 0)])
def test_what_a_run_forbids_is_not_tried_once(play, recompute, num_recomputed):
    card = Card(24)
    _, chosen, _ = play(card, recompute=recompute)
    assert {plan.num_recomputed for plan, _ in card.passes} == {num_recomputed}
    assert chosen.micro_tokens >= ROW


def test_a_slow_card_is_not_kept_busy_for_long(play):
    card = Card(8, slowness=17)
    tuner, *_ = play(card)
    assert card.clock_s < 150
    assert not tuner.finalists  # a pass shows what it sustains
