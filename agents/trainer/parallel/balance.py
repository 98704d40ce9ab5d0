"""Let the shares follow the speed of each rank during a run.

Every rank's own seconds and tokens of a step reach all ranks with the statistics of the next one,
so all of them decide alike. The speed of a rank is the median of its last five steps, so that a
pause or two changes nothing; and shares change only when the gain has been above 3 % for two steps,
so that equal cards keep equal shares, and with them the last bit of every number. A rank that slows
down to half its speed has its new share within ten steps. Neither the order of the data nor the
result depends on the shares, except for the last bits.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from agents.trainer.parallel.shares import shares_from_speeds

# Steps whose median is the speed of a rank.
_WINDOW = 5
# Minimum speed-up of a step that justifies new shares, as a ratio.
_MIN_GAIN = 0.03
# Consecutive steps that have to promise the gain.
_STEPS_IN_A_ROW = 2


class Balancer:
    """Decides the shares of each step from the times of those before."""

    def __init__(self, shares: Sequence[float], *, active: bool) -> None:
        """Begin with `shares`; they stay unless `active`."""
        self.shares = tuple(shares)
        self._active = active and len(self.shares) > 1
        self._token_s: list[deque[float]] = [deque(maxlen=_WINDOW) for _ in self.shares]
        self._num_steps = 0
        self._num_better = 0

    def keep(self, ranks: Sequence[int]) -> None:
        """Go on with these ranks alone, in this order, with the shares that they had."""
        self.shares = tuple(self.shares[rank] for rank in ranks)
        self._token_s = [self._token_s[rank] for rank in ranks]
        self._active = self._active and len(ranks) > 1
        self._num_better = 0

    def learn(self, seconds: Sequence[float], tokens: Sequence[float]) -> bool:
        """Adapt to what each rank needed for its part of a step; return whether shares changed.

        A rank that had no tokens keeps its known speed.
        """
        if not self._active:
            return False
        for known, needed_s, count in zip(self._token_s, seconds, tokens, strict=True):
            # 0 s: a rank has no time yet in its first step.
            if count > 0 and needed_s > 0:
                known.append(needed_s / count)
        self._num_steps += 1
        # The first steps are slower on every rank: caches fill, kernels are loaded.
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
        """Return the seconds per token of each rank; one that never had work fits its share."""
        found = [statistics.median(known) if known else None for known in self._token_s]
        pairs = list(zip(found, self.shares, strict=True))
        # Seconds per token at a share of 1, of the ranks that were timed.
        usual = statistics.median(one * share for one, share in pairs if one is not None)
        return [usual / share if one is None else one for one, share in pairs]


def predict_s(shares: Sequence[float], token_s: Sequence[float]) -> float:
    """Return the seconds per token of all ranks together: the slowest one decides.

    >>> predict_s((1, 1), (0.5, 1.0))
    0.5
    """
    total = sum(shares)
    return max(share / total * value for share, value in zip(shares, token_s, strict=True))


def find_gain(shares: Sequence[float], token_s: Sequence[float]) -> float:
    """Return the speed-up of the best shares over these, as a ratio.

    >>> find_gain((1, 1), (0.5, 0.5)), find_gain((1, 1), (0.5, 1.0))
    (0.0, 0.5)
    """
    return predict_s(shares, token_s) * sum(1 / value for value in token_s) - 1


def choose_first_shares(tokens_per_s: Sequence[float]) -> tuple[float, ...]:
    """Return the shares to begin with: equal ones unless others gain more than 3 %.

    >>> choose_first_shares([100.0, 99.0]), choose_first_shares([100.0, 50.0])
    ((1.0, 1.0), (0.667, 0.333))
    """
    token_s = [1 / speed for speed in tokens_per_s]
    equal = (1.0,) * len(token_s)
    better = find_gain(equal, token_s) > _MIN_GAIN
    return shares_from_speeds(tokens_per_s) if better else equal
