"""The main window as its own parts see it: navigation, opening and closing.

Menus, commands, dialogs and tray act on a `Shell` and import nothing above it; `MainWindow`, which
imports all of them, adds the pages.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtGui import QCloseEvent, QPaintEvent
from PySide6.QtWidgets import QApplication, QDialog, QMainWindow, QWidget

from agents.contract.spec import RunSpec
from app.core.action import CoreApi
from app.gui.kit.actions import Actions
from app.gui.kit.banner import Banner
from app.gui.kit.confirm import confirm
from app.gui.session.bridge import Report
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


@dataclass(frozen=True, slots=True)
class DemoProgress:
    """Progress of the demo: (title, `done` | `now` | `todo` | `failed`) for each step."""

    steps: Sequence[tuple[str, str]]
    note: str = ""


DemoRunner = Callable[[CoreApi, Report], Awaitable[object]]
"""Runs the demo to its end, and reports a DemoProgress for each change."""


class Shell(QMainWindow):
    """The window without its pages.

    A base class rather than a Protocol: dialogs need a QWidget as their parent, and Qt's metaclass
    leaves no room for that of a Protocol or an ABC.
    """

    painted = Signal()
    """The first frame is on the screen."""
    finished = Signal()
    """The user closed the window for good."""
    hidden = Signal(object)
    """The window went to the tray; carries (title, text) the first time, else None."""

    actions_: Actions
    """The window's actions; QWidget has a method `actions`."""

    def __init__(self, context: Context, state: WindowState, demo: DemoRunner | None) -> None:
        super().__init__()
        self._context, self.state, self.demo = context, state, demo
        self._was_painted = False
        self.is_over = False
        """True if the user closed the window for good."""
        self.banner = Banner(context.theme)
        self.close_policy = ClosePolicy(context, state, self)

    # ------------------------------------------------------------ for MainWindow to implement

    def go_to(self, place: str) -> None:
        """Show one of the pages of PLACES."""
        raise NotImplementedError

    def open_run(self, run_id: str) -> None:
        """Show the page of a run."""
        raise NotImplementedError

    def open_node(self, name: str) -> None:
        """Show a node on the page of nodes."""
        raise NotImplementedError

    def open_data(self, spec: RunSpec) -> None:
        """Show the rows of a run's data."""
        raise NotImplementedError

    def check(self) -> None:
        """Show the nodes, and check all of them."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Reload the page in view."""
        raise NotImplementedError

    def find_in_log(self) -> None:
        """Focus the search field in the log of the run in view."""
        raise NotImplementedError

    def run_demo(self) -> None:
        """Run the demo and show its steps."""
        raise NotImplementedError

    # ------------------------------------------------------------ first frame and last

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        if not self._was_painted:
            self._was_painted = True
            # Not within the event: the frame reaches the screen after it.
            QTimer.singleShot(0, self.painted.emit)

    def come_forward(self) -> None:
        """Show the window above others, also if it was minimized or in the tray."""
        self.setWindowState(self.windowState() & ~Qt.WindowState.WindowMinimized)
        self.show()
        self.raise_()
        self.activateWindow()
        QApplication.alert(self)  # where the desktop lets no program take the focus

    def expect_end(self) -> None:
        """Close without asking from now on, since the desktop's session ends."""
        self.close_policy.is_quiet = True

    def close_quietly(self) -> None:
        """Close now without asking, on a signal of the system."""
        self.expect_end()
        self.close()

    def quit(self) -> None:
        """Close for good, also from the tray."""
        self.close_policy.is_final = True
        self.close()

    def closeEvent(self, event: QCloseEvent) -> None:
        decision = self.close_policy.decide()
        if decision == "end":
            self.state.geometry = bytes(self.saveGeometry().toHex().data()).decode("ascii")
            event.accept()
            for dialog in self.findChildren(QDialog):
                dialog.reject()  # so that their answers are kept as drafts
            self.is_over = True
            self.finished.emit()
            return
        event.ignore()
        if decision == "hide":
            self.hide()
            self.hidden.emit(self.close_policy.hidden_message())
