"""Describe what a run does before its first step, and how long that takes."""

from __future__ import annotations

from app.events import PhaseProgress
from app.text import show_bytes_of, show_duration, show_share

_SENTENCES = {
    "loading": "Starting the trainer",
    "imported": "Starting the trainer",
    "tokenizing": "Reading the data",
    "weights": "Loading weights",
    "preparing": "Preparing the model",
    "reference": "Asking the model before training",
    "tuning": "Trying settings",
    "compiling": "Compiling layers",
    "warmup": "Measuring the speed",
}


def describe_start(progress: PhaseProgress) -> str:
    """Return a line such as `Loading weights: 6.1 of 13.5 GiB, about 12 s left`.

    >>> describe_start(PhaseProgress(phase="tuning", expected_s=25.2))
    'Trying settings: about 25 s; the next start skips this'
    >>> describe_start(PhaseProgress(phase="tokenizing", share=0.12))
    'Reading the data: 12 %'
    >>> describe_start(PhaseProgress(phase="imported"))
    'Starting the trainer'
    """
    facts = [_describe_amount(progress)]
    if progress.expected_s is not None:
        # Recorded once, at the beginning, where nothing is counted: nothing says what is left.
        left = " left" if progress.total is not None else ""
        whole_s = max(1, round(progress.expected_s))
        words = f"{whole_s} s" if whole_s < 10 else show_duration(whole_s)
        facts.append(f"about {words}{left}")
    shown = ", ".join(fact for fact in facts if fact)
    if progress.phase == "tuning":
        shown += f"{'; ' if shown else ''}the next start skips this"
    sentence = _SENTENCES.get(progress.phase, progress.phase)
    return f"{sentence}: {shown}" if shown else sentence


def _describe_amount(progress: PhaseProgress) -> str:
    if progress.done is not None and progress.total is not None:
        if progress.phase == "weights":
            return show_bytes_of(progress.done, progress.total).replace(" / ", " of ")
        return f"{progress.done:g} of {progress.total:g}"
    return "" if progress.share is None else show_share(progress.share)
