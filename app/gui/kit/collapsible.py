"""A section of a form that stays collapsed until its header is clicked."""

from __future__ import annotations

from PySide6.QtCore import QSize, Qt
from PySide6.QtWidgets import QHBoxLayout, QLabel, QPushButton, QVBoxLayout, QWidget

from app.gui.kit.primitives import make_label
from app.gui.kit.theme import Theme


class CollapsibleSection(QWidget):
    """A header that shows and hides the body, with a note that sums up the contents."""

    def __init__(self, theme: Theme, title: str, body: QWidget) -> None:
        super().__init__()
        self._theme = theme
        self.body = body
        self.head = QPushButton(f" {title}")
        self.head.setObjectName("fold")
        self.head.setCheckable(True)
        # In a dialog, Enter would otherwise toggle the section instead of starting the action.
        self.head.setAutoDefault(False)
        self.head.setIconSize(QSize(16, 16))
        self.head.setCursor(Qt.CursorShape.PointingHandCursor)
        self.head.setAccessibleName(title)
        self._note: QLabel = make_label(role="muted")
        row = QHBoxLayout()
        row.setSpacing(12)
        row.addWidget(self.head)
        row.addWidget(self._note, 1)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(12)
        column.addLayout(row)
        column.addWidget(body)
        self.head.toggled.connect(self._show)
        theme.changed.connect(self._restyle)  # a method: disconnected with this widget
        self._show(False)

    def is_open(self) -> bool:
        return self.head.isChecked()

    def open(self) -> None:
        self.head.setChecked(True)

    def set_note(self, note: str, role: str = "muted") -> None:
        """Set the note; `role` is a name in window.qss: muted, advice or problem."""
        self._note.setText(note)
        if self._note.objectName() != role:
            self._note.setObjectName(role)
            self._note.style().polish(self._note)
        self.head.setAccessibleDescription(note)

    def _restyle(self) -> None:
        self._show(self.is_open())

    def _show(self, is_open: bool) -> None:
        self.body.setVisible(is_open)
        self.head.setIcon(self._theme.icon("down" if is_open else "right", "text", 16))
