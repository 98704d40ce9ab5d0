"""Split a rank's step time into its parts, and describe its memory. No Qt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.text import DASH, show_bytes, show_share

if TYPE_CHECKING:
    from app.events import RankProgress


@dataclass(frozen=True, slots=True)
class StepPart:
    name: str
    share: float
    """Share of the whole step, 0 to 1."""


def split_step(rank: RankProgress) -> tuple[StepPart, ...]:
    """Return input, compute, waiting and optimizer; empty if one is unknown."""
    parts = {
        "input": rank.input_s,
        "compute": rank.compute_s,
        "waiting": rank.wait_s,
        "optimizer": rank.optimizer_s,
    }
    # With an unknown part, the others would not add up to the step.
    if not rank.step_s or None in parts.values():
        return ()
    return tuple(
        StepPart(name, min(1.0, max(0.0, (seconds or 0.0) / rank.step_s)))
        for name, seconds in parts.items()
    )


def describe_split(rank: RankProgress) -> str:
    """Return the parts in words; a dash if they are unknown."""
    parts = split_step(rank)
    return ", ".join(f"{part.name} {show_share(part.share)}" for part in parts) or DASH


def show_rank_memory(rank: RankProgress) -> str:
    """Return the peak memory of training, plus the spare memory filled with unpacked weights."""
    needed, spare = show_bytes(rank.memory_bytes), show_bytes(rank.memory_unpacked_bytes)
    if not rank.memory_unpacked_bytes:
        return needed
    size, _, unit = needed.partition(" ")
    return f"{size} + {spare}" if spare.partition(" ")[2] == unit else f"{needed} + {spare}"
