"""A list of all keyboard shortcuts, from the same table as menus and tooltips."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QDialog, QGridLayout, QHBoxLayout, QVBoxLayout, QWidget

from app.gui.kit.actions import TEXTS, Actions
from app.gui.kit.primitives import Button, copy_to_clipboard, make_label
from app.gui.kit.theme import Theme

MORE = (
    ("Esc", "Close a run, a dialog or the palette"),
    ("Tab", "Next control; Shift+Tab goes back"),
    ("Enter", "Open the selected row"),
    ("Arrow keys", "Move to the next row, card, tab or chart point"),
)
"""Keys that belong to no action."""


def list_shortcuts(actions: Actions) -> list[tuple[str, str]]:
    """Return (keys, description) of the window's actions, then of general keys."""
    own = [
        (texts.shortcut, texts.text.rstrip("\u2026"))
        for name, texts in TEXTS.items()
        if texts.shortcut and actions.has(name)
    ]
    return [*own, *MORE]


class ShortcutsDialog(QDialog):
    def __init__(self, theme: Theme, parent: QWidget, actions: Actions) -> None:
        super().__init__(parent)
        self.setWindowTitle("Keyboard shortcuts")
        self.rows = list_shortcuts(actions)
        column = QVBoxLayout(self)
        column.setContentsMargins(24, 20, 24, 20)
        column.setSpacing(16)
        column.addWidget(make_label("Keyboard shortcuts", "heading"))
        grid = QGridLayout()
        grid.setHorizontalSpacing(16)
        grid.setVerticalSpacing(10)
        half = (len(self.rows) + 1) // 2
        for number, (keys, what) in enumerate(self.rows):
            # Three grid columns for each half: keys, description, and the gap between the halves.
            place = 3 * (number // half)
            key = make_label(keys, "key")
            grid.addWidget(key, number % half, place, Qt.AlignmentFlag.AlignLeft)
            grid.addWidget(make_label(what), number % half, place + 1)
        grid.setColumnMinimumWidth(2, 24)
        column.addLayout(grid)
        column.addWidget(
            make_label("Press Ctrl+K to find everything else by name.", "caption", wraps=True)
        )
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addStretch(1)
        text = "\n".join(f"{keys}\t{what}" for keys, what in self.rows)
        row.addWidget(Button(theme, "Copy as text", lambda: copy_to_clipboard(text), icon="copy"))
        close = Button(theme, "Close", self.accept, role="primary")
        close.setDefault(True)
        row.addWidget(close)
        column.addLayout(row)
        # Or the first button, Copy as text, would have the focus and take Enter.
        close.setFocus()
