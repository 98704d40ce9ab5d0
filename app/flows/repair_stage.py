"""State of one repair in its dialog: its texts, its buttons, and whether sudo wants a password."""

from __future__ import annotations

from dataclasses import dataclass

from agents.contract.repair import Change, RepairPreview
from app.flows.repair import (
    RESTARTED,
    WHERE,
    Offer,
    can_undo,
    describe_change_steps,
    describe_steps,
    find_obstacle,
    is_done,
    needs_password,
)
from app.provisioning.check_row import CheckRow
from app.telemetry.state import Tone
from app.text import capitalize

Verdict = tuple[Tone, str, str]
"""Kind, message and hint of a banner."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairStage:
    """A repair between its preview and its undo."""

    offer: Offer
    shown: RepairPreview | None = None
    """Preview from the node; None: not received yet."""
    waits: bool = False
    """True if it was applied before and the PC has not been restarted since."""
    change: Change | None = None
    """Record of the change; None: not applied in this dialog."""
    rows: tuple[CheckRow, ...] = ()
    """Rows for which it was offered, as checked again after it."""

    @property
    def is_ours(self) -> bool:
        """True if Rackless applies it itself."""
        return self.offer.repair.where == "node"

    @property
    def lines(self) -> tuple[str, ...]:
        """Commands and edits with their outcomes."""
        if self.change is not None:
            return describe_change_steps(self.change)
        if not self.is_ours:
            return tuple(self.offer.repair.script.splitlines())
        return describe_steps(self.offer.repair, self.shown)

    @property
    def can_apply(self) -> bool:
        """True if applying it now would change something and has no known obstacle."""
        shown = self.shown
        if shown is None or self.change is not None or self.waits or not self.is_ours:
            return False
        return not is_done(shown) and not find_obstacle(self.offer, shown)

    @property
    def can_undo(self) -> bool:
        """True if its change can be undone."""
        return self.change is not None and can_undo(self.change)

    @property
    def asks_password(self) -> bool:
        """True if sudo on the node wants a password for the next action."""
        if self.shown is None or not (self.can_apply or self.can_undo):
            return False
        # Undo needs what applying needed: the same steps, by the same sudo.
        return needs_password(self.offer.repair, self.shown)

    def judge(self) -> Verdict | None:
        """Return the banner for its present state; None if the steps say everything."""
        node, shown, change = self.offer.node, self.shown, self.change
        if not self.is_ours:
            return ("calm", WHERE[self.offer.repair.where], "")
        if change is not None:
            return self._judge_change(change)
        if self.waits:
            return ("warning", f"Restart {node}", RESTARTED.format(node=node))
        if shown is None:
            return ("busy", f"Checking {node}", "Nothing is changed yet.")
        if is_done(shown):
            return ("calm", "Already in place, but the problem remains", "Check again.")
        if obstacle := find_obstacle(self.offer, shown):
            return ("warning", "It cannot be applied from here", obstacle)
        return None

    def _judge_change(self, change: Change) -> Verdict:
        node = self.offer.node
        if change.undone_s is not None:
            return ("calm", f"Undone on {node}", change.undo_problem)
        if change.undo_problem:
            return ("error", f"It could not be undone on {node}", change.undo_problem)
        if change.problem:
            hint = "What was done before can be undone." if can_undo(change) else ""
            return ("error", change.problem, hint)
        if change.needs_restart:
            return ("warning", f"Applied on {node}", RESTARTED.format(node=node))
        left = [row for row in self.rows if row.status != "pass"]
        if left:
            return (
                "warning",
                "Applied, but the check still finds this",
                capitalize(left[0].message),
            )
        return ("good", f"Repaired on {node}", "The check that asked for it passes now.")
