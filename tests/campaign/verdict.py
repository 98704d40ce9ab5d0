"""Judge a case: which promises it broke. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tests.campaign.faults.fault import Expectation
from tests.campaign.history import Damage

TOLERANCE = 1e-6
"""Largest relative difference of the last loss on other ranks than those of the undisturbed run."""
STEP_TOLERANCE = 1e-5
"""Largest relative difference of any loss there: sums in another order round otherwise."""
WENT_ON = "went on"
"""State of a run that took another fault after this one."""
HEALED = ("done", WENT_ON)
ALARMS = ("interrupted", "failed", "stalled", "rank_exited")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one case showed."""

    number: int
    run: int
    """Number of the first fault that struck this run."""
    fault: str
    detail: str
    victim: str
    at_step: int
    state: str
    """State of the run at the end."""
    detected_s: float | None
    """Time until the keeper named it rightly, in seconds; None: never, or nothing to name."""
    named_delay_s: float = 0.0
    """Time of it that processes which notice waited for a core, in seconds."""
    told: str
    """The line that named it, or what came instead."""
    back_s: float | None
    """Time until the training went on, in seconds; 0: it never paused; None: it did not."""
    back_delay_s: float = 0.0
    """Time of it, before the load, that processes which heal waited for a core, in seconds."""
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
    load: float = 0.0
    """Load average of this PC over the minute before its end."""
    breaks: tuple[str, ...] = ()
    """Promises that it broke."""
    late: tuple[str, ...] = ()
    """What came late, but in time without the wait for a core."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Finding:
        """Return what `as_dict` was given, also from JSON."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in stored.items()
        }
        values["damage"] = Damage(**stored["damage"])
        return cls(**values)


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


def conclude(finding: Finding, expectation: Expectation) -> Finding:
    """Return the finding with every promise that it broke, and what came late by the load."""
    measured = list(_measure(finding, expectation))
    return replace(
        finding,
        breaks=(
            *finding.breaks,
            *_broken(finding, expectation),
            *(one.text for one in measured if one.is_broken),
        ),
        late=tuple(
            f"{one.text}; {one.delay_s:.1f} s of that without a core"
            for one in measured
            if one.is_late and not one.is_broken
        ),
    )


@dataclass(frozen=True, slots=True)
class _Time:
    """A time with a promise: `limit_s` on a quiet PC."""

    text: str
    took_s: float
    limit_s: float
    delay_s: float

    @property
    def is_late(self) -> bool:
        return self.took_s > self.limit_s

    @property
    def is_broken(self) -> bool:
        return self.took_s > self.limit_s + self.delay_s


def _measure(finding: Finding, expectation: Expectation) -> Iterable[_Time]:
    took_s, limit_s = finding.detected_s, expectation.within_s
    if took_s is not None:
        text = f"named after {took_s:.1f} s, not {limit_s:.1f} s"
        yield _Time(text, took_s, limit_s, finding.named_delay_s)
    took_s, limit_s = (finding.back_s or 0.0) - finding.load_s, expectation.back_s
    if expectation.recovery == "recovered":
        text = f"back after {took_s:.1f} s and the load, not {limit_s:.1f} s"
        yield _Time(text, took_s, limit_s, finding.back_delay_s)


def _broken(finding: Finding, expectation: Expectation) -> Iterable[str]:
    damage = finding.damage
    if finding.state not in HEALED:
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
    elif damage.difference is None or damage.difference > STEP_TOLERANCE:
        yield f"losses differ by {damage.difference}"
    elif (damage.final_difference or 0.0) > TOLERANCE:
        yield f"the last loss differs by {damage.final_difference}"
    if finding.orphans:
        yield f"{len(finding.orphans)} processes left behind"
    if finding.leftovers:
        yield f"left behind: {', '.join(finding.leftovers)}"
    if expectation.named and finding.detected_s is None:
        yield "it was not named"
    if expectation.recovery == "untouched" and finding.attempts > 1:
        yield "it was restarted without need"
    if finding.alarms and not expectation.alarms:
        yield f"false alarm: {finding.alarms[0]}"
