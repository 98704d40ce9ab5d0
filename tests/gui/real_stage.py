"""The real window over the real core, for tests that use real nodes; a person's hands included."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from PySide6.QtCore import QEvent, Qt, QTimer
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QDialog, QLineEdit, QPushButton, QWidget

from app.gui.application import core_opener
from app.gui.kit.theme import Theme
from app.gui.session.bridge import Bridge
from app.gui.session.context import Context
from app.gui.session.live_state import LiveState
from app.gui.shell.main_window import MainWindow
from app.gui.shell.window_state import WindowState
from tests.gui.cpu_wait import TurnTime

PATIENCE_S = 120.0
"""Ends a test that hangs; three ranks take half a minute to start where all cores are busy."""
PAUSE_S = 0.005
Kind = TypeVar("Kind", bound=QWidget)


class RealStage:
    """Owns the window and its core; `end` takes both down and tells what crashed."""

    def __init__(self, application: QApplication, theme: Theme, home: Path) -> None:
        self.application = application
        self.crashes: list[str] = []
        self.turns: list[float] = []
        """Seconds for which the Qt thread was not free, one for each turn of its loop."""
        self._failure: AssertionError | None = None
        self.bridge = Bridge(core_opener(home))
        self.bridge.crashed.connect(self.crashes.append)
        self.cluster = LiveState(self.bridge)
        self.context = Context(self.bridge, self.cluster, theme)
        self.window = MainWindow(self.context, WindowState())
        self.window.painted.connect(self.bridge.start)
        self.window.show()
        self.window.activateWindow()
        self.until(lambda: self.cluster.is_open, "the core is open")

    def end(self) -> None:
        self.bridge.stop()
        self.bridge.join()
        self.window.hide()
        self.window.deleteLater()
        self.application.sendPostedEvents(None, QEvent.Type.DeferredDelete)
        self.application.processEvents()

    # ------------------------------------------------------------ eyes

    def until(self, is_true: Callable[[], object], what: str, limit_s: float = PATIENCE_S) -> None:
        """Let events pass until `is_true`."""
        end_s = time.monotonic() + limit_s
        while not is_true():
            if self._failure is not None:
                raise self._failure
            assert time.monotonic() < end_s, f"{what}: not within {limit_s:.0f} s; {self.told()}"
            self.turn()
            time.sleep(PAUSE_S)

    def told(self) -> str:
        """Return what the window says at the moment, for a test that fails."""
        runs = [f"{run.state}: {run.message}" for run in self.cluster.runs.values()]
        page = self.window.stack.currentWidget()
        places = (self.window, page, self.find(QDialog))
        banners = [getattr(p, key, None) for p in places for key in ("banner", "notice")]
        return "; ".join((*runs, *(one.message() for one in banners if one and one.isVisible())))

    def find(self, kind: type[Kind]) -> Kind | None:
        """Return the newest visible dialog of a kind."""
        found = [w for w in QApplication.topLevelWidgets() if isinstance(w, kind) and w.isVisible()]
        return found[-1] if found else None

    def shown(self, kind: type[Kind]) -> Kind:
        """Wait for a dialog, and return it."""
        self.until(lambda: self.find(kind), f"a {kind.__name__} is shown")
        found = self.find(kind)
        assert found is not None
        return found

    def turn(self, deed: Callable[[], object] | None = None) -> None:
        """Do `deed` and let all events pass that wait now; the time it took is kept."""
        turn = TurnTime()
        if deed is not None:
            deed()
        self.application.processEvents()
        self.turns.append(turn.seconds())

    # ------------------------------------------------------------ hands

    def press(self, widget: QWidget, name: str) -> None:
        """Click a visible, enabled button by its name, in its middle."""
        found = [
            button
            for button in widget.findChildren(QPushButton)
            if button.accessibleName() == name and button.isVisible()
        ]
        assert found, f"no visible button '{name}'; {self.told()}"
        self.until(found[0].isEnabled, f"'{name}' can be pressed")
        QTest.mouseClick(found[0], Qt.MouseButton.LeftButton)

    def type(self, line: QWidget, text: str) -> None:
        """Replace what stands in a field, with keys alone."""
        assert isinstance(line, QLineEdit)
        line.setFocus()
        QTest.keyClick(line, Qt.Key.Key_A, Qt.KeyboardModifier.ControlModifier)
        QTest.keyClicks(line, text)
        assert line.text() == text

    def key(
        self, key: Qt.Key, modifiers: Qt.KeyboardModifier = Qt.KeyboardModifier.NoModifier
    ) -> None:
        """Press a key where the focus is."""
        front = self.find(QDialog) or self.window
        if not front.isActiveWindow():  # offscreen has no window manager to see to that
            front.activateWindow()
            self.until(front.isActiveWindow, "the window in front is active")
        QTest.keyClick(self.application.focusWidget() or front, key, modifiers)

    def when_shown(self, kind: type[QDialog], deed: Callable[[QDialog], None]) -> None:
        """Have `deed` done to the modal dialog that the next click opens."""
        timer = QTimer(self.window, interval=20)

        def look() -> None:
            dialog = self.find(kind)
            if dialog is not None:
                timer.stop()
                try:
                    deed(dialog)
                except AssertionError as error:  # Qt would only print it
                    self._failure = error
                    dialog.reject()

        timer.timeout.connect(look)
        timer.start()

    def answer(self, kind: type[QDialog], name: str) -> None:
        """Have a button pressed in the modal dialog that the next click opens."""
        self.when_shown(kind, lambda dialog: self.press(dialog, name))
