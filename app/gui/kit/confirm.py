"""One question with two answers; the safe one is the default."""

from __future__ import annotations

from PySide6.QtWidgets import QDialog, QHBoxLayout, QVBoxLayout, QWidget

from app.gui.kit.primitives import Button, make_label
from app.gui.kit.theme import Theme


class ConfirmDialog(QDialog):
    """Title, explanation, `Cancel` and the action."""

    def __init__(
        self,
        parent: QWidget,
        theme: Theme,
        title: str,
        text: str,
        action: str,
        *,
        is_dangerous: bool,
    ) -> None:
        super().__init__(parent)
        self.setWindowTitle(title)
        self.setModal(True)
        words = make_label(text, wraps=True)
        words.setMinimumWidth(400)
        column = QVBoxLayout(self)
        column.setContentsMargins(24, 20, 24, 20)
        column.setSpacing(12)
        column.addWidget(make_label(title, "heading"))
        column.addWidget(words)
        column.addSpacing(8)
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addStretch(1)
        cancel = Button(theme, "Cancel", self.reject)
        role = "danger" if is_dangerous else "primary"
        self.action = Button(theme, action, self.accept, role=role)
        row.addWidget(cancel)
        row.addWidget(self.action)
        column.addLayout(row)
        default = cancel if is_dangerous else self.action
        default.setDefault(True)
        default.setFocus()


def confirm(
    parent: QWidget, theme: Theme, title: str, text: str, action: str, *, is_dangerous: bool = False
) -> bool:
    """Ask, and return whether the action was chosen."""
    question = ConfirmDialog(parent, theme, title, text, action, is_dangerous=is_dangerous)
    return question.exec() == QDialog.DialogCode.Accepted
