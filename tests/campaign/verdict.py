"""Judge a case: which promises it broke. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.campaign.faults.fault import Expectation
from tests.campaign.history import Damage

TOLERANCE = 1e-6
"""Largest relative difference of a loss on other ranks than those of the undisturbed run."""
ALARMS = ("interrupted", "failed", "stalled", "rank_exited")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one case showed."""

    number: int
    fault: str
    detail: str
    victim: str
    at_step: int
    state: str
    """State of the run at the end."""
    detected_s: float | None
    """Time until the keeper named it rightly, in seconds; None: never, or nothing to name."""
    told: str
    """The line that named it, or what came instead."""
    back_s: float | None
    """Time until the training went on, in seconds; 0: it never paused; None: it did not."""
    load_s: float = 0.0
    """Time that the ranks which took over needed to load, a part of `back_s`, in seconds."""
    attempts: int
    is_on_same_ranks: bool
    damage: Damage
    orphans: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    alarms: tuple[str, ...] = ()
    """What was told about the run that sounds like a failure."""
    story: tuple[str, ...] = ()
    """All that the keeper told after the fault, each with the seconds since then."""
    seconds: float = 0.0
    """Time that the whole case took, in seconds."""
    breaks: tuple[str, ...] = field(default=())
    """Promises that it broke."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def find_name(
    expectation: Expectation, lines: Sequence[tuple[float, str]], victim: dict[str, str]
) -> tuple[float, str] | None:
    """Return time and text of the first line that names the fault rightly.

    >>> kill = Expectation(named=(("rank {rank}", "{node}"),))
    >>> lines = [(1.0, "node1 unreachable"), (2.0, "Rank 1 on node node2 was ended")]
    >>> find_name(kill, lines, {"rank": "1", "node": "node2"})
    (2.0, 'Rank 1 on node node2 was ended')
    """
    wanted = [[word.format(**victim).lower() for word in words] for words in expectation.named]
    for time_s, text in lines:
        if any(all(word in text.lower() for word in words) for words in wanted):
            return time_s, text
    return None


def judge(finding: Finding, expectation: Expectation) -> tuple[str, ...]:
    """Return every promise that the case broke, each as a short sentence."""
    return tuple([*finding.breaks, *_broken(finding, expectation)])


def _broken(finding: Finding, expectation: Expectation) -> Iterable[str]:
    damage = finding.damage
    if finding.state != "done":
        yield f"it did not heal by itself: {finding.state}"
    if damage.lost:
        yield f"samples of {damage.lost} steps lost"
    if damage.doubled:
        yield f"samples of {damage.doubled} steps doubled"
    if damage.disagreeing:
        yield f"ranks disagree on the samples of {damage.disagreeing} steps"
    if damage.double_run:
        yield "two attempts trained at once"
    if finding.is_on_same_ranks and not damage.is_equal:
        yield f"losses differ on the same ranks (by {damage.difference})"
    elif damage.difference is None or damage.difference > TOLERANCE:
        yield f"losses differ by {damage.difference}"
    if finding.orphans:
        yield f"{len(finding.orphans)} processes left behind"
    if finding.leftovers:
        yield f"left behind: {', '.join(finding.leftovers)}"
    if expectation.named and finding.detected_s is None:
        yield "it was not named"
    if finding.detected_s is not None and finding.detected_s > expectation.within_s:
        yield f"named after {finding.detected_s:.1f} s, not {expectation.within_s:.1f} s"
    if expectation.recovery == "untouched" and finding.attempts > 1:
        yield "it was restarted without need"
    beyond_s = (finding.back_s or 0.0) - finding.load_s
    if expectation.recovery == "recovered" and beyond_s > expectation.back_s:
        yield f"back after {beyond_s:.1f} s and the load, not {expectation.back_s:.1f} s"
    if finding.alarms and not expectation.alarms:
        yield f"false alarm: {finding.alarms[0]}"
