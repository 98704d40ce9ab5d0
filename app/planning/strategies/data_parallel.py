"""Plan modes in which every GPU holds the whole model: one GPU alone, or data parallel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

from agents.contract.parallel import ParallelMode
from app.planning.candidate import Candidate, StepParts
from app.planning.hardware.network import gradient_bytes, hide, ring_s, statistics_s
from app.planning.memory.forecast import Fit
from app.planning.plan_context import Case, Worker, gpu_plan, make_candidate
from app.planning.subsets import choose_subsets

# Bytes of a checkpoint per trained value.
_STATE_BYTES = {"adamw": 12.0, "adamw_8bit": 6.0, "paged_adamw_8bit": 6.0}
# Number of subsets of the nodes that are planned in full; the others are only estimated.
_MAX_SUBSETS = 6


def propose_single(case: Case) -> Iterator[Candidate]:
    """Yield the plan of each node's first GPU alone."""
    for node in case.cluster.nodes:
        for worker in case.of((node.name,))[:1]:
            yield plan_data(case, (worker,), mode="single")


def propose_data(case: Case) -> Iterator[Candidate]:
    """Yield the plans of the best subsets of the nodes, then that of all GPUs."""
    for names in choose_subsets(case, _MAX_SUBSETS):
        workers = case.of(names)
        if 1 < len(workers) < len(case.workers):
            yield plan_data(case, workers)
    if len(case.workers) > 1:
        yield plan_data(case, case.workers)


def plan_data(case: Case, workers: tuple[Worker, ...], *, mode: ParallelMode = "data") -> Candidate:
    """Return the plan in which each of these GPUs computes its share of every batch."""
    fits = [case.fit(worker, len(workers)) for worker in workers]
    speeds = [
        case.speed(worker, fit, len(workers)) for worker, fit in zip(workers, fits, strict=True)
    ]
    rows = split_rows(case.spec.batch_sequences, choose_weights(case, speeds))
    busy_s = [
        case.busy_s(worker, fit, count, len(workers))
        for worker, fit, count in zip(workers, fits, rows, strict=True)
    ]
    parts = StepParts(
        compute_s=max(busy_s),
        network_s=exposed_s(case, workers, fits, busy_s),
        optimizer_s=max(worker.pace.optimizer_s for worker in workers),
    )
    # Last, since the cost of checkpoints by time depends on the duration of the step.
    parts = replace(parts, checkpoint_s=save_s(case, parts, workers))
    gpus = tuple(
        gpu_plan(worker, fit, share=count / case.spec.batch_sequences, tokens_per_s=speed)
        for worker, fit, count, speed in zip(workers, fits, rows, speeds, strict=True)
    )
    return make_candidate(case, mode, workers, gpus, parts, busy_s)


def choose_weights(case: Case, speeds: list[float]) -> list[float]:
    """Return the shares that the spec gives, else shares proportional to the speeds."""
    given = case.spec.shares
    return list(given) if given is not None and len(given) == len(speeds) else speeds


def split_rows(num_rows: int, weights: list[float]) -> list[int]:
    """Return the sequences of a batch for each rank, split as in agents/trainer/parallel/shares.py.

    Cards with 87.9, 58.3 and 43.5 TFLOP/s, and a batch of 24:

    >>> split_rows(24, [87.9, 58.3, 43.5])
    [11, 7, 6]
    """
    scale = num_rows / sum(weights)
    cuts = [0, *(min(num_rows, round(end * scale)) for end in accumulate(weights))]
    cuts[-1] = num_rows  # rounding may leave the last cut one short
    return [stop - start for start, stop in pairwise(cuts)]


def exposed_s(
    case: Case, workers: tuple[Worker, ...], fits: list[Fit], busy_s: list[float]
) -> float:
    """Return the seconds of a step that the slowest GPU waits for other GPUs' gradients."""
    num = len(workers)
    if num == 1:
        return 0.0
    link = case.ring(workers)
    reduce_s = ring_s(gradient_bytes(case.shape, case.spec), link, num) * case.network_factor
    # The exchange overlaps with the last micro-batch; the shortest one hides the least.
    last_s = min(
        min(busy, case.busy_s(worker, fit, _last_rows(case, fit), num))
        for worker, fit, busy in zip(workers, fits, busy_s, strict=True)
    )
    # PowerSGD needs the whole gradient before it sends anything, so nothing is hidden.
    waited_s = reduce_s if case.spec.compression == "powersgd" else hide(reduce_s, last_s)
    return waited_s + statistics_s(link, num)


def _last_rows(case: Case, fit: Fit) -> int:
    return max(1, int(fit.setting.micro_tokens / case.mean_tokens))


def save_s(case: Case, parts: StepParts, workers: tuple[Worker, ...]) -> float:
    """Return the seconds that checkpoints add to each step; the first rank writes them."""
    state = _STATE_BYTES[case.spec.optimizer] * case.work.trained_values
    return case.checkpoint_s(parts.total_s, state, workers[0])
