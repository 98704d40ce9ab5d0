"""Ask for confirmation; the refusal is the default where the action destroys something."""

from __future__ import annotations

from PySide6.QtWidgets import QDialog, QHBoxLayout, QVBoxLayout, QWidget

from app.gui.kit.primitives import Button, make_label
from app.gui.kit.theme import Theme


class ConfirmDialog(QDialog):
    """Title, explanation, and two buttons: the refusal and the action."""

    def __init__(
        self,
        parent: QWidget,
        theme: Theme,
        title: str,
        text: str,
        action: str,
        *,
        is_dangerous: bool,
        refusal: str,
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
        refuse = Button(theme, refusal, self.reject)
        role = "danger" if is_dangerous else "primary"
        self.action = Button(theme, action, self.accept, role=role)
        row.addWidget(refuse)
        row.addWidget(self.action)
        column.addLayout(row)
        default = refuse if is_dangerous else self.action
        default.setDefault(True)
        default.setFocus()  # so that Enter and Space both take the default


def confirm(
    parent: QWidget,
    theme: Theme,
    title: str,
    text: str,
    action: str,
    *,
    is_dangerous: bool = False,
    refusal: str = "Cancel",
) -> bool:
    """Block until the user answers; return whether they chose `action`, a button's label."""
    question = ConfirmDialog(
        parent, theme, title, text, action, is_dangerous=is_dangerous, refusal=refusal
    )
    return question.exec() == QDialog.DialogCode.Accepted
