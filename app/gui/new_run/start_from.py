"""Choice of starting point for a form: default settings, a recipe, a run file or another run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QHBoxLayout, QVBoxLayout, QWidget

from agents.contract.spec import DataSpec, RunSpec
from app.gui.kit.inputs import ChoiceBox
from app.gui.kit.primitives import IconButton, make_label
from app.gui.kit.theme import Theme
from app.library.recipes import Recipe


class _Choice(NamedTuple):
    purpose: str
    spec: RunSpec
    own: str
    """Name of the user's own recipe, which can be deleted; empty for anything else."""


_USUAL = "Suits most fine-tuning: LoRA on chats, instructions or plain text."


class StartFrom(QWidget):
    chosen = Signal(object)
    """RunSpec whose settings to use; its model and data are ignored."""
    delete_asked = Signal(str)
    """Name of the user's own recipe to delete."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        # Choices in the order of the combo box.
        self._choices: list[_Choice] = []
        self.delete = IconButton(theme, "delete", "Delete this recipe", self._ask_delete)
        self.delete.hide()
        self.box = ChoiceBox()
        self.box.setAccessibleName("Start from")
        self._purpose = make_label(role="caption", wraps=True)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 12)
        column.setSpacing(4)
        column.addWidget(make_label("Start from", "subheading"))
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addWidget(self.box, 1)
        row.addWidget(self.delete)
        column.addLayout(row)
        column.addWidget(self._purpose)
        self.box.currentIndexChanged.connect(self._tell)
        # `activated` fires for user choices only; `show_source` must not fill the form again.
        self.box.activated.connect(lambda place: self.chosen.emit(self._choices[place].spec))
        # A spec needs a model and data; these placeholders are never used (see `chosen`).
        self.add("Default settings", _USUAL, RunSpec(model="-", data=DataSpec(train="-")))

    def add_recipes(self, recipes: Sequence[Recipe]) -> None:
        for recipe in recipes:
            # Built-in recipes cannot be deleted.
            own = recipe.name if recipe.is_own else ""
            self.add(recipe.title, recipe.purpose, recipe.spec, own)

    def add(self, title: str, purpose: str, spec: RunSpec, own: str = "") -> None:
        """Add a choice; `own` is the name of a recipe that the user can delete."""
        # Before the item: the first one emits `currentIndexChanged`, which reads the choice.
        self._choices.append(_Choice(purpose, spec, own))
        self.box.addItem(title)

    def drop(self, own: str) -> None:
        """Remove a deleted recipe."""
        for place, choice in enumerate(self._choices):
            if choice.own == own:
                # Before the item: its removal may change the index, which reads the choices.
                del self._choices[place]
                self.box.removeItem(place)
                return

    def show_source(self, title: str, purpose: str, spec: RunSpec) -> None:
        """Add a choice for the current answers' source, and select it."""
        self.add(title, purpose, spec)
        self.box.setCurrentIndex(self.box.count() - 1)

    def _tell(self, place: int) -> None:
        if 0 <= place < len(self._choices):
            self._purpose.setText(self._choices[place].purpose)
            self.delete.setVisible(bool(self._choices[place].own))

    def _ask_delete(self) -> None:
        self.delete_asked.emit(self._choices[self.box.currentIndex()].own)
