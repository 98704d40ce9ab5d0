"""Let a part of an attempt go on only once its master knows that all parts were launched.

A cable that is cut during a launch leaves a part that its master counts as failed. So a part waits
for a word of the master: either that the launch still goes on, or that it has succeeded. Without
any for the time in the intent it ends by itself; once confirmed, it needs no master any more.
"""

from __future__ import annotations

from agents.contract.run import AttemptIntent
from agents.contract.run_layout import CONFIRMED_FILE
from agents.state import read_json, write_json
from agents.supervisor.attempt import AttemptFolder, is_confirmed
from agents.supervisor.verdict import AttemptOutcome


def confirm(attempt: AttemptFolder, is_final: bool) -> None:
    """Record a word of the master: all parts run (`is_final`), or the launch still goes on.

    Raises:
        ExpectedError: there is no such attempt here, or the disk is full.
    """
    attempt.require()
    said = read_json(attempt.file(CONFIRMED_FILE)) or {}
    if said.get("is_final") is not True:
        count = said.get("count")
        number = count + 1 if isinstance(count, int) else 1
        write_json(attempt.file(CONFIRMED_FILE), {"is_final": is_final, "count": number})


class ConfirmationWatch:
    """Waits for the words of the master, beside the ranks."""

    def __init__(self, attempt: AttemptFolder, intent: AttemptIntent, now_s: float) -> None:
        self._attempt = attempt
        self._intent = intent
        self._patience_s = intent.confirm_s
        self._said: object = None
        self._heard_s = now_s

    def check(self, now_s: float) -> AttemptOutcome | None:
        """Return the outcome if the master has been silent for too long; `now_s` is monotonic."""
        if self._patience_s is None:
            return None
        if is_confirmed(self._attempt, self._intent):
            self._patience_s = None
            return None
        # A count, because the clocks of both PCs may differ, and this one may step.
        said = (read_json(self._attempt.file(CONFIRMED_FILE)) or {}).get("count")
        if said != self._said:
            self._said, self._heard_s = said, now_s
        if now_s - self._heard_s < self._patience_s:
            return None
        return AttemptOutcome(
            state="failed",
            message=f"Node {self._intent.node} heard nothing from the master for "
            f"{self._patience_s:g} s during the launch, so its part of the run ended.",
            hint=f"Resume it: rackless runs resume {self._intent.run_id}",
        )
