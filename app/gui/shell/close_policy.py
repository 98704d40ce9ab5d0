"""Decide whether closing the window quits Rackless or leaves it in the tray.

Neither stops a run, and each explains that once. First the user can wait for work that depends on
the window, such as an export, or whose result only the window shows, such as a repair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from PySide6.QtWidgets import QWidget

from app.gui.kit.confirm import confirm
from app.gui.session.context import Context
from app.gui.shell.window_state import WindowState
from app.text import count_of

HIDDEN_TITLE = "Rackless stays in the tray"
HIDDEN_TEXT = (
    "Runs keep training either way. Click the icon to show the window again, or choose Quit there "
    "to close Rackless. This message appears only once."
)


class ClosePolicy:
    def __init__(self, context: Context, state: WindowState, window: QWidget) -> None:
        self._context, self._state, self._window = context, state, window
        self.has_tray: Callable[[], bool] = lambda: False
        """Returns whether there is a tray icon that can bring the window back."""
        self.is_quiet = False
        """True if the system closes the window, so that no question may be asked."""
        self.is_final = False
        """True if the user chose Quit; holds for the next decision only."""

    def decide(self) -> Literal["stay", "hide", "end"]:
        """Return whether the window stays, hides or ends, after asking the user if necessary."""
        if self.is_quiet:
            return "end"
        # Reset at once: if the user refuses below, a later close is an ordinary one.
        is_final, self.is_final = self.is_final, False
        wants_tray = self._context.preferences.get("when_closed") == "tray"
        if wants_tray and not is_final and self.has_tray():
            # Work continues while the window is hidden, so there is nothing to ask.
            return "hide"
        # Work first: a user who waits for it has not yet seen the one-time message.
        if self._may_leave_work() and self._knows_runs_continue():
            return "end"
        return "stay"

    def hidden_message(self) -> tuple[str, str] | None:
        """Return title and text to show when the window first goes to the tray, else None."""
        if self._state.was_told_hiding:
            return None
        self._state.was_told_hiding = True
        return HIDDEN_TITLE, HIDDEN_TEXT

    def _knows_runs_continue(self) -> bool:
        active = self._context.cluster.active_runs()
        if not active or self._state.was_told_closing:
            return True
        keeps = "keeps" if len(active) == 1 else "keep"
        # Only a confirmed message counts as read; after Cancel it appears again.
        self._state.was_told_closing = confirm(
            self._window,
            self._context.theme,
            "Close the window?",
            f"{count_of(len(active), 'run')} {keeps} training on the nodes. Open Rackless again "
            "at any time to see the progress. This message appears only once.",
            "Close the window",
        )
        return self._state.was_told_closing

    def _may_leave_work(self) -> bool:
        notes = self._context.bridge.closing_notes()
        if not notes:
            return True
        return confirm(
            self._window,
            self._context.theme,
            "Close while work is under way?",
            "\n\n".join(("If you close Rackless now:", *notes)),
            "Close now",
            is_dangerous=True,
            refusal="Wait for it" if len(notes) == 1 else "Wait for them",
        )
