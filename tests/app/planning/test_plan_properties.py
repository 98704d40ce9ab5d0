"""What holds of every plan, whatever the cluster, the model and the run file."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agents.contract.spec import AdapterKind
from agents.shared.cards import list_cards
from app.planning.hardware.cluster import Cluster, PlannedNode, ethernet
from app.planning.plan import Plan, PlanRequest, make_plan
from app.planning.strategies.data_parallel import split_rows
from app.planning.strategies.pipeline_schedule import split_layers, time_pipeline
from tests.app.planning.clusters import ask, make_node

NODES = st.lists(
    st.tuples(
        st.lists(st.sampled_from(list_cards()), min_size=1, max_size=2),
        st.floats(min_value=4, max_value=96),
    ),
    min_size=1,
    max_size=4,
)
PLANS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # a busy PC is no mistake of a plan
KINDS: st.SearchStrategy[AdapterKind] = st.sampled_from(("lora", "qlora", "full"))


def build(nodes: list[tuple[list[str], float]], gbit: float, more_gib: float = 0.0) -> Cluster:
    made: list[PlannedNode] = [
        make_node(f"pc{i}", *cards, memory_gib=memory + more_gib)
        for i, (cards, memory) in enumerate(nodes)
    ]
    return Cluster(nodes=tuple(made), default_link=ethernet(gbit))


@st.composite
def questions(draw: st.DrawFn) -> tuple[PlanRequest, PlanRequest]:
    """Return a question, and the same with more memory on every card."""
    nodes, gbit = draw(NODES), draw(st.floats(min_value=0.05, max_value=100))
    kind, size = draw(KINDS), draw(st.sampled_from(("7B", "13B", "70B")))
    sequence = draw(st.sampled_from((512, 2048, 8192)))
    batch = draw(st.integers(min_value=1, max_value=40))
    question = ask(build(nodes, gbit), size, kind, sequence_tokens=sequence, batch_sequences=batch)
    more = draw(st.floats(min_value=0.5, max_value=64))
    return question, replace(question, cluster=build(nodes, gbit, more))


def expect_sums(question: PlanRequest, plan: Plan) -> None:
    """Check that each plan's parts add up to its whole."""
    for one in (plan.chosen, *plan.others):
        if one is None:
            continue
        parts = one.parts_s
        named = (parts.compute_s, parts.network_s, parts.bubble_s, parts.optimizer_s)
        total = sum((*named, parts.input_s, parts.checkpoint_s))
        assert one.step_s == pytest.approx(total)
        assert min(*named, parts.input_s, parts.checkpoint_s) >= 0
        assert sum(gpu.share for gpu in one.gpus) == pytest.approx(1)
        if one.mode != "pipeline":
            rows = [gpu.share * question.spec.batch_sequences for gpu in one.gpus]
            assert all(abs(row - round(row)) < 1e-6 for row in rows)
        assert not one.fits or all(gpu.fits for gpu in one.gpus)
        for gpu in one.gpus:
            assert gpu.memory.expected_bytes == sum(gpu.memory.parts.values())
            assert min(gpu.memory.parts.values()) >= 0
    if plan.chosen is not None:
        assert plan.chosen.fits
        assert plan.chosen.runnable


@given(questions())
@PLANS
def test_every_plan_adds_up_and_more_memory_never_makes_it_worse(
    pair: tuple[PlanRequest, PlanRequest],
) -> None:
    """But by one sequence: a batch is cut at whole ones, as the trainer does, whatever the speeds.

    The trainer's search has a patience of 2 %.
    """
    plans = [make_plan(question) for question in pair]
    for question, plan in zip(pair, plans, strict=True):
        expect_sums(question, plan)
    less, more = (plan.chosen for plan in plans)
    if less is not None:
        assert more is not None
        slowest = min(gpu.tokens_per_s for gpu in more.gpus if gpu.share)
        sequence_s = pair[0].data.mean_tokens / slowest if pair[0].data.mean_tokens else 0.0
        assert more.step_s <= less.step_s * 1.02 + sequence_s


@given(
    st.integers(min_value=1, max_value=200),
    st.lists(st.floats(min_value=0.01, max_value=1e6), min_size=1, max_size=16),
)
def test_shares_sum_to_the_global_batch(num_rows: int, weights: list[float]) -> None:
    rows = split_rows(num_rows, weights)

    assert sum(rows) == num_rows
    assert min(rows) >= 0


@given(
    st.integers(min_value=2, max_value=9),
    st.lists(
        st.tuples(st.floats(min_value=0.1, max_value=10), st.integers(min_value=1, max_value=9)),
        min_size=2,
        max_size=4,
    ),
)
@settings(max_examples=60)
def test_layers_are_split_as_well_as_trying_everything_would(
    num_layers: int, stages: list[tuple[float, int]]
) -> None:
    seconds, most = [one for one, _ in stages], [room for _, room in stages]
    counts = split_layers(num_layers, seconds, most, (0.0, 0.3))
    every = [
        some for some in product(*(range(1, room + 1) for room in most)) if sum(some) == num_layers
    ]

    assert (counts is None) == (not every)
    if counts is not None:
        assert counts in every
        assert _slowest(counts, seconds) <= min(_slowest(some, seconds) for some in every) + 1e-6


def _slowest(counts: tuple[int, ...], seconds: list[float]) -> float:
    times = [count * second for count, second in zip(counts, seconds, strict=True)]
    return max((*times[:-1], times[-1] + 0.3))


@given(
    st.lists(st.floats(min_value=0.1, max_value=5), min_size=2, max_size=8),
    st.floats(min_value=0, max_value=2),
    st.integers(min_value=1, max_value=64),
)
def test_a_pipeline_is_never_faster_than_its_slowest_stage(
    stages_s: list[float], transfer_s: float, num_micro: int
) -> None:
    free = time_pipeline(stages_s, [0.0] * (len(stages_s) - 1), num_micro)
    slowed = time_pipeline(stages_s, [transfer_s] * (len(stages_s) - 1), num_micro)

    assert free.total_s >= num_micro * max(stages_s)
    assert slowed.total_s >= free.total_s - 1e-9
    assert free.network_s == pytest.approx(0)
