"""Lines of a plan: advice with a button that applies it, and notes below a title."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from PySide6.QtWidgets import QHBoxLayout, QLabel, QVBoxLayout, QWidget

from app.gui.kit.primitives import Button, make_label
from app.gui.kit.theme import Theme
from app.planning.candidate import Advice


class AdviceLines(QWidget):
    """Advice, one line each; lines are kept and hidden, since plans follow typing."""

    def __init__(self, theme: Theme, apply: Callable[[object], None], role: str = "advice") -> None:
        super().__init__()
        self._theme, self._apply, self._role = theme, apply, role
        self._lines: list[_AdviceLine] = []
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(4)

    def show_advice(self, advice: Sequence[Advice]) -> None:
        """Show these pieces of advice instead of the former ones."""
        while len(self._lines) < len(advice):
            self._lines.append(line := _AdviceLine(self._theme, self._apply, self._role))
            self._column.addWidget(line)
        for number, line in enumerate(self._lines):
            line.setVisible(number < len(advice))
            if number < len(advice):
                line.show_advice(advice[number])
        self.setVisible(bool(advice))


class _AdviceLine(QWidget):
    """One piece of advice, with an Apply button if it is a change of the form."""

    def __init__(self, theme: Theme, apply: Callable[[object], None], role: str) -> None:
        super().__init__()
        self._change: Mapping[str, object] = {}
        self._text = make_label(role=role, wraps=True)
        tip = "Change the settings on the left to this"
        # `_change` is read at the click, since a line is reused for later advice.
        self.apply = Button(theme, "Apply", lambda: apply(self._change), role="link", tip=tip)
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(8)
        row.addWidget(self._text, 1)
        row.addWidget(self.apply)

    def show_advice(self, advice: Advice) -> None:
        """Show `advice`."""
        self._change = advice.change
        self._text.setText(advice.text)
        self.apply.setVisible(bool(advice.change))
        self.apply.setAccessibleDescription(advice.text)


class Notes(QWidget):
    """A title above notes, hidden while there are none."""

    def __init__(self, title: str, role: str = "caption") -> None:
        super().__init__()
        self._role = role
        self._labels: list[QLabel] = []
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(4)
        self._title = make_label(title, "subheading")
        self._column.addWidget(self._title)

    def rename(self, title: str) -> None:
        """Replace the title."""
        self._title.setText(title)

    def add(self, widget: QWidget) -> None:
        """Add a widget that stays below the notes."""
        self._column.addWidget(widget)

    def show_notes(self, lines: Sequence[str]) -> None:
        """Show these notes instead of the former ones."""
        while len(self._labels) < len(lines):
            label = make_label(role=self._role, wraps=True)
            # Above what was added below the notes.
            self._column.insertWidget(1 + len(self._labels), label)
            self._labels.append(label)
        for number, label in enumerate(self._labels):
            label.setVisible(number < len(lines))
            label.setText(lines[number] if number < len(lines) else "")
        self.setVisible(bool(lines))
