"""Describe the phases of a run before its first step, with their remaining time.

The remaining time counts down from the expectation at the time of the record. When it is over, the
sentence says that the phase is late.
"""

from __future__ import annotations

import math

from app.events import PhaseProgress
from app.text import show_bytes_of, show_duration, show_share

_SENTENCES = {
    "loading": "Starting the trainer",
    "imported": "Starting the trainer",
    "tokenizing": "Reading the data",
    "weights": "Loading weights",
    "layers": "Loading layers",
    "preparing": "Preparing the model",
    "reference": "Scoring the answers before training",
    "tuning": "Trying settings",
    "compiling": "Compiling layers",
    "warmup": "Measuring the speed",
    "training": "Training the first step",
}
# Time after which a phase of unknown length shows its elapsed time, in seconds.
_LONG_S = 10.0
# Time by which a phase may exceed its expectation before it counts as late: as a share of it, and
# at least this number of seconds.
_LATE_SHARE, _LATE_S = 0.25, 3.0
# Remaining time up to which each second is shown; above, multiples of five are calmer to read.
_COUNTED_S = 20


def describe_start(progress: PhaseProgress, now_s: float | None = None) -> str:
    """Return a line such as `Loading weights: 6.1 of 13.5 GiB, about 12 s left`.

    Args:
        progress: progress of the slowest rank.
        now_s: current time by the clock of its node; None: the time of the record.

    >>> tuning = PhaseProgress(phase="tuning", expected_s=25.2, time_s=100.0)
    >>> describe_start(tuning)
    'Trying settings: about 25 s left; the next start like this one skips it'
    >>> describe_start(tuning, now_s=170.0)
    'Trying settings: 1 min 10 s so far, longer than the 25 s expected'
    >>> describe_start(PhaseProgress(phase="tokenizing", share=0.12))
    'Reading the data: 12 %'
    >>> describe_start(PhaseProgress(phase="imported", node="beta"))
    'Starting the trainer on beta'
    """
    elapsed_s = 0.0
    if now_s is not None and progress.time_s is not None:
        # The estimate of the node's clock may be slightly behind.
        elapsed_s = max(0.0, now_s - progress.time_s)
    facts = [_describe_amount(progress), _describe_time(progress, elapsed_s)]
    shown = ", ".join(fact for fact in facts if fact)
    # The trainer remembers the found settings for equal starts.
    if progress.phase == "tuning" and not is_late(progress, elapsed_s):
        shown += f"{'; ' if shown else ''}the next start like this one skips it"
    sentence = _SENTENCES.get(progress.phase, progress.phase)
    sentence += f" on {progress.node}" if progress.node else ""
    return f"{sentence}: {shown}" if shown else sentence


def is_late(progress: PhaseProgress, elapsed_s: float) -> bool:
    """Return whether a phase takes clearly longer than expected, `elapsed_s` after its record."""
    expected_s = progress.expected_s
    if expected_s is None:
        return False
    return elapsed_s > expected_s + max(_LATE_S, _LATE_SHARE * expected_s)


def find_share(progress: PhaseProgress, elapsed_s: float) -> float | None:
    """Return the share of a phase that is done, 0 to 1: counted, else by time; None: unknown."""
    if progress.share is not None:
        return progress.share
    # A full bar would claim that the phase is over, which the elapsed time cannot show.
    if not progress.expected_s or elapsed_s > progress.expected_s:
        return None
    return elapsed_s / progress.expected_s


def _describe_amount(progress: PhaseProgress) -> str:
    if progress.done is not None and progress.total is not None:
        if progress.phase == "weights":
            return show_bytes_of(progress.done, progress.total).replace(" / ", " of ")
        return f"{progress.done:g} of {progress.total:g}"
    return "" if progress.share is None else show_share(progress.share)


def _describe_time(progress: PhaseProgress, elapsed_s: float) -> str:
    expected_s = progress.expected_s
    if expected_s is None:
        # A counted phase is recorded many times, so its beginning is not known here.
        is_old = elapsed_s >= _LONG_S and progress.share is None
        return f"{_whole(elapsed_s)} so far" if is_old else ""
    if is_late(progress, elapsed_s):
        # In a counted phase the expectation covers only the rest since the last record.
        if progress.total is not None:
            return f"nothing new for {_whole(elapsed_s)}"
        return f"{_whole(elapsed_s)} so far, longer than the {_whole(expected_s)} expected"
    left_s = max(0.0, expected_s - elapsed_s)
    if elapsed_s and left_s < 1:
        return "almost done"
    whole = max(1, round(left_s))
    if whole > _COUNTED_S:
        whole = 5 * math.ceil(whole / 5)
    return f"about {_whole(whole)} left"


def _whole(seconds: float) -> str:
    """Return a duration in whole seconds, at least one."""
    whole = max(1, round(seconds))
    return f"{whole} s" if whole < 60 else show_duration(whole)
