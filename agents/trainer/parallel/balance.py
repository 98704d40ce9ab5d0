"""Adapt the shares of a batch to the speed of each rank during a run.

Every rank's seconds and tokens of a step reach all ranks with the statistics of the next step, so
all ranks decide alike. The speed of a rank is the median of its last five steps, which hides a
short pause. Shares change only if the gain exceeds 3 % in two consecutive steps, so equal cards
keep equal shares and their results stay bit-equal. A rank that slows down to half its speed gets
its new share within ten steps. Shares affect neither the order of the data nor the result, except
for its last bits.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from agents.trainer.parallel.shares import shares_from_speeds

# Number of steps in the median of a rank's speed.
_WINDOW = 5
# Minimum speed-up of a step that justifies new shares, as a ratio.
_MIN_GAIN = 0.03
# Number of consecutive steps that must predict the gain: one noisy step changes nothing.
_STEPS_IN_A_ROW = 2


class Balancer:
    """Chooses the shares of each step from the times of earlier steps."""

    def __init__(self, shares: Sequence[float], *, active: bool) -> None:
        """Start with `shares`, which stay fixed unless `active`."""
        self.shares = tuple(shares)
        self._active = active and len(self.shares) > 1
        self._token_s: list[deque[float]] = [deque(maxlen=_WINDOW) for _ in self.shares]
        self._num_steps = 0
        self._num_better = 0

    def keep(self, ranks: Sequence[int]) -> None:
        """Continue with these ranks alone, in this order, with their current shares."""
        self.shares = tuple(self.shares[rank] for rank in ranks)
        self._token_s = [self._token_s[rank] for rank in ranks]
        self._active = self._active and len(ranks) > 1
        # The promised gain was that of the old set of ranks.
        self._num_better = 0

    def learn(self, seconds: Sequence[float], tokens: Sequence[float]) -> bool:
        """Adapt to the time of each rank for its part of a step; return whether shares changed.

        A rank that had no tokens keeps its known speed.
        """
        if not self._active:
            return False
        for known, needed_s, count in zip(self._token_s, seconds, tokens, strict=True):
            # A rank reports 0 s in its first step, since it sends the time of the step before.
            if count > 0 and needed_s > 0:
                known.append(needed_s / count)
        self._num_steps += 1
        # The first steps are slow on every rank: caches fill and kernels load.
        if self._num_steps < _WINDOW or not any(self._token_s):
            return False
        token_s = self._estimate_token_s()
        better = shares_from_speeds([1 / value for value in token_s])
        is_better = better != self.shares and find_gain(self.shares, token_s) > _MIN_GAIN
        self._num_better = self._num_better + 1 if is_better else 0
        if self._num_better < _STEPS_IN_A_ROW:
            return False
        self._num_better = 0
        self.shares = better
        return True

    def _estimate_token_s(self) -> list[float]:
        """Return the seconds per token of each rank; a rank that never had work fits its share."""
        found = [statistics.median(known) if known else None for known in self._token_s]
        pairs = list(zip(found, self.shares, strict=True))
        # Seconds per token at a share of 1, of the ranks that were timed.
        usual = statistics.median(value * share for value, share in pairs if value is not None)
        return [usual / share if value is None else value for value, share in pairs]


def predict_s(shares: Sequence[float], token_s: Sequence[float]) -> float:
    """Return the seconds per token of the whole group, which its slowest rank decides.

    >>> predict_s((1, 1), (0.5, 1.0))
    0.5
    """
    total = sum(shares)
    return max(share / total * value for share, value in zip(shares, token_s, strict=True))


def find_gain(shares: Sequence[float], token_s: Sequence[float]) -> float:
    """Return the speed-up of the best shares over the given ones, as a ratio.

    >>> find_gain((1, 1), (0.5, 0.5)), find_gain((1, 1), (0.5, 1.0))
    (0.0, 0.5)
    """
    # With the best shares all ranks finish together: their speeds add up.
    return predict_s(shares, token_s) * sum(1 / value for value in token_s) - 1


def choose_first_shares(tokens_per_s: Sequence[float]) -> tuple[float, ...]:
    """Return the first shares of a run: equal ones unless measured ones gain more than 3 %.

    >>> choose_first_shares([100.0, 99.0]), choose_first_shares([100.0, 50.0])
    ((1.0, 1.0), (0.667, 0.333))
    """
    token_s = [1 / speed for speed in tokens_per_s]
    equal = (1.0,) * len(token_s)
    better = find_gain(equal, token_s) > _MIN_GAIN
    return shares_from_speeds(tokens_per_s) if better else equal
