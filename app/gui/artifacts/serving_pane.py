"""Commands that serve an artifact, with notes and copy buttons."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QHBoxLayout, QScrollArea, QVBoxLayout, QWidget

from app.artifacts.serving import ServeCommand
from app.gui.kit.primitives import Button, make_label, make_panel, make_selectable
from app.gui.kit.theme import Theme


class ServingPane(QScrollArea):
    taken = Signal(object)
    """ServeCommand to copy to the clipboard."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme = theme
        self.buttons: list[Button] = []
        self.setWidgetResizable(True)
        # Commands wrap, so a horizontal bar would only cover the last one.
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.say("")

    def say(self, text: str) -> None:
        """Show a message instead of commands."""
        body, column = self._make_body()
        column.addWidget(make_label(text, "muted", wraps=True))
        # `setWidget` deletes the previous body, and its buttons with it.
        column.addStretch(1)
        self.buttons = []
        self.setWidget(body)

    def show_commands(self, commands: Sequence[ServeCommand]) -> None:
        """Show commands, one below the other."""
        body, column = self._make_body()
        self.buttons = []
        for command in commands:
            column.addWidget(self._make_row(command))
        column.addStretch(1)
        self.setWidget(body)

    def _make_body(self) -> tuple[QWidget, QVBoxLayout]:
        body = QWidget()
        body.setObjectName("content")
        column = QVBoxLayout(body)
        column.setContentsMargins(0, 12, 8, 4)
        column.setSpacing(12)
        return body, column

    def _make_row(self, command: ServeCommand) -> QWidget:
        panel = make_panel()
        row = QHBoxLayout(panel)
        row.setContentsMargins(16, 12, 12, 12)
        row.setSpacing(16)
        words = QVBoxLayout()
        words.setSpacing(4)
        words.addWidget(make_label(command.title, "subheading"))
        # Selectable, so that a part of the command can be copied as well.
        code = make_selectable(make_label(command.command, "code", wraps=True))
        code.setAccessibleName(f"Command for {command.title}")
        words.addWidget(code)
        words.addWidget(make_label(" ".join(command.notes), "caption", wraps=True))
        button = Button(
            self._theme,
            "Copy",
            lambda: self.taken.emit(command),
            icon="copy",
            tip="Copy the command" + (" and write its Modelfile" if command.modelfile else ""),
        )
        button.setAccessibleName(f"Copy the command for {command.title}")
        self.buttons.append(button)
        row.addLayout(words, 1)
        row.addWidget(button, 0, Qt.AlignmentFlag.AlignTop)
        return panel
