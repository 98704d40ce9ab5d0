"""Combine a stored run and its journals into the snapshot that window and command line show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agents.contract.run import RankPlacement
from app.events import ACTIVE_STATES, PhaseProgress, RankProgress, RunSnapshot, StepRecord
from app.runs.journals.attempt_history import AttemptHistory, RankHistory
from app.runs.journals.history import RunHistory
from app.storage.runs import RunRecord, StoredProgress
from app.text import show_share

# In the order in which a run passes them.
_PHASES = (
    "loading", "imported", "tokenizing", "weights", "layers", "preparing", "reference", "tuning",
    "compiling", "warmup", "training", "adapting", "evaluating", "saving", "paused", "cooling",
    "tracing", "regrouping", "done",
)  # fmt: skip
# A training run shows its phase until its first step is done.
_BEFORE_STEPS = _PHASES[: _PHASES.index("training") + 1]
# Display names of phases whose own name is unclear.
_NAMES = {
    "loading": "starting the trainer",
    "imported": "starting the trainer",
    "tokenizing": "reading the data",
    "reference": "scoring the answers",
    "warmup": "measuring the speed",
    "weights": "loading weights",
    "layers": "loading layers",
    "tuning": "trying settings",
    "adapting": "adapting to the card",
    "cooling": "waiting for a GPU to cool down",
    "paused": "waiting until the last checkpoint can be saved",
}


def make_progress(history: RunHistory, attempt: int) -> StoredProgress:
    """Return the progress of a run according to its journals."""
    now = history.attempt(attempt)
    # Until the newest attempt has finished a step, older attempts have the newest loss; but its
    # step is the one it resumed from, not the later one that they had reached.
    attempts = [history.attempts[number] for number in sorted(history.attempts)]
    newest = next((a.newest for a in reversed(attempts) if a.newest is not None), None)
    first = next((a.first for a in attempts if a.first is not None), None)
    totals = [a.total_steps for a in attempts if a.total_steps is not None]
    resumed = now.first_step if now.newest is None else None
    return StoredProgress(
        step=resumed if resumed is not None else newest.step if newest else None,
        total_steps=totals[-1] if totals else None,
        loss=newest.loss if newest else None,
        first_loss=first.loss if first else None,
        newest_checkpoint_step=history.newest_checkpoint(),
    )


def make_snapshot(
    run: RunRecord, placements: Sequence[RankPlacement], history: RunHistory | None
) -> RunSnapshot:
    """Return the current snapshot of a run; without `history`, its live figures stay unknown."""
    attempt = history.attempt(run.attempt) if history else AttemptHistory()
    active = run.state in ACTIVE_STATES
    # An ended run has no speed.
    recent = tuple(attempt.recent) if active else ()
    last = recent[-1] if recent else None
    progress = make_progress(history, run.attempt) if history else run.progress
    evaluations = history.evaluations() if history else []
    evaluated = evaluations[-1] if evaluations else None
    slowest = _find_slowest(attempt, placements)
    is_starting = active and attempt.newest is None
    return RunSnapshot(
        run_id=run.run_id,
        name=run.name,
        state=run.state,
        spec=run.spec,
        attempt=run.attempt,
        nodes=run.nodes,
        message=run.message,
        hint=run.hint,
        created_s=run.created_s,
        started_s=run.started_s,
        ended_s=run.ended_s,
        step=progress.step,
        total_steps=progress.total_steps,
        loss=progress.loss,
        first_loss=progress.first_loss,
        learning_rate=last.learning_rate if last else None,
        tokens_per_s=last.tokens_per_s if last else None,
        mfu=_mfu(attempt, len(placements) - len(attempt.lost_ranks)) if active else None,
        eta=last.eta if last else None,
        evaluation_loss=evaluated.loss if evaluated else None,
        perplexity=evaluated.perplexity if evaluated else None,
        remaining_s=_remaining_s(progress, recent),
        ranks=tuple(_rank(place, attempt, active) for place in placements),
        newest_checkpoint_step=progress.newest_checkpoint_step,
        phase=_name_phase(slowest) if active else None,
        starting=slowest if is_starting and slowest and slowest.phase in _BEFORE_STEPS else None,
        certificate=attempt.certificate,
    )


def _mfu(attempt: AttemptHistory, world_size: int) -> float | None:
    """Return the FLOPs of all ranks over their peak, or None if one rank is unknown."""
    # The ranks' newest steps may briefly differ by one, which changes next to nothing.
    done = possible = 0.0
    living = [rank for number, rank in attempt.ranks.items() if number not in attempt.lost_ranks]
    for rank in living:
        if rank.model_flops is None or not rank.peak_flops_per_s or not rank.step_s:
            return None
        done += rank.model_flops
        possible += rank.peak_flops_per_s * rank.step_s
    return done / possible if possible and len(living) == world_size else None


def _remaining_s(progress: StoredProgress, recent: Sequence[StepRecord]) -> float | None:
    """Return the median step time multiplied by the number of remaining steps, in seconds."""
    # The median, because the first step and those that save a checkpoint take much longer.
    times = [record.step_s for record in recent if record.step_s is not None]
    if not times or progress.total_steps is None or progress.step is None:
        return None
    import statistics  # late: it loads decimal and fractions

    return statistics.median(times) * max(0, progress.total_steps - progress.step)


def _find_slowest(
    attempt: AttemptHistory, placements: Sequence[RankPlacement]
) -> PhaseProgress | None:
    """Return the progress of the slowest rank, for which the others wait."""
    order = {name: place for place, name in enumerate(_PHASES)}
    nodes = {place.rank: place.node for place in placements}
    living = {n: rank for n, rank in attempt.ranks.items() if n not in attempt.lost_ranks}
    ranks = [
        replace(rank.progress, node=nodes.get(number, "") if len(set(nodes.values())) > 1 else "")
        for number, rank in living.items()
        if rank.progress is not None and rank.progress.phase in order
    ]
    return min(ranks, key=lambda p: (order[p.phase], p.share or 0.0), default=None)


def _name_phase(progress: PhaseProgress | None) -> str | None:
    if progress is None:
        return None
    name = _NAMES.get(progress.phase, progress.phase)
    return name if progress.share is None else f"{name}, {show_share(progress.share)}"


def _rank(place: RankPlacement, attempt: AttemptHistory, active: bool) -> RankProgress:
    told = attempt.ranks.get(place.rank, RankHistory())
    is_lost = place.rank in attempt.lost_ranks
    active = active and not is_lost
    # Unknown until the attempt's first line has arrived.
    share = attempt.shares[place.rank] if place.rank < len(attempt.shares) else None
    return RankProgress(
        rank=place.rank,
        node=place.node,
        device=place.device,
        state="lost"
        if is_lost
        else (_name_phase(told.progress) or "starting")
        if active
        else "ended",
        step=told.step,
        time_s=told.time_s,
        phase=_name_phase(told.progress),
        tokens_per_s=told.tokens_per_s if active else None,
        step_s=told.step_s,
        input_s=told.input_s,
        compute_s=told.compute_s,
        wait_s=told.wait_s,
        optimizer_s=told.optimizer_s,
        mfu=told.mfu if active else None,
        memory_bytes=told.memory_bytes,
        memory_unpacked_bytes=told.memory_unpacked_bytes,
        memory_reserved_bytes=told.memory_reserved_bytes,
        share=share,
    )
