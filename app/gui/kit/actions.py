"""Text, shortcut, icon and tooltip of every action of the window, declared once.

Menus, buttons, tooltips, the palette and the list of shortcuts read this table, so they agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from PySide6.QtGui import QAction, QKeySequence
from PySide6.QtWidgets import QWidget

from app.gui.kit.primitives import Button, set_tooltip
from app.gui.kit.theme import Theme


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionText:
    text: str
    """Label of the menu entry and the button."""
    tip: str
    icon: str = ""
    """Name of a file in resources/icons; empty for none."""
    shortcut: str = ""
    """Key sequence in Qt's portable notation, such as `Ctrl+N`; empty for none."""


# In the order of the list of shortcuts, and of the actions in the palette.
TEXTS: dict[str, ActionText] = {
    "new_run": ActionText(text="New run", tip="Fine-tune a model", icon="add", shortcut="Ctrl+N"),
    "open_run_file": ActionText(
        text="Open run file\u2026",
        tip="Fill in a new run from a run file (YAML)",
        icon="folder",
        shortcut="Ctrl+O",
    ),
    "add_node": ActionText(
        text="Add a PC", tip="Add a node over SSH, or this PC", icon="add", shortcut="Ctrl+Shift+N"
    ),
    "add_this_pc": ActionText(
        text="Add this PC", tip="Use this PC for training, and monitor it", icon="pc"
    ),
    "check": ActionText(
        text="Check all nodes",
        tip="Compare versions, test every connection, and run a small all-reduce across all nodes",
        icon="check",
        shortcut="Ctrl+Shift+C",
    ),
    "run_demo": ActionText(
        text="Run the demo",
        tip="Train a small model on three simulated nodes, one of which fails",
        icon="demo",
    ),
    "overview": ActionText(text="Overview", tip="Live view of all GPUs", shortcut="Ctrl+1"),
    "nodes": ActionText(text="Nodes", tip="The PCs of the cluster", shortcut="Ctrl+2"),
    "runs": ActionText(text="Runs", tip="All fine-tuning runs", shortcut="Ctrl+3"),
    "artifacts": ActionText(text="Artifacts", tip="Exported models", shortcut="Ctrl+4"),
    "data": ActionText(
        text="Data", tip="Look through the rows that a model learns from", shortcut="Ctrl+5"
    ),
    "palette": ActionText(
        text="Command palette\u2026",
        tip="Find any action, page, run or node by name",
        icon="search",
        shortcut="Ctrl+K",
    ),
    "settings": ActionText(
        text="Settings", tip="Appearance, notifications, Hugging Face token", shortcut="Ctrl+,"
    ),
    "shortcuts": ActionText(
        text="Keyboard shortcuts", tip="List all keyboard shortcuts", icon="info", shortcut="F1"
    ),
    "help": ActionText(
        text="Troubleshooting",
        tip="Search symptoms and error messages, with their causes and what to do",
        icon="search",
        shortcut="Shift+F1",
    ),
    "save_report": ActionText(
        text="Save a report\u2026",
        tip="Collect what support needs to know into one file, without passwords and keys",
        icon="save",
    ),
    "refresh": ActionText(
        text="Refresh", tip="Read the current state from the nodes", icon="refresh", shortcut="F5"
    ),
    "find": ActionText(
        text="Find in the log",
        tip="Search the log of the open run",
        icon="search",
        shortcut="Ctrl+F",
    ),
    "close": ActionText(
        text="Close the window", tip="Close the window; runs keep training", shortcut="Ctrl+W"
    ),
    "quit": ActionText(
        text="Quit Rackless", tip="Quit, also from the tray; runs keep training", shortcut="Ctrl+Q"
    ),
    # These three have the names of SCHEMES, by which the menus look them up.
    "system": ActionText(text="Match system", tip="Use the light or dark theme of your desktop"),
    "light": ActionText(text="Light", tip="Always use the light theme"),
    "dark": ActionText(text="Dark", tip="Always use the dark theme"),
}


class Actions:
    """The QActions of one window."""

    def __init__(self, window: QWidget, theme: Theme) -> None:
        self._window, self._theme = window, theme
        self._actions: dict[str, QAction] = {}

    def add(self, name: str, triggered: Callable[[], object]) -> QAction:
        """Create the action `name`; its shortcut works anywhere in the window."""
        texts = TEXTS[name]
        action = QAction(texts.text, self._window)
        set_tooltip(action, self.tip(name))
        action.setStatusTip(texts.tip)
        if texts.shortcut:
            action.setShortcut(QKeySequence(texts.shortcut))
            action.setShortcutVisibleInContextMenu(True)
        # The lambda drops the `checked` argument of the signal.
        action.triggered.connect(lambda: triggered())
        self._window.addAction(action)  # a shortcut works only for actions a widget owns
        self._actions[name] = action
        return action

    def __getitem__(self, name: str) -> QAction:
        return self._actions[name]

    def has(self, name: str) -> bool:
        return name in self._actions

    def tip(self, name: str) -> str:
        """Return the tooltip, followed by the shortcut in brackets."""
        texts = TEXTS[name]
        return f"{texts.tip} ({texts.shortcut})" if texts.shortcut else texts.tip

    def button(self, name: str, role: str = "") -> Button:
        """Return a button that triggers the action, enabled and disabled with it."""
        action, texts = self._actions[name], TEXTS[name]
        button = Button(
            self._theme, texts.text, action.trigger, icon=texts.icon, role=role, tip=self.tip(name)
        )
        action.enabledChanged.connect(button.setEnabled)
        button.setEnabled(action.isEnabled())
        return button
