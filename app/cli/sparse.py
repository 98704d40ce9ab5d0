"""Choose the few lines of progress that a log or a pipe gets, where nobody watches a bar move.

A phase is told when it begins; after that a line must be a tenth further on, or follow half a
minute of silence. Messages without an explicit phase that differ in their numbers alone are of one
phase, such as `sending the model to alpha: 12 of 90 MB`.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable

SHARE = 0.1
"""Least progress between two lines of a phase, as a share of it."""
SHARE_EVERY_S = 5.0
"""Minimum interval between two lines of a phase that moves fast, in seconds."""
SILENCE_S = 30.0
"""Time without any line after which the next message is printed, in seconds."""
MOST_ALIKE = 6
"""Maximum number of phases with the same first word that are told when they begin: pip begins one
with each package. After that only a line that breaks a silence begins another."""
# Not the digits of a name, such as `pc-2` or `Q4_K_M`.
_NUMBER = re.compile(r"(?<![\w.-])\d+(?:\.\d+)?(?![\w.-]*[A-Za-z_])")
_SHARE = re.compile(r"(\d+(?:\.\d+)?) ?%|(\d+(?:\.\d+)?) (?:of|/) (\d+(?:\.\d+)?)")


class SparseLines:
    """Decides line by line; one instance for one command."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._shares: dict[str, float] = {}
        self._first_words: Counter[str] = Counter()
        self._printed_s: float | None = None

    def allows(self, text: str, phase: str = "", share: float | None = None) -> bool:
        """Return whether to print a message, and count it as printed if so.

        Args:
            text: the message.
            phase: part of the work; empty: read from the text.
            share: progress of the phase from 0 to 1; None: read from the text, where it says so.
        """
        phase = phase or _name_phase(text)
        share = _read_share(text) if share is None else share
        if not self._is_due(phase, share):
            return False
        self._printed_s = self._now()
        if phase not in self._shares:
            self._first_words[_first_word(phase)] += 1
        self._shares[phase] = share or 0.0
        return True

    def _is_due(self, phase: str, share: float | None) -> bool:
        if self._printed_s is None:
            return True
        silent_s = self._now() - self._printed_s
        if silent_s >= SILENCE_S:
            return True
        if phase not in self._shares:
            return self._first_words[_first_word(phase)] < MOST_ALIKE
        is_further = share is not None and share >= self._shares[phase] + SHARE
        return is_further and silent_s >= SHARE_EVERY_S


def _first_word(phase: str) -> str:
    return phase.split(maxsplit=1)[0] if phase.strip() else ""


def _name_phase(text: str) -> str:
    """Return what messages of one phase have in common.

    >>> _name_phase("Merged 3 of 32 layers"), _name_phase("not on pc-2: it needs 12 GiB")
    ('Merged', 'not on pc-2: it needs # GiB')
    """
    match = _SHARE.search(text)
    return _NUMBER.sub("#", text) if match is None else text[: match.start()].strip()


def _read_share(text: str) -> float | None:
    """Return the share that a message states.

    >>> _read_share("installing packages: 15 of 60"), _read_share("to alpha: 6.0 / 12.0 GiB")
    (0.25, 0.5)
    """
    match = _SHARE.search(text)
    if match is None:
        return None
    percent, done, total = match.groups()
    if percent is not None:
        return float(percent) / 100
    return float(done) / float(total) if float(total) else None
