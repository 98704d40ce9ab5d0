"""Where the answers of a form come from: the usual settings, a recipe, a run file, another run."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QVBoxLayout, QWidget

from agents.spec import DataSpec, RunSpec
from app.gui.seam import RecipeRow
from app.gui.widgets.answer_field import ChoiceBox
from app.gui.widgets.parts import make_label

_USUAL = "Suits most fine-tuning: LoRA on chats, instructions or text."


class StartFrom(QWidget):
    chosen = Signal(object)
    """The RunSpec whose settings are wanted; its model and data are not meant."""

    def __init__(self) -> None:
        super().__init__()
        self._choices: list[tuple[str, RunSpec]] = []
        """(purpose, spec), as in the box."""
        self.box = ChoiceBox()
        self.box.setAccessibleName("Start from")
        self._purpose = make_label(role="caption", wraps=True)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 12)
        column.setSpacing(4)
        column.addWidget(make_label("Start from", "subheading"))
        column.addWidget(self.box)
        column.addWidget(self._purpose)
        self.box.currentIndexChanged.connect(self._tell)
        self.box.activated.connect(lambda place: self.chosen.emit(self._choices[place][1]))
        self.add("Usual settings", _USUAL, RunSpec(model="-", data=DataSpec(train="-")))

    def add_recipes(self, recipes: Sequence[RecipeRow]) -> None:
        for recipe in recipes:
            self.add(recipe.title, recipe.purpose, recipe.spec)

    def add(self, title: str, purpose: str, spec: RunSpec) -> None:
        self._choices.append((purpose, spec))
        self.box.addItem(title)

    def show_source(self, title: str, purpose: str, spec: RunSpec) -> None:
        """Add where the answers were taken from, and let the box stand there."""
        self.add(title, purpose, spec)
        self.box.setCurrentIndex(self.box.count() - 1)

    def _tell(self, place: int) -> None:
        self._purpose.setText(self._choices[place][0])
