"""What becomes of the window when a person closes it: it ends, or waits in the tray.

Neither stops a run, and each says so once. An export that is under way is asked for first, since
unlike a run it needs this PC.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from PySide6.QtWidgets import QWidget

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
        """Tells whether an icon is there by which the window comes back."""
        self.is_quiet = False
        """The system ends it: nothing is asked."""
        self.is_final = False
        """The person chose to quit."""

    def decide(self) -> Literal["stay", "hide", "end"]:
        """Return what becomes of the window; asks the person where that is due."""
        if self.is_quiet:
            return "end"
        is_final, self.is_final = self.is_final, False
        wants_tray = self._context.preferences.get("when_closed") == "tray"
        if wants_tray and not is_final and self.has_tray():
            return "hide"
        if self._may_end_exports() and self._knows_runs_go_on():
            return "end"
        return "stay"

    def hidden_message(self) -> tuple[str, str] | None:
        """Return what to say to somebody who sees the window go to the tray the first time."""
        if self._state.was_told_hiding:
            return None
        self._state.was_told_hiding = True
        return HIDDEN_TITLE, HIDDEN_TEXT

    def _knows_runs_go_on(self) -> bool:
        active = self._context.cluster.active_runs()
        if not active or self._state.was_told_closing:
            return True
        from app.gui.kit.confirm import confirm

        goes = "goes" if len(active) == 1 else "go"
        self._state.was_told_closing = confirm(
            self._window,
            self._context.theme,
            "Close the window?",
            f"{count_of(len(active), 'run')} {goes} on without it, on the nodes. Open Rackless "
            "again whenever you like to see how far they are. This is said only once.",
            "Close the window",
        )
        return self._state.was_told_closing

    def _may_end_exports(self) -> bool:
        if not self._context.exports.is_busy():
            return True
        from app.gui.kit.confirm import confirm

        return confirm(
            self._window,
            self._context.theme,
            "Break off the export?",
            "An export is under way, and ends with this window. What was made before stays.",
            "Close the window",
        )
