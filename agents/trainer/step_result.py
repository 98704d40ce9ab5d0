"""Result of a step, read from the statistics that all ranks have summed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from agents.contract.objectives import LOSS, OBJECTIVES
from agents.errors import Diverged
from agents.trainer.data.order import hash_rows
from agents.trainer.metrics.step_statistics import Stats
from agents.trainer.parallel.batch import Batch
from agents.trainer.rank.step_control import StepControl


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Result of a step, equal on all ranks."""

    loss: float
    metrics: dict[str, float]
    """Other metrics of the objective than the loss, by name."""
    gradient_norm: float
    """Norm before clipping; not finite if the step was skipped (fp16)."""
    samples: str
    """Hash of the rows of the batch."""
    control: StepControl
    is_due: bool
    """True if a rank asks for a checkpoint: by the clock, or to retry a failed save."""
    # Settings of each rank in the next step if this one saves.
    micro_tokens: tuple[int, ...]
    num_recomputed: tuple[int, ...]
    num_moved: tuple[int, ...]
    is_repeating: tuple[bool, ...]


def read_result(batch: Batch, stats: Stats, objective: str, *, scales: bool) -> StepResult:
    """Return the result of a step.

    Args:
        batch: batch of the step.
        stats: statistics of all ranks, with the norm of the gradients.
        objective: objective of the run.
        scales: True if an overflow of the gradients only skips the step.

    Raises:
        Diverged: loss or gradients are not finite.
    """
    weight = stats.sums["weight"]
    if weight != batch.weight:
        raise RuntimeError(f"a weight of {weight} was computed, {batch.weight} planned")
    metrics = {name: stats.sums[name] / batch.weight for name in OBJECTIVES[objective].sums}
    loss = metrics.pop(LOSS)
    (norm,) = stats.local
    skipped = scales and not math.isfinite(norm)
    if not (math.isfinite(loss) and (skipped or math.isfinite(norm))):
        raise Diverged(
            f"Step {batch.step} gave a loss of {loss} and a gradient norm of {norm}: "
            "the training has diverged.",
            "Resume it at a lower learning rate (rackless runs resume ID --learning-rate R), or "
            "start a new run with a longer warm-up",
        )
    return StepResult(
        loss=loss,
        metrics=metrics,
        gradient_norm=norm,
        samples=hash_rows(batch.row_numbers),
        control=StepControl.read(stats.sums),
        is_due=stats.sums["due"] > 0,
        micro_tokens=tuple(int(value) for value in stats.per_rank["micro_tokens"]),
        num_recomputed=tuple(int(value) for value in stats.per_rank["num_recomputed"]),
        num_moved=tuple(int(value) for value in stats.per_rank["num_moved"]),
        is_repeating=tuple(value > 0 for value in stats.per_rank["is_repeating"]),
    )
