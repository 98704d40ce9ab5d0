"""Plan modes in which every GPU holds the whole model: one GPU alone, or data parallel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from agents.contract.parallel import ParallelMode
from app.planning.candidate import Candidate, StepParts
from app.planning.hardware.network import gradient_bytes, hide, ring_s, statistics_s
from app.planning.memory.forecast import Fit
from app.planning.plan_context import Case, Worker, gpu_plan, make_candidate
from app.planning.split import split_rows
from app.planning.subsets import compute_best, estimate_teams, list_teams, remember

# Bytes of a checkpoint per trained value.
_STATE_BYTES = {"adamw": 12.0, "adamw_8bit": 6.0, "paged_adamw_8bit": 6.0}


def propose_single(case: Case, bar_s: float) -> Iterator[Candidate]:
    """Yield the plan of each GPU alone."""
    for worker in case.workers:
        yield plan_data(case, case.team((worker,)), mode="single")


def propose_data(case: Case, bar_s: float) -> Iterator[Candidate]:
    """Yield the plans of the teams that may be the fastest, then that of all GPUs."""

    @remember
    def rate(worker: Worker, num: int) -> tuple[float, float] | None:
        # As one GPU alone: a team's micro-batches are never larger, so this bounds its speed.
        fit = case.fit(worker, 1)
        if not fit.fits:
            return None
        speed = case.speed(worker, fit, 1)
        return speed, fit.setting.micro_tokens / speed

    if len(case.workers) < 2:
        return
    teams = list_teams(case, (worker for worker in case.workers if case.fit(worker, 1).fits))
    scored = estimate_teams(case, teams, rate)
    named = [one for one in scored if case.is_demanded(one[1])]
    found = compute_best(case, named, lambda team: plan_data(case, team))
    if len(named) < len(scored):
        found += compute_best(case, scored, lambda team: plan_data(case, team))
    yield from found
    if all(len(one.gpus) < len(case.workers) for one in found):
        yield plan_data(case, case.team(case.workers))


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
    """Return the seconds that checkpoints add to each step; one rank writes them."""
    state = _STATE_BYTES[case.spec.optimizer] * case.work.trained_values
    # Each may be the first rank, and the order of PCs is to change nothing.
    slowest = min(workers, key=lambda worker: worker.rates.to_host_bytes_per_s)
    return case.checkpoint_s(parts.total_s, state, slowest)
