"""Keyboard control of a plot.

Left and Right move the readout point by point, which a screen reader announces; with Shift they
pan. Plus and Minus zoom, Home shows everything, Enter opens the values as a table.
"""

from __future__ import annotations

from typing import Protocol

from PySide6.QtCore import Qt
from PySide6.QtGui import QKeyEvent

from app.gui.charts.limits import Limits

_DIRECTIONS = {Qt.Key.Key_Left: -1, Qt.Key.Key_Right: 1}


class Navigable(Protocol):
    """The methods of a plot that the keys use."""

    def visible(self) -> Limits: ...
    def show_range(self, view: Limits | None) -> None: ...
    def step_readout(self, direction: int) -> None: ...
    def show_table(self) -> None: ...


def handle_key(plot: Navigable, event: QKeyEvent) -> bool:
    """Handle a key press; return whether it is one of a plot's keys."""
    key, view = Qt.Key(event.key()), plot.visible()
    middle = (view.low + view.high) / 2
    if key in _DIRECTIONS:
        direction = _DIRECTIONS[key]
        if event.modifiers() & Qt.KeyboardModifier.ShiftModifier:
            plot.show_range(view.moved(direction * view.span * 0.1))
        else:
            plot.step_readout(direction)
    elif key in (Qt.Key.Key_Plus, Qt.Key.Key_Equal):  # = is + without Shift on many keyboards
        plot.show_range(view.zoomed(0.8, middle))
    elif key == Qt.Key.Key_Minus:
        plot.show_range(view.zoomed(1.25, middle))
    elif key == Qt.Key.Key_Home:
        plot.show_range(None)
    elif key in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
        plot.show_table()
    else:
        return False
    return True
