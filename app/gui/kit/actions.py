"""Every action of the window, declared once: text, shortcut, icon, explanation.

Menus, buttons and tooltips are all made from here, so that they always agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from PySide6.QtGui import QAction, QKeySequence
from PySide6.QtWidgets import QWidget

from app.gui.kit.primitives import Button
from app.gui.kit.theme import Theme


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionText:
    text: str
    tip: str
    icon: str = ""
    shortcut: str = ""


TEXTS: dict[str, ActionText] = {
    "new_run": ActionText(text="New run", tip="Fine-tune a model", icon="add", shortcut="Ctrl+N"),
    "open_run_file": ActionText(
        text="Open run file\u2026",
        tip="Read a run file (YAML) into the New run dialog",
        icon="folder",
        shortcut="Ctrl+O",
    ),
    "add_node": ActionText(
        text="Add a PC", tip="Add a node over SSH, or this PC", icon="add", shortcut="Ctrl+Shift+N"
    ),
    "add_this_pc": ActionText(
        text="Add this PC", tip="Let this PC train and show its figures", icon="pc"
    ),
    "check": ActionText(
        text="Check all nodes",
        tip="Compare versions, try every connection, sum a small tensor over all nodes",
        icon="check",
        shortcut="Ctrl+Shift+C",
    ),
    "run_demo": ActionText(
        text="Run the demo",
        tip="Three nodes on this PC train a small model together, then one of them fails",
        icon="demo",
    ),
    "overview": ActionText(text="Overview", tip="All devices live", shortcut="Ctrl+1"),
    "nodes": ActionText(text="Nodes", tip="The PCs of the cluster", shortcut="Ctrl+2"),
    "runs": ActionText(text="Runs", tip="All fine-tuning runs", shortcut="Ctrl+3"),
    "artifacts": ActionText(text="Artifacts", tip="What exports made", shortcut="Ctrl+4"),
    "palette": ActionText(
        text="Command palette\u2026",
        tip="Find any action, page, run or node by its name",
        icon="search",
        shortcut="Ctrl+K",
    ),
    "settings": ActionText(
        text="Settings", tip="Colours, closing, notifications, the hub", shortcut="Ctrl+,"
    ),
    "shortcuts": ActionText(
        text="Keyboard shortcuts", tip="All of them on one page", icon="info", shortcut="F1"
    ),
    "refresh": ActionText(text="Refresh", tip="Ask the nodes again", icon="refresh", shortcut="F5"),
    "find": ActionText(
        text="Find in the log",
        tip="Search the log of the open run",
        icon="search",
        shortcut="Ctrl+F",
    ),
    "close": ActionText(
        text="Close the window", tip="Runs go on without the window", shortcut="Ctrl+W"
    ),
    "quit": ActionText(
        text="Quit Rackless", tip="Also from the tray; runs go on all the same", shortcut="Ctrl+Q"
    ),
    "system": ActionText(text="Follow the system", tip="Light or dark as the desktop is"),
    "light": ActionText(text="Light", tip="Always light"),
    "dark": ActionText(text="Dark", tip="Always dark"),
}


class Actions:
    """The QActions of one window."""

    def __init__(self, window: QWidget, theme: Theme) -> None:
        self._window, self._theme = window, theme
        self._actions: dict[str, QAction] = {}

    def add(self, name: str, triggered: Callable[[], object]) -> QAction:
        """Make the action `name`; its shortcut works wherever the window has the focus."""
        texts = TEXTS[name]
        action = QAction(texts.text, self._window)
        action.setToolTip(self.tip(name))
        action.setStatusTip(texts.tip)
        if texts.shortcut:
            action.setShortcut(QKeySequence(texts.shortcut))
            action.setShortcutVisibleInContextMenu(True)
        action.triggered.connect(lambda: triggered())
        self._window.addAction(action)
        self._actions[name] = action
        return action

    def __getitem__(self, name: str) -> QAction:
        return self._actions[name]

    def has(self, name: str) -> bool:
        return name in self._actions

    def tip(self, name: str) -> str:
        """Return the explanation with the shortcut behind it."""
        texts = TEXTS[name]
        return f"{texts.tip} ({texts.shortcut})" if texts.shortcut else texts.tip

    def button(self, name: str, role: str = "") -> Button:
        """Return a button that triggers the action."""
        action, texts = self._actions[name], TEXTS[name]
        button = Button(
            self._theme, texts.text, action.trigger, icon=texts.icon, role=role, tip=self.tip(name)
        )
        action.enabledChanged.connect(button.setEnabled)
        button.setEnabled(action.isEnabled())
        return button
