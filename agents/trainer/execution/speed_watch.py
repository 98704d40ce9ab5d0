"""Check in the first steps whether the chosen setting is as fast as the search expected.

The search times few passes for a short time, so it can be wrong: a hot card slows down, and other
programs come and go. If a setting is more than a tenth slower than expected, it is compared with
the next best one over real steps, and the faster one stays. The change affects the last bits of the
numbers, so it ends with the first checkpoint, from which a resume repeats steps. A setting that is
in comparison then is judged by its steps so far, or reverted if they are too few.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from agents.trainer.execution.setting import ExecutionSetting

# Steps after a change that are not counted, since shapes are recorded in them; steps that are.
_SKIPPED_STEPS, _COUNTED_STEPS = 4, 6
# Minimum number of counted steps to judge a setting when a checkpoint ends the comparison.
_MIN_JUDGED = 3
# Largest shortfall from the expected speed that counts as noise, as a ratio.
_TOLERANCE = 0.1
# Maximum number of other settings that are tried.
_MAX_TRIALS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingCorrection:
    """A change of the setting, or the confirmation of one, with the measured speed."""

    setting: ExecutionSetting
    """Setting from the next step on, with its measured or expected speed."""
    believed_tokens_per_s: float
    """Speed that the search expected of the setting in use so far."""
    measured_tokens_per_s: float | None
    """Speed of the setting in use so far, over real steps; None after too few steps."""
    is_final: bool
    """True if the comparison is over and the setting stays."""


class SpeedWatch:
    """Compares the speed of steps with the speed that the search expected.

    Args:
        chosen: setting in use.
        tried: settings that the search timed, with their speeds. Of equal ones the last counts.
    """

    def __init__(self, chosen: ExecutionSetting, tried: Iterable[ExecutionSetting]) -> None:
        others = {replace(setting, tokens_per_s=0.0): setting for setting in tried}
        # Compared without speeds: the same setting may have been timed twice.
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

    def settle(self) -> SettingCorrection | None:
        """Return the setting if a checkpoint ends the comparison now; None without a comparison.

        Changes nothing: every step has to know which setting its checkpoint would name.
        """
        if self.is_done or not self._measured:
            return None
        best = max(self._measured, key=lambda one: one.tokens_per_s)
        speed = None
        if self._num_steps >= _SKIPPED_STEPS + _MIN_JUDGED:
            speed = self._num_tokens / self._seconds
            if speed > best.tokens_per_s:
                best = replace(self._current, tokens_per_s=speed)
        return SettingCorrection(
            setting=best,
            believed_tokens_per_s=self._current.tokens_per_s,
            measured_tokens_per_s=speed,
            is_final=True,
        )

    def learn(self, num_tokens: int, compute_s: float) -> SettingCorrection | None:
        """Add a step; return a change of the setting if the speed justifies one.

        Args:
            num_tokens: tokens of this rank in the step.
            compute_s: time of its passes, in seconds.
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

    def _decide(self, speed: float) -> SettingCorrection | None:
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

    def _correct(
        self, used: ExecutionSetting, speed: float, *, is_final: bool
    ) -> SettingCorrection:
        return SettingCorrection(
            setting=self._current,
            believed_tokens_per_s=used.tokens_per_s,
            measured_tokens_per_s=speed,
            is_final=is_final,
        )
