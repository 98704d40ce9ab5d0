"""Open the window first, and the core in its own thread after the first frame.

The window thus appears at once, even if disk or network are slow.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from PySide6.QtWidgets import QApplication

from app.core.action import CoreApi, OpenCore
from app.gui.kit.theme import Theme
from app.gui.session.bridge import Bridge
from app.gui.session.context import Context
from app.gui.session.live_state import LiveState
from app.gui.session.preferences import preferences_of
from app.gui.shell.crash_dialog import CrashHook
from app.gui.shell.demo_process import run_demo_apart
from app.gui.shell.main_window import MainWindow
from app.gui.shell.selfcheck import check_reference_counts
from app.gui.shell.shell import DemoRunner
from app.gui.shell.single_instance import SingleInstance
from app.gui.shell.window_state import read_window_state, write_window_state
from app.paths import Paths
from app.settings import Settings


def core_opener(home: Path) -> OpenCore:
    """Return a function that opens the real core, and imports it, on the core's thread."""

    @contextlib.asynccontextmanager
    async def open_core() -> AsyncIterator[CoreApi]:
        from app.core.core import Core

        async with Core.open(home) as core:
            yield core

    return open_core


def open_window(
    home: Path,
    demo: DemoRunner | None = None,
    *,
    starts_demo: bool = False,
    opened: Callable[[MainWindow], object] | None = None,
) -> int:
    """Show the window until it is closed, and return the exit code.

    If a window is open on this home already, bring it forward and return at once.

    Args:
        home: folder of the master's files.
        demo: runs the demo that an empty window offers; None for one in its own window.
        starts_demo: run the demo at once.
        opened: called with the window once it is painted and its core is open.

    Raises:
        UserError: this PySide6 does not work with this Python.
    """
    check_reference_counts()
    application = make_application()
    instance = SingleInstance(home)
    if not instance.is_first and instance.show_first():
        return 0
    theme = Theme(application)
    hook = CrashHook(theme)
    hook.install()
    preferences = preferences_of(Settings(Paths(home).settings_file))
    theme.choose_named(str(preferences.get("theme")))
    state = read_window_state(home)
    bridge = Bridge(core_opener(home))
    bridge.crashed.connect(hook.show_crash)
    context = Context(bridge, LiveState(bridge), theme, preferences=preferences, home=home)
    window = MainWindow(context, state, demo or run_demo_apart)
    hook.parent_window = window
    _connect_life(application, bridge, window)
    instance.wanted.connect(window.come_forward)
    window.painted.connect(instance.listen)
    bridge.opened.connect(lambda nodes, runs: _make_tray(context, window))
    # Modules and widgets of the first page live until the end: spare every later collection.
    bridge.opened.connect(lambda nodes, runs: gc.freeze())
    if starts_demo:
        bridge.opened.connect(lambda nodes, runs: window.run_demo())
    if opened is not None:
        bridge.opened.connect(lambda nodes, runs: opened(window))
    window.show()
    code = application.exec()
    bridge.join()
    instance.end()
    write_window_state(home, window.state)
    return code


def run(home: Path) -> int:
    """Open the window on `home`."""
    return open_window(home)


def make_application() -> QApplication:
    """Return the QApplication of this process, creating it if needed."""
    existing = QApplication.instance()
    if isinstance(existing, QApplication):
        return existing
    application = QApplication(sys.argv[:1])
    application.setApplicationName("Rackless")
    application.setDesktopFileName("rackless")
    return application


def _make_tray(context: Context, window: MainWindow) -> None:
    from app.gui.shell.tray import Tray  # imported after the first frame, which needs none

    Tray(context, window)


def _connect_life(application: QApplication, bridge: Bridge, window: MainWindow) -> None:
    # A window in the tray is closed for Qt, while the application keeps running.
    application.setQuitOnLastWindowClosed(False)
    application.setWindowIcon(window.windowIcon())
    window.painted.connect(bridge.start)
    window.finished.connect(bridge.stop)
    application.commitDataRequest.connect(lambda session: window.expect_end())
    bridge.closed.connect(lambda: application.quit() if window.is_over else None)
    # Python allows signal handlers in the main thread only; tests may run elsewhere.
    if threading.current_thread() is threading.main_thread():
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, lambda number, frame: window.close_quietly())
