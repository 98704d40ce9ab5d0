"""Loss scaling for fp16, whose smallest numbers are far larger than many gradients.

The gradients are computed `factor` times as large as they are (Micikevicius et al. 2018,
arXiv:1710.03740, section 3.2). When they overflow, the step is skipped and the factor halved; after
2,000 good steps it is doubled, as torch.amp.GradScaler does. Every rank sees the same summed
gradients, so all skip the same steps. Where one rank computes in fp16, all scale, also those whose
card has bf16: gradients of different scales cannot be summed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

_FIRST = 65536.0
_GROWS_AFTER = 2000
_LEAST = 2.0**-10
"""A factor below this means that no factor helps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScale:
    """The state of the scaling; part of a checkpoint."""

    factor: float = 1.0
    good_steps: int = 0
    """Steps without overflow since the factor was changed."""
    num_skipped: int = 0
    """Steps of the whole run that were skipped."""

    def after(self, norm: float) -> LossScale:
        """Return the state after a step with summed gradients of this norm.

        >>> LossScale(factor=8.0).after(float("inf"))
        LossScale(factor=4.0, good_steps=0, num_skipped=1)
        """
        if not math.isfinite(norm):
            return LossScale(factor=self.factor / 2, num_skipped=self.num_skipped + 1)
        if self.good_steps + 1 == _GROWS_AFTER:
            return LossScale(factor=self.factor * 2, num_skipped=self.num_skipped)
        return replace(self, good_steps=self.good_steps + 1)

    @property
    def is_hopeless(self) -> bool:
        """Tell whether the training has diverged rather than overflowed."""
        return self.factor < _LEAST


def begin_scaling(then: LossScale) -> LossScale:
    """Return the state to begin with.

    Args:
        then: of a checkpoint; the default state says that nothing was scaled so far.

    >>> begin_scaling(LossScale()).factor, begin_scaling(LossScale(factor=8.0)).factor
    (65536.0, 8.0)
    """
    return LossScale(factor=_FIRST) if then == LossScale() else then
