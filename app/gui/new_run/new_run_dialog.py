"""New run dialog: the form on the left, its plan and summary on the right.

All logic is in app.flows. A problem shows at its field once the user has visited the field, or
has pressed Start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QDialog, QFileDialog, QHBoxLayout, QVBoxLayout, QWidget

from agents.contract.spec import RunSpec
from app.core.library import DeleteRecipe, ListRecipes, ReadRunFile
from app.core.runs import StartRun
from app.events import RunSnapshot
from app.flows import new_run_answers
from app.flows.new_run import RunReview, name_paths, plan_spec, preview_spec, review, take_advice
from app.gui.kit.banner import Banner
from app.gui.kit.confirm import confirm
from app.gui.kit.primitives import Button
from app.gui.kit.theme import Theme
from app.gui.new_run.data_dialog import DataDialog
from app.gui.new_run.hub_dialog import HubDialog
from app.gui.new_run.live_count import LiveCount
from app.gui.new_run.live_plan import LivePlan
from app.gui.new_run.outlook import Outlook
from app.gui.new_run.run_file_dialog import RUN_FILES, RunFileDialog
from app.gui.new_run.run_form import ON_HUB, RunForm
from app.gui.new_run.run_starter import RunStarter
from app.gui.session.context import Context
from app.gui.session.path_checker import PathChecker
from app.text import free_name


def confirm_delete_recipe(parent: QWidget, theme: Theme) -> bool:
    """Ask for confirmation to delete one of the user's recipes."""
    return confirm(
        parent,
        theme,
        "Delete this recipe?",
        "Runs started from it are not affected. This cannot be undone.",
        "Delete permanently",
        is_dangerous=True,
    )


def make_file_buttons(
    theme: Theme, choose: Callable[[], None], show: Callable[[], None]
) -> tuple[Button, Button]:
    """Return the buttons that read the answers from a run file and show them as one."""
    opened = Button(
        theme, "Open run file\u2026", choose, icon="folder", tip="Fill in the form from a YAML file"
    )
    shown = Button(
        theme,
        "Show as run file\u2026",
        show,
        icon="save",
        tip="See these settings as a file: copy it, save it, or keep it as a recipe",
    )
    return opened, shown


def make_foot(left: Sequence[QWidget], right: Sequence[QWidget]) -> QHBoxLayout:
    """Return a row with buttons at either end."""
    row = QHBoxLayout()
    row.setSpacing(8)
    for button in left:
        row.addWidget(button)
    row.addStretch(1)
    for button in right:
        row.addWidget(button)
    return row


