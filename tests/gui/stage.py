"""A stage for the window: the real window over a fake core, with a clock that stands still."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from PySide6.QtCore import QEvent, Qt, QTimer
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QLabel, QPushButton, QWidget

from app.gui.kit.confirm import ConfirmDialog
from app.gui.kit.theme import Theme
from app.gui.session.bridge import Bridge
from app.gui.session.context import Context
from app.gui.session.live_state import LiveState
from app.gui.shell.main_window import MainWindow
from app.gui.shell.shell import DemoRunner
from app.gui.shell.window_state import WindowState
from tests.fakes.core import NOW_S, FakeCore

W = TypeVar("W", bound=QWidget)

PATIENCE_S = 10.0
HOME = Path("/home/anna/.local/share/rackless")


class Stage:
    """Owns a window, its bridge and the fake core; `end` takes all of it down."""

    def __init__(
        self,
        application: QApplication,
        theme: Theme,
        core: FakeCore,
        *,
        size: tuple[int, int] = (1280, 800),
        demo: DemoRunner | None = None,
        state: WindowState | None = None,
    ) -> None:
        self.application = application
        self.core = core
        self.bridge = Bridge(core.open)
        self.cluster = LiveState(self.bridge, clock=lambda: NOW_S)
        self.context = Context(self.bridge, self.cluster, theme, home=HOME)
        self.crashes: list[str] = []
        self.bridge.crashed.connect(self.crashes.append)
        self.window = MainWindow(self.context, state or WindowState(), demo)
        self.window.resize(*size)
        self.window.painted.connect(self.bridge.start)
        self.window.show()
        self.window.activateWindow()  # shortcuts belong to the active window
        self.wait_for(self.window.isActiveWindow, "the window is active")
        self.wait_for(lambda: self.cluster.is_open)

    def wait_for(self, is_true: Callable[[], bool], what: str = "") -> None:
        """Let events pass until `is_true`; fails after PATIENCE_S."""
        end_s = time.monotonic() + PATIENCE_S
        while not is_true():
            if time.monotonic() > end_s:
                raise AssertionError(f"it did not come to this in {PATIENCE_S} s: {what}")
            self.application.processEvents()
            time.sleep(0.002)

    def settle(self, seconds: float = 0.1) -> None:
        """Let events pass for a while."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self.application.processEvents()
            time.sleep(0.002)

    def called(self, name: str) -> list[tuple[object, ...]]:
        """Return the calls of one action, such as "runs.stop"."""
        return [call[1:] for call in self.core.calls if call[0] == name]

    def end(self) -> None:
        self.bridge.stop()
        self.bridge.join()
        self.window.hide()
        self.window.deleteLater()
        self.application.sendPostedEvents(None, QEvent.Type.DeferredDelete)
        self.application.processEvents()


def press(widget: QWidget, name: str) -> None:
    """Click the visible button with this name."""
    found = [
        button
        for button in widget.findChildren(QPushButton)
        if button.accessibleName() == name and button.isVisible()
    ]
    assert found, f"no visible button '{name}'"
    QTest.mouseClick(found[0], Qt.MouseButton.LeftButton)


def find_dialog(kind: type[W]) -> W | None:
    """Return the newest visible window of a kind; None: there is none."""
    found = [w for w in QApplication.topLevelWidgets() if isinstance(w, kind) and w.isVisible()]
    return found[-1] if found else None


def open_dialog(kind: type[W]) -> W:
    """Return the newest visible window of a kind."""
    found = find_dialog(kind)
    assert found is not None, f"no visible {kind.__name__}"
    return found


def answer_question(name: str) -> list[str]:
    """Press a button of the question that the next click opens; empty: press Enter there.

    Questions are modal and run an event loop of their own, so the answer must be scheduled first;
    it waits for the question, which a busy PC opens late. Returns a list that gets its texts.
    """
    end_s = time.monotonic() + PATIENCE_S
    texts: list[str] = []

    def answer() -> None:
        question = find_dialog(ConfirmDialog)
        if question is not None:
            texts.extend(label.text() for label in question.findChildren(QLabel))
            if name:
                press(question, name)
            else:
                QTest.keyClick(question, Qt.Key.Key_Return)
        elif time.monotonic() < end_s:
            QTimer.singleShot(20, answer)

    QTimer.singleShot(20, answer)
    return texts
