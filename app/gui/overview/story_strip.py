"""Steps of the demo, each marked as done, running, to do or failed."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QVBoxLayout, QWidget

from app.gui.kit.flow_layout import FlowLayout
from app.gui.kit.primitives import IconButton, make_label
from app.gui.kit.theme import Theme

_GLYPHS = {"done": ("good", "good"), "now": ("busy", "accent"), "failed": ("error", "error")}


class StoryStrip(QFrame):
    """Strip with the demo's steps; hidden until `show_steps` is called."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self.setObjectName("panel")
        self._theme = theme
        self._steps: tuple[tuple[str, str], ...] = ()
        self._marks: list[tuple[QLabel, QLabel]] = []
        column = QVBoxLayout(self)
        column.setContentsMargins(16, 10, 8, 12)
        column.setSpacing(8)
        head = QHBoxLayout()
        head.addWidget(make_label("Demo: three nodes on this PC train one model", "subheading"))
        head.addStretch(1)
        head.addWidget(IconButton(theme, "close", "Hide the demo steps", self.hide))
        column.addLayout(head)
        self._row = FlowLayout(gap_px=16, line_gap_px=4)
        column.addLayout(self._row)
        self._note = make_label(role="caption", wraps=True)
        column.addWidget(self._note)
        theme.changed.connect(self._paint)
        self.hide()

    def show_steps(self, steps: Sequence[tuple[str, str]], note: str = "") -> None:
        """Show (title, `done` | `now` | `todo` | `failed`) of each step, and a note on the
        current one.
        """
        if len(steps) != len(self._marks):
            self._make_marks(len(steps))
        self._steps = tuple(steps)
        self._note.setText(note)
        self._note.setVisible(bool(note))
        self._paint()
        self.show()

    def _make_marks(self, count: int) -> None:
        while self._row.count():
            item = self._row.takeAt(0)
            part = item.widget() if item is not None else None
            if part is not None:
                part.deleteLater()
        self._marks = []
        for _ in range(count):
            glyph, words = QLabel(), make_label(role="")
            glyph.setFixedSize(16, 16)
            part = QWidget()
            line = QHBoxLayout(part)
            line.setContentsMargins(0, 0, 0, 0)
            line.setSpacing(6)
            line.addWidget(glyph)
            line.addWidget(words, 1)
            self._row.addWidget(part)
            self._marks.append((glyph, words))

    def _paint(self) -> None:
        scale = self.devicePixelRatioF()
        for (glyph, words), (title, state) in zip(self._marks, self._steps, strict=True):
            icon, color = _GLYPHS.get(state, ("pending", "muted"))
            glyph.setPixmap(self._theme.pixmap(icon, color, 16, scale))
            words.setText(title)
            words.setAccessibleName(f"{title}: {state}")