class NewRunDialog(QDialog):
    started = Signal(str)
    """Id of the started run."""
    left = Signal(dict)
    """Draft of the answers when the form is closed without a start; empty if nothing was edited."""

    rows_wanted = Signal(object)
    """Spec of the data whose rows the user wants to look through; the form has become a draft."""

    def __init__(self, context: Context, parent: QWidget) -> None:
        super().__init__(parent)
        self._context = context
        self._shows_all = False
        # True while the banner counts answers that need attention.
        self._complains = False
        self.setWindowTitle("New run")
        self.setMinimumSize(840, 480)
        self.resize(1100, 760)
        self.form = RunForm(context)
        self.banner = Banner(context.theme)
        self.outlook = Outlook(context.theme, self.preview_data)
        self._plan = LivePlan(context.bridge, self.outlook.plan)
        self._count = LiveCount(context.bridge, self.outlook)
        self._paths = PathChecker(context.bridge, self)
        self._paths.checked.connect(self._review)
        self.start = Button(context.theme, "Start", self._start, icon="resume", role="primary")
        self.starter = RunStarter(context, self.banner, self.start)
        self.starter.started.connect(self._started)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        body = QHBoxLayout()
        body.setContentsMargins(24, 20, 24, 0)
        body.setSpacing(24)
        body.addWidget(self.form, 1)
        body.addWidget(self.outlook)
        column.addLayout(body, 1)
        foot = QVBoxLayout()
        foot.setContentsMargins(24, 12, 24, 20)
        foot.setSpacing(12)
        foot.addWidget(self.banner)
        theme = context.theme
        self.start_over = Button(theme, "Start over", self._start_over, tip="Discard this draft")
        self.start_over.hide()
        cancel = Button(theme, "Cancel", self.reject, tip="Your answers are kept as a draft")
        files = make_file_buttons(theme, self._choose_file, self._show_file)
        foot.addLayout(make_foot((*files, self.start_over), (cancel, self.start)))
        self.start.setDefault(True)
        column.addLayout(foot)
        self._fill({**new_run_answers.proposed_answers(), "name": self._free_name("run-1")})
        self._untouched = self.answers()
        # Answers filled in from a run or a file; closing with just these saves no draft.
        self._given: new_run_answers.RunAnswers | None = None
        self.form.edited.connect(self._forget_message)
        self.form.edited.connect(self._review)
        self.form.hub_asked.connect(self.find_on_hub)
        self.form.nodes_offered.connect(self._take_nodes)
        self.form.start_from.chosen.connect(self._take_recipe)
        self.form.start_from.delete_asked.connect(self._delete_recipe)
        for advised in (self.outlook.plan.advised, self.outlook.advised, self.starter.advised):
            advised.connect(self._take_advice)
        context.bridge.do(ListRecipes(), self.form.start_from.add_recipes, self.banner.show_error)
        self.form.begin()

    # ------------------------------------------------------------ answers

    def answers(self) -> new_run_answers.RunAnswers:
        return self.form.answers()

    def open_file(self, path: Path) -> None:
        """Fill in the form from a run file."""
        # if the file cannot be read, the form is unchanged and its draft is kept
        self._given = self.answers()
        self._context.bridge.do(
            ReadRunFile(path=path), partial(self._take_file, path), self.banner.show_error
        )

    def take_up(self, draft: Mapping[str, object]) -> None:
        """Restore the draft of a form that was closed."""
        self._shows_all = True
        self._fill(new_run_answers.take_up(draft, self._untouched))
        self.start_over.show()
        self.banner.show_message("calm", "Restored your draft")

    def _start_over(self) -> None:
        self._shows_all = self._complains = False
        self.start_over.hide()
        self.banner.hide()
        self._fill(self._untouched)
        self.form.begin()

    def reject(self) -> None:
        self._count.end()
        self.starter.end()
        # A form filled from a run or a file and left unchanged holds nothing worth a draft.
        if self.answers() != self._given:
            self.left.emit(new_run_answers.to_draft(self.answers(), self._untouched))
        super().reject()

    def repeat(self, run: RunSnapshot) -> None:
        """Fill in the form with every setting of a run, under a new name."""
        self._shows_all = True
        self._fill({**new_run_answers.to_answers(run.spec), "name": self._free_name(run.spec.name)})
        self._given = self.answers()
        self.form.start_from.show_source(
            f"Run {run.name}", "All settings of that run, including its data and nodes.", run.spec
        )

    def use_data(self, spec: RunSpec) -> None:
        """Fill in the data of `spec` with the meanings of its columns, and its model if any."""
        given = new_run_answers.to_answers(spec)
        keys = [key for key in given if key.startswith("data.") and key != "data.eval"]
        keys += ["model"] if spec.model != "-" else []
        self._fill({**self.answers(), **{key: given[key] for key in keys}})
        self._given = self.answers()

    def _show_file(self) -> None:
        spec = self._read_spec()
        if spec is not None:
            dialog = RunFileDialog(self._context, self, spec)
            dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
            dialog.recipe_saved.connect(lambda recipe: self.form.start_from.add_recipes([recipe]))
            dialog.open()

    def _delete_recipe(self, name: str) -> None:
        if confirm_delete_recipe(self, self._context.theme):
            self._context.bridge.do(
                DeleteRecipe(name=name),
                lambda recipe: self.form.start_from.drop(recipe.name),
                self.banner.show_error,
            )

    def _fill(self, answers: new_run_answers.RunAnswers) -> None:
        self.form.fill(answers)
        self._review()

    def _take_file(self, path: Path, spec: RunSpec) -> None:
        self._shows_all, self._complains = True, False
        was_untouched = self.answers() == self._untouched
        self._fill(new_run_answers.to_answers(spec))
        self._given = self.answers() if was_untouched else None
        self.form.start_from.show_source(path.name, f"Settings from {path}.", spec)
        self.banner.show_message("good", f"Opened {path.name}", "Review it, then start.")

    def _take_recipe(self, spec: RunSpec) -> None:
        self._fill(new_run_answers.use_recipe(self.answers(), spec))

    def _take_advice(self, change: Mapping[str, object]) -> None:
        self._fill(take_advice(self.answers(), change))

    def _review(self) -> RunReview:
        answers, nodes = self.answers(), self._context.cluster.node_list()
        # Paths are checked off the Qt thread: a network drive may hang for seconds.
        self._paths.follow(name_paths(answers))
        # The answer of the check emits `checked`, which reviews again.
        are_known = self._context.cluster.is_open
        result = review(answers, nodes, self._paths.missing, are_known=are_known)
        self.form.show_review(result, shows_all=self._shows_all)
        if self._complains:
            self._show_num_errors(self.form.count_errors(result))
        self.outlook.show_rows(result.summary)
        spec = preview_spec(answers)
        self.outlook.look.setEnabled(spec is not None)
        # Plans need less than a start: the model and the size of the batch are enough.
        self._plan.follow(*plan_spec(answers, nodes, are_known=are_known))
        is_here = "data.train" not in self._paths.missing
        # Rows are counted on this PC, so that a tick at a node does not count them again.
        self._count.follow(replace(spec, nodes="all") if spec is not None and is_here else None)
        return result

    def _forget_message(self) -> None:
        """Hide what the banner says of the answers before this edit."""
        if not self.starter.is_busy and not self._complains:
            self.banner.hide()

    def _take_nodes(self) -> None:
        if not self.form.fields["nodes"].was_touched:
            # Ticks that follow the nodes' states are no edit that a draft should keep.
            nodes = {"nodes": self.answers()["nodes"]}
            self._untouched = {**self._untouched, **nodes}
            self._given = self._given and {**self._given, **nodes}
        self._review()

    def preview_data(self) -> None:
        """Open the data preview of the current answers."""
        spec = preview_spec(self.answers())
        if spec is not None:
            nodes, are_known = self._context.cluster.node_list(), self._context.cluster.is_open
            planned, _ = plan_spec(self.answers(), nodes, are_known=are_known)
            dialog = DataDialog(self._context, self, spec, planned)
            dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
            # The preview has counted the rows, so the plan now knows its number of steps.
            dialog.finished.connect(self._plan.again)
            dialog.rows_wanted.connect(lambda: self._leave_for_rows(dialog.spec))
            dialog.advised.connect(self._take_advice)
            dialog.open()

    def _leave_for_rows(self, spec: RunSpec) -> None:
        self.reject()
        self.rows_wanted.emit(spec)

    def find_on_hub(self, key: str) -> None:
        """Open the search of the hub for the answer to a key."""
        dialog = HubDialog(self._context, self, ON_HUB[key])
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.chosen.connect(self.form.fields[key].fill_in)
        dialog.open()

    def _free_name(self, wanted: str) -> str:
        return free_name(wanted, {run.name for run in self._context.cluster.runs.values()})

    def _read_spec(self) -> RunSpec | None:
        self._shows_all = True
        result = self._review()
        # From here on every finding is shown, since the user has tried to start.
        if result.spec is not None:
            return result.spec
        self.form.show_first_error(result)
        self._complains = True
        self._show_num_errors(self.form.count_errors(result))
        return None

    def _show_num_errors(self, num_errors: int) -> None:
        """Keep the count of answers that need attention in the banner, until there are none."""
        if num_errors:
            words = "1 answer needs" if num_errors == 1 else f"{num_errors} answers need"
            self.banner.show_message("warning", f"{words} attention", "See the marked fields.")
        else:
            self._complains = False
            self.banner.hide()

    # ------------------------------------------------------------ actions

    def _start(self) -> None:
        spec = self._read_spec()
        if spec is not None:
            self.starter.begin(StartRun(spec=spec))

    def _started(self, run_id: str) -> None:
        self.started.emit(run_id)
        self.accept()

    def _choose_file(self) -> None:
        chosen, _ = QFileDialog.getOpenFileName(self, "Run file", filter=RUN_FILES)
        if chosen:
            self.open_file(Path(chosen))
