"""Open the real window, check that it paints, close it: part of `rackless --self-test`."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QTimer, qVersion
from PySide6.QtGui import QGuiApplication

from app.errors import UserError
from app.gui.application import make_application, open_window
from app.gui.shell.main_window import MainWindow
from app.gui.shell.navigation import PLACES

MIN_COLORS = 8
"""Minimum number of colours of a page that was really painted."""


def open_and_close(home: Path, timeout_s: float) -> str:
    """Open the window on `home`, show every page, close it, and return what was seen.

    Raises:
        UserError: it did not open in time, a page stayed empty, or text has no letters.
    """
    make_application()
    seen: list[str] = []

    def show_all(window: MainWindow) -> None:
        for place in PLACES:
            window.go_to(place)
            if count_colors(window) >= MIN_COLORS:
                seen.append(place)
        window.dialogs.show_help()
        window.close_quietly()

    def give_up() -> None:
        application = QGuiApplication.instance()
        if application is not None:
            application.quit()

    late = QTimer(interval=round(timeout_s * 1000), singleShot=True)
    late.timeout.connect(give_up)
    late.start()
    open_window(home, opened=show_all)
    late.stop()
    if missing := [place for place in PLACES if place not in seen]:
        raise UserError(
            f"the window did not show {', '.join(missing)} within {timeout_s:.0f} s",
            "Start it from a terminal with QT_DEBUG_PLUGINS=1 to see what Qt misses.",
        )
    return f"Qt {qVersion()} on {QGuiApplication.platformName()}, {len(seen)} pages"


def count_colors(window: MainWindow) -> int:
    """Return how many colours a picture of the window has, counted on a grid."""
    image = window.grab().toImage()
    step = 5
    points = ((x, y) for x in range(0, image.width(), step) for y in range(0, image.height(), step))
    return len({image.pixel(x, y) for x, y in points})
