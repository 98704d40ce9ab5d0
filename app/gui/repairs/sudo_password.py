"""A field for the password of sudo on a node, which is read once and not stored."""

from __future__ import annotations

from PySide6.QtWidgets import QLineEdit


class SudoPassword(QLineEdit):
    """Hidden while no password is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.setEchoMode(QLineEdit.EchoMode.Password)
        self.setAccessibleName("Password for sudo")
        self.hide()

    def ask(self, node: str, *, is_wanted: bool) -> None:
        """Show the field for a node, or hide it."""
        self.setPlaceholderText(f"Password for sudo on {node}; used once and not stored")
        if is_wanted == self.isHidden():
            self.clear()
            self.setVisible(is_wanted)

    def take(self) -> str:
        """Return what was typed, and forget it."""
        typed = self.text() if not self.isHidden() else ""
        self.clear()
        return typed
