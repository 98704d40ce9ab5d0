"""Confirm an attempt's part once its master has launched all parts.

If a cable is cut during a launch, a part may run that its master counts as failed. Therefore each
part waits for messages of the master: the launch continues, or it has succeeded. A part without a
message for the time in the intent ends by itself; a confirmed part needs no master any more.
"""

from __future__ import annotations

from agents.contract.run import AttemptIntent
from agents.contract.run_layout import CONFIRMED_FILE
from agents.state import read_json, write_json
from agents.supervisor.attempt import AttemptFolder, is_confirmed
from agents.supervisor.verdict import AttemptOutcome


def confirm(attempt: AttemptFolder, is_final: bool) -> None:
    """Confirm this node's part, finally (all parts run) or temporarily (the launch continues).

    Raises:
        ExpectedError: this node has no such attempt, or the disk is full.
    """
    attempt.require()
    said = read_json(attempt.file(CONFIRMED_FILE)) or {}
    # A late temporary confirmation must not revoke the final one.
    if said.get("is_final") is not True:
        count = said.get("count")
        number = count + 1 if isinstance(count, int) else 1
        write_json(attempt.file(CONFIRMED_FILE), {"is_final": is_final, "count": number})


class ConfirmationWatch:
    """Watch over the master's confirmations while the ranks run."""

    def __init__(self, attempt: AttemptFolder, intent: AttemptIntent, now_s: float) -> None:
        self._attempt = attempt
        self._intent = intent
        self._patience_s = intent.confirm_s
        self._said: object = None
        self._heard_s = now_s

    def check(self, now_s: float) -> AttemptOutcome | None:
        """Return the outcome if the master has been silent too long; `now_s` is monotonic."""
        if self._patience_s is None:
            return None
        if is_confirmed(self._attempt, self._intent):
            self._patience_s = None
            return None
        # A count, not a time: the clocks of both PCs may differ, and this one may be set.
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
