"""Decide when nodes that came back join a run again, or new ones that its run file allows.

Pure: no clock, no network. Joining costs a restart from a checkpoint, so it happens once nodes have
been fit for a while, only if the rest of the run is longer than a restart, and the less often, the
more often it has happened: an unstable node must not make a run restart forever.
"""

from __future__ import annotations

from collections.abc import Sequence

from agents.contract.parallel import find_mode
from agents.contract.spec import RunSpec, list_named
from app.storage.recoveries import Loss

REJOIN = "rejoin"
"""Cause of an end, in the store of losses, that was a rejoin."""
STEADY_S = 2.0
"""Time that a node has to be fit before it joins, in seconds."""
BACK_OFF_S = (0.0, 300.0, 900.0, 3600.0)
"""Minimum time between two rejoins by the number of those within `MEMORY_S`, in seconds."""
MEMORY_S = 4 * 3600.0


def find_absent(spec: RunSpec, nodes: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Return the nodes that a run may use but does not, in the order of its run file.

    Args:
        spec: settings of the run.
        nodes: nodes of its newest attempt.
        known: names of all nodes.

    >>> from agents.contract.spec import DataSpec
    >>> spec = RunSpec(model="m", data=DataSpec(train="t"), nodes=("a", "b", "c"))
    >>> find_absent(spec, ("a",), ("a", "b", "d"))
    ('b',)
    """
    if spec.rejoin == "off" or spec.recovery == "off" or find_mode(spec.parallel).uses_one_gpu:
        return ()
    listed = known if spec.nodes == "all" else list_named(spec.nodes)
    allowed = [node for node in listed if node in known]
    return tuple(node for node in allowed if node not in nodes)


def is_worthwhile(spec: RunSpec, remaining_s: float | None, start_s: float | None) -> bool:
    """Return True if the rest of a run is longer than a restart, or a time is unknown.

    Args:
        spec: settings of the run.
        remaining_s: time until its end on the current nodes, in seconds.
        start_s: time of its newest start until the first step, in seconds.
    """
    if spec.rejoin == "always" or remaining_s is None or start_s is None:
        return True
    return remaining_s > start_s


def find_end_of_pause(losses: Sequence[Loss], now_s: float) -> float:
    """Return the time from which nodes may join again, in seconds since the epoch.

    Args:
        losses: losses and rejoins of the run, oldest first.
        now_s: time, in seconds since the epoch. Rejoins after it have the time of another clock.
    """
    times = [loss.ended_s for loss in losses if loss.cause == REJOIN]
    recent = [time_s for time_s in times if now_s - MEMORY_S < time_s <= now_s]
    if not recent:
        return now_s
    return max(recent) + BACK_OFF_S[min(len(recent), len(BACK_OFF_S) - 1)]


def find_failed_join(losses: Sequence[Loss], attempt: int) -> Loss | None:
    """Return the rejoin that led to `attempt` if it ended before its first step, else None.

    Blame the joining nodes for that end: the run trained without them.
    """
    return next(
        (
            loss
            for loss in losses
            if loss.cause == REJOIN and loss.resumed_attempt == attempt and loss.state == "resumed"
        ),
        None,
    )
