"""Interruption of a run that the user did not ask for, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

InterruptionKind = Literal["loss", "rejoin", "heat"]
"""`loss`: a rank or a node was lost, or the attempt failed; `rejoin`: the run stopped at a
checkpoint to continue with returned nodes; `heat`: its ranks paused until a GPU was cooler."""
InterruptionState = Literal[
    "pending", "resumed", "recovered", "left", "given_up", "cancelled", "replaced", "cooling"
]
"""`pending`: to be resumed; `resumed`: launched again; `recovered`: training again; `left`: not
recovered, by its cause or by the settings; `given_up`: a limit was reached; `cancelled`: the user
stopped the run; `replaced`: the user or another master resumed it; `cooling`: a GPU is too hot."""


def find_beginning(last_step_s: float | None, lost_s: float) -> float:
    """Return the time from which on a run lost time, in seconds since the epoch.

    Args:
        last_step_s: time of the last step before the loss; None: no step.
        lost_s: time of the loss, as far as it is known.
    """
    # The time before a loss is noticed is lost, too.
    return lost_s if last_step_s is None else min(last_step_s, lost_s)


def measure_cost(last_step_s: float | None, lost_s: float, training_s: float) -> float:
    """Return the time that a loss cost, in seconds: up to the first step after it.

    >>> measure_cost(100.0, 112.0, 115.5), measure_cost(None, 112.0, 115.5)
    (15.5, 3.5)
    """
    return max(training_s - find_beginning(last_step_s, lost_s), 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interruption:
    kind: InterruptionKind
    state: InterruptionState
    reason: str
    """Cause of the attempt's end; empty: recorded by an older version."""
    step: int
    """Newest step that the run had finished; 0: no step."""
    nodes: tuple[str, ...]
    """Nodes of the attempt that ended."""
    has_trained: bool = True
    """True if the attempt that ended had finished a step."""
    last_step_s: float | None
    """Time of the newest step by its node's clock, in seconds since the epoch; None: no step."""
    noticed_s: float
    """Time at which the end was noticed, in seconds since the epoch."""
    lost_s: float | None = None
    """Time at which a rank or node was lost before the first step of the run, by its node's clock,
    in seconds since the epoch; None: not known, or there was a step."""
    resumed_s: float | None = None
    """Time of the next launch, in seconds since the epoch; None: not launched."""
    resumed_nodes: tuple[str, ...] = ()
    resume_step: int = 0
    """Step that the next attempt started from; 0: from the beginning."""
    training_s: float | None = None
    """Time of the first step after it by its node's clock, in seconds since the epoch; None: not
    finished yet."""

    is_regrouped: bool = False
    """True if the remaining ranks continued in their processes, in the same attempt."""
    is_cut: bool = False
    """True if the next attempt ended before its first step."""

    @property
    def without(self) -> tuple[str, ...]:
        """Nodes that the next attempt lacks."""
        return tuple(node for node in self.nodes if node not in self.resumed_nodes)

    @property
    def joined(self) -> tuple[str, ...]:
        """Nodes that the next attempt has in addition."""
        return tuple(node for node in self.resumed_nodes if node not in self.nodes)

    @property
    def began_s(self) -> float:
        """Time at which the run stopped training, in seconds since the epoch."""
        # A run that stops to let nodes join keeps training until it stops.
        if self.kind == "rejoin" and self.last_step_s is not None:
            return self.last_step_s
        return find_beginning(self.last_step_s, self.lost_s or self.noticed_s)

    @property
    def began_with(self) -> str:
        """Event from which its times are measured, as a noun."""
        return "the last step" if self.last_step_s is not None else "the loss"

    @property
    def resumed_after_s(self) -> float | None:
        """Time from its beginning to the next launch, in seconds; None: not launched."""
        return None if self.resumed_s is None else max(self.resumed_s - self.began_s, 0.0)

    @property
    def cost_s(self) -> float | None:
        """Time from the last step before it to the first one after it, in seconds."""
        if self.training_s is None:
            return None
        return measure_cost(self.last_step_s, self.began_s, self.training_s)

    @property
    def repeated_steps(self) -> int:
        """Number of finished steps that the next attempt repeats."""
        return max(self.step - self.resume_step, 0)
