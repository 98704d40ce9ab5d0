"""Form of a new run: the main settings are visible, the advanced ones are folded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QHBoxLayout, QScrollArea, QVBoxLayout, QWidget

from agents.contract.requests.hub import CachedKind
from agents.contract.spec import DataSpec, RunSpec
from app.events import NodeState
from app.flows.new_run import RunReview, list_questions
from app.flows.new_run_answers import RunAnswers
from app.gui.forms.answer_field import AnswerField
from app.gui.forms.form import make_sections, stack_sections
from app.gui.kit.collapsible import CollapsibleSection
from app.gui.kit.inputs import ChoiceBox
from app.gui.kit.primitives import Button, IconButton, make_label
from app.gui.kit.theme import Theme
from app.gui.session.context import Context
from app.library.recipes import Recipe
from app.text import count_of

ON_HUB: dict[str, CachedKind] = {"model": "model", "data.train": "data", "data.eval": "data"}
"""Kind of what the hub has for a key, by the key's name."""


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
        self.box.currentIndexChanged.connect(self._show_choice)
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

    def _show_choice(self, place: int) -> None:
        if 0 <= place < len(self._choices):
            self._purpose.setText(self._choices[place].purpose)
            self.delete.setVisible(bool(self._choices[place].own))

    def _ask_delete(self) -> None:
        self.delete_asked.emit(self._choices[self.box.currentIndex()].own)


class RunForm(QScrollArea):
    """Form fields with their answers and findings."""

    edited = Signal()
    """An answer was changed."""
    hub_asked = Signal(str)
    """Name of the key whose answer is to be found on the hub."""
    nodes_offered = Signal()
    """The nodes that are offered have changed."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._cluster = cluster = context.cluster
        # State of each node as last offered: they report several times a minute.
        self._states: list[tuple[str, NodeState]] | None = None
        basic, self._folded = list_questions(advanced=False), list_questions(advanced=True)
        self.fields = {key.name: AnswerField(context.theme, key) for key in (*basic, *self._folded)}
        for name in ON_HUB:
            self.fields[name].add_button(self._make_finder(context.theme, name))
        self._offer_nodes()
        for signal in (cluster.is_open_changed, cluster.node_changed, cluster.node_removed):
            signal.connect(self._offer_nodes)
        self.start_from = StartFrom(context.theme)
        self._main = make_sections(basic, self.fields)
        self._advanced = make_sections(self._folded, self.fields)
        self.fold = CollapsibleSection(context.theme, "Advanced", stack_sections(self._advanced))
        body = QWidget()
        body.setObjectName("content")
        column = QVBoxLayout(body)
        column.setContentsMargins(0, 0, 16, 16)
        column.setSpacing(12)
        for part in (self.start_from, *self._main, self.fold):
            column.addWidget(part)
        column.addStretch(1)
        self.setWidget(body)
        self.setWidgetResizable(True)
        # Tab goes from field to field, not to the scroll area.
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        for field in self.fields.values():
            field.edited.connect(self.edited)

    def _make_finder(self, theme: Theme, name: str) -> Button:
        tip = "Search the Hugging Face hub"
        return Button(
            theme, "Find\u2026", lambda: self.hub_asked.emit(name), icon="search", tip=tip
        )

    def _offer_nodes(self, name: str = "") -> None:
        """Offer the nodes that are known by now; more may be found while the form is open."""
        nodes = self._cluster.node_list()
        states = [(node.name, node.state) for node in nodes]
        if name and states == self._states:
            return
        self._states = states
        self.fields["nodes"].show_nodes(nodes, are_known=self._cluster.is_open)
        self.nodes_offered.emit()

    def answers(self) -> RunAnswers:
        """Return the current answers."""
        return {key: field.answer() for key, field in self.fields.items()}

    def fill(self, answers: RunAnswers) -> None:
        """Set every field."""
        for key, field in self.fields.items():
            field.set_answer(answers[key])

    def show_review(self, result: RunReview, *, shows_all: bool) -> None:
        """Show the fields that apply, with findings below them.

        Args:
            result: review of the current answers.
            shows_all: also shows findings of fields that the user has not visited yet.
        """
        for key, field in self.fields.items():
            finding = result.findings.get(key)
            is_due = shows_all or field.was_touched
            is_due = is_due or (finding is not None and finding.severity == "warning")
            field.show_finding(finding if is_due or key == "nodes" else None)
        for section in (*self._main, *self._advanced):
            section.show_asked(result.asked)
        self._show_advanced_note(result)

    def count_errors(self, result: RunReview) -> int:
        """Return the number of fields with an error."""
        return sum(result.is_error(key) for key in self.fields)

    def show_first_error(self, result: RunReview) -> None:
        """Focus the first field with an error, unfolding the advanced settings if needed."""
        errors = [key for key in self.fields if result.is_error(key)]
        if errors:
            first = self.fields[errors[0]]
            if first.key in self._folded:
                self.fold.open()
            first.input.setFocus()
            self.ensureWidgetVisible(first)

    def begin(self) -> None:
        """Focus the first field."""
        self.fields["model"].input.setFocus()

    def _show_advanced_note(self, result: RunReview) -> None:
        found = [key.name for key in self._folded if key.name in result.findings]
        num_all = len(self._folded)
        if found:
            number = count_of(len(found), "setting")
            role = "problem" if any(result.is_error(key) for key in found) else "advice"
            self.fold.set_note(f"{number} need{'s' if len(found) == 1 else ''} attention", role)
        elif result.changed:
            self.fold.set_note(f"{len(result.changed)} of {num_all} settings changed")
        else:
            self.fold.set_note(f"{num_all} settings, all at their defaults")
