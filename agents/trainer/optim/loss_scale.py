"""Loss scaling for fp16, whose smallest numbers are far larger than many gradients.

The loss is multiplied by `factor`, and with it every gradient (Micikevicius et al. 2018,
arXiv:1710.03740, section 3.2). When they overflow, the step is skipped and the factor halved; after
2,000 good steps it is doubled, as in torch.amp.GradScaler. Every rank sees the same summed
gradients, so all skip the same steps. If one rank computes in fp16, all ranks scale, even those
whose card has bf16: gradients of different scales cannot be summed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

# Both as in torch.amp.GradScaler.
_FIRST_FACTOR = 65536.0
_GROWTH_STEPS = 2000
# Minimum factor: gradients that overflow even then come from a diverged run.
_MIN_FACTOR = 2.0**-10


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScale:
    """State of the scaling; part of a checkpoint."""

    factor: float = 1.0
    good_steps: int = 0
    """Consecutive steps without overflow since the last change of the factor."""
    num_skipped: int = 0
    """Number of skipped steps in the whole run."""

    def after(self, norm: float) -> LossScale:
        """Return the state after a step whose summed gradients have this norm.

        >>> LossScale(factor=8.0).after(float("inf"))
        LossScale(factor=4.0, good_steps=0, num_skipped=1)
        """
        if not math.isfinite(norm):
            return LossScale(factor=self.factor / 2, num_skipped=self.num_skipped + 1)
        # good_steps restarts at 0.
        if self.good_steps + 1 == _GROWTH_STEPS:
            return LossScale(factor=self.factor * 2, num_skipped=self.num_skipped)
        return replace(self, good_steps=self.good_steps + 1)

    @property
    def is_hopeless(self) -> bool:
        """True if training has diverged, not merely overflowed."""
        return self.factor < _MIN_FACTOR


def begin_scaling(saved: LossScale) -> LossScale:
    """Return the first state.

    Args:
        saved: state in the checkpoint; the default state without scaling so far.

    >>> begin_scaling(LossScale()).factor, begin_scaling(LossScale(factor=8.0)).factor
    (65536.0, 8.0)
    """
    return LossScale(factor=_FIRST_FACTOR) if saved == LossScale() else saved
