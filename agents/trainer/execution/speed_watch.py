"""Watch in the first steps whether the chosen setting is as fast as the search believed.

The search times few passes for a short time, so it can be wrong: a card slows down when it is hot,
and other programs come and go. A setting that is more than a tenth slower than believed is compared
with the next best one over real steps, and the faster one stays. That changes the last bits of the
numbers, so it ends with the first checkpoint: a resume repeats steps from there. A setting that was
being compared then is judged by the steps that it had, or put back if they were too few.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from agents.trainer.execution.setting import ExecutionSetting

# Steps after a change that are not counted, as shapes are recorded in them, and steps that are.
_SKIPPED_STEPS, _COUNTED_STEPS = 4, 6
# Counted steps by which a setting is judged when a checkpoint ends the comparison.
_MIN_JUDGED = 3
# Largest shortfall from the believed speed that is no error of the search, as a share.
_TOLERANCE = 0.1
# Other settings that are tried at most.
_MAX_TRIALS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """A change of the setting, or the confirmation of one, with the measured speed."""

    setting: ExecutionSetting
    """What to use from the next step on, with its measured or believed speed."""
    believed_tokens_per_s: float
    """Speed that the search expected of the setting used so far."""
    measured_tokens_per_s: float | None
    """Speed of the setting used so far, over real steps; None if it had too few of them."""
    is_final: bool
    """Whether the comparison is over: the setting stays."""


class SpeedWatch:
    """Compares the speed of steps with the one that the search believed.

    Args:
        chosen: Setting in use.
        tried: Settings that the search timed, with their speeds. Of equal ones the last counts.
    """

    def __init__(self, chosen: ExecutionSetting, tried: Iterable[ExecutionSetting]) -> None:
        others = {replace(one, tokens_per_s=0.0): one for one in tried}
        others.pop(replace(chosen, tokens_per_s=0.0), None)
        self._rivals = sorted(others.values(), key=lambda one: one.tokens_per_s)
        self._current = chosen
        self._measured: list[ExecutionSetting] = []
        self._num_steps = self._num_tokens = 0
        self._seconds = 0.0
        self.is_done = chosen.tokens_per_s <= 0

    def stop(self) -> None:
        """Keep the setting in use from now on."""
        self.is_done = True

    def settle(self) -> Correction | None:
        """Return what to use if a checkpoint ends the comparison now; None if nothing is compared.

        Changes nothing: every step has to say which setting its checkpoint would name.
        """
        if self.is_done or not self._measured:
            return None
        best = max(self._measured, key=lambda one: one.tokens_per_s)
        speed = None
        if self._num_steps >= _SKIPPED_STEPS + _MIN_JUDGED:
            speed = self._num_tokens / self._seconds
            if speed > best.tokens_per_s:
                best = replace(self._current, tokens_per_s=speed)
        return Correction(
            setting=best,
            believed_tokens_per_s=self._current.tokens_per_s,
            measured_tokens_per_s=speed,
            is_final=True,
        )

    def learn(self, num_tokens: int, compute_s: float) -> Correction | None:
        """Take in a step; return a change of the setting, if there is a reason for one.

        Args:
            num_tokens: Tokens of this rank in the step.
            compute_s: Seconds of its passes.
        """
        if self.is_done or not num_tokens:
            return None
        self._num_steps += 1
        if self._num_steps > _SKIPPED_STEPS:
            self._num_tokens += num_tokens
            self._seconds += compute_s
        if self._num_steps < _SKIPPED_STEPS + _COUNTED_STEPS:
            return None
        speed = self._num_tokens / self._seconds
        self._num_steps = self._num_tokens = 0
        self._seconds = 0.0
        return self._decide(speed)

    def _decide(self, speed: float) -> Correction | None:
        used = self._current
        self._measured.append(replace(used, tokens_per_s=speed))
        best = max(self._measured, key=lambda one: one.tokens_per_s)
        is_wrong = best.tokens_per_s < (1 - _TOLERANCE) * used.tokens_per_s
        rival = self._rivals[-1] if self._rivals else None
        if (
            is_wrong
            and rival is not None
            and len(self._measured) <= _MAX_TRIALS
            and rival.tokens_per_s > best.tokens_per_s
        ):
            self._current = self._rivals.pop()
            return self._correct(used, speed, is_final=False)
        self.is_done = True
        if len(self._measured) == 1:
            return None
        self._current = best
        return self._correct(used, speed, is_final=True)

    def _correct(self, used: ExecutionSetting, speed: float, *, is_final: bool) -> Correction:
        return Correction(
            setting=self._current,
            believed_tokens_per_s=used.tokens_per_s,
            measured_tokens_per_s=speed,
            is_final=is_final,
        )
