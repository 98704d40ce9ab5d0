"""Sections of a form: a heading above questions in two columns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from PySide6.QtWidgets import QGridLayout, QVBoxLayout, QWidget

from agents.contract.key import RunKey
from app.gui.forms.answer_field import AnswerField
from app.gui.kit.primitives import make_label


class FormSection(QWidget):
    """Hides itself when no question of its own is asked."""

    def __init__(self, title: str, fields: Sequence[AnswerField]) -> None:
        super().__init__()
        self._fields = fields
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 12)
        column.setSpacing(12)
        column.addWidget(make_label(title, "heading"))
        grid = QGridLayout()
        grid.setHorizontalSpacing(24)
        grid.setVerticalSpacing(16)
        for place in (0, 1):
            grid.setColumnStretch(place, 1)
            grid.setColumnMinimumWidth(place, 1)
        place = 0
        for field in fields:
            if field.is_wide:
                # A wide field starts a line of its own; the cell before it may stay empty.
                place += place % 2
                grid.addWidget(field, place // 2, 0, 1, 2)
                place += 2
            else:
                grid.addWidget(field, place // 2, place % 2)
                place += 1
        column.addLayout(grid)

    def show_asked(self, keys: Collection[str]) -> None:
        """Show the questions among `keys`, and hide the others."""
        for field in self._fields:
            field.setVisible(field.key.name in keys)
        self.setVisible(any(field.key.name in keys for field in self._fields))


def make_sections(
    asked: Sequence[RunKey], fields: Mapping[str, AnswerField]
) -> tuple[FormSection, ...]:
    """Return the sections of the keys `asked`, in order of appearance."""
    # A dict and not a set, for its order.
    titles = dict.fromkeys(key.about.group for key in asked)
    return tuple(
        FormSection(title, [fields[key.name] for key in asked if key.about.group == title])
        for title in titles
    )


def stack_sections(sections: Sequence[QWidget]) -> QWidget:
    """Return a widget with the sections below each other."""
    box = QWidget()
    column = QVBoxLayout(box)
    column.setContentsMargins(0, 0, 0, 0)
    column.setSpacing(12)
    for section in sections:
        column.addWidget(section)
    return box
