"""Chat window: one to three models side by side, one question to all, and test prompts."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from PySide6.QtCore import QEvent, QObject, Qt
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import (
    QDialog,
    QHBoxLayout,
    QVBoxLayout,
    QWidget,
)

from app.artifact import ArtifactSnapshot
from app.conversation import AnswerComparison, Compared, Project, Subject
from app.core import chats
from app.core.action import CoreApi
from app.core.artifacts import GetArtifact, ListArtifacts
from app.core.runs import FindCheckpoints
from app.errors import RacklessError, UserError
from app.events import CheckpointSnapshot, RunSnapshot
from app.flows.chat import (
    MOST_COLUMNS,
    ModelChoice,
    choose_columns,
    name_artifact,
    offer,
)
from app.gui.chat.answer_settings import AnswerSettings
from app.gui.chat.chat_column import Answers, ChatColumn
from app.gui.chat.prompt_pane import PromptPane
from app.gui.kit.banner import Banner
from app.gui.kit.collapsible import CollapsibleSection
from app.gui.kit.inputs import TextBox
from app.gui.kit.primitives import Button, make_label
from app.gui.session.bridge import Report
from app.gui.session.context import Context

PROMPT_HEIGHT_PX = 64
Kept = tuple[tuple[str, ...], tuple[AnswerComparison, ...]]
Found = tuple[tuple[CheckpointSnapshot, ...], tuple[ArtifactSnapshot, ...], Project | None]


class ChatDialog(QDialog):
    """Chat window; it opens at once, and adds its columns when the models have been listed."""

    def __init__(
        self,
        context: Context,
        parent: QWidget,
        run: RunSnapshot | None,
        wanted: Subject | None = None,
    ) -> None:
        """Open a chat with a run's models.

        Args:
            context: context of the main window.
            parent: parent of this window.
            run: run whose models are offered; None: it was deleted.
            wanted: checkpoint or artifact that one of the columns shows.
        """
        super().__init__(parent)
        self._context, self._run, self._wanted = context, run, wanted
        self._project: Project | None = None
        self._choices: tuple[ModelChoice, ...] = offer(run, (), ())
        self._is_looking = True
        # Test prompts being answered, to be saved afterwards; empty: none.
        self._asked: tuple[str, ...] = ()
        self._answers: dict[ChatColumn, Compared] = {}
        self.setWindowTitle(f"Chat: {run.name}" if run else "Chat")
        self.resize(1120, 760)
        self.banner = Banner(context.theme)
        self.columns: list[ChatColumn] = []
        self._row = QHBoxLayout()
        self._row.setSpacing(16)
        self._make_inputs()
        self._lay_out()
        self._op = context.bridge.run(self._find, self._show_found, self._show_nothing_found)
        self.finished.connect(lambda result: self._leave())
        self._review()
        self.prompt.setFocus()

    def ask(self) -> None:
        """Send the question to all columns."""
        prompt = self.prompt.toPlainText().strip()
        if not prompt or not self.send.isEnabled():
            return
        self.prompt.clear()
        for column in self.columns:
            column.ask((prompt,), self.how.settings())

    def ask_all(self, prompts: tuple[str, ...]) -> None:
        """Ask every test prompt in every column, and save the answers."""
        self._answers, self._asked = {}, prompts
        for column in self.columns:
            column.ask(
                prompts, self.how.settings(), alone=True, done=partial(self._collect, column)
            )

    def add_column(self, choice: ModelChoice | None = None) -> None:
        """Add a column with another model."""
        taken = [column.who.currentText() for column in self.columns]
        left = [one for one in self._choices if one.label not in taken] or list(self._choices)
        column = ChatColumn(self._context, self._choices, choice or left[0])
        column.changed.connect(self._review)
        column.removed.connect(self._remove_column)
        self.columns.append(column)
        self._row.addWidget(column, 1)
        self._review()

    # ------------------------------------------------------------ layout

    def _make_inputs(self) -> None:
        theme = self._context.theme
        self.prompt = TextBox()
        self.prompt.setPlaceholderText("Ask all models (Ctrl+Enter to send)")
        self.prompt.setAccessibleName("Question")
        self.prompt.setFixedHeight(PROMPT_HEIGHT_PX)
        self.prompt.setTabChangesFocus(True)
        self.prompt.textChanged.connect(self._review)
        # For Ctrl+Enter, which sends the question.
        self.prompt.installEventFilter(self)
        self.send = Button(theme, "Send", self.ask, icon="chat", role="primary")
        self.stop = Button(theme, "Stop", self._stop, icon="stop")
        self.new = Button(
            theme, "New conversation", self._forget, tip="Clear the conversation in every column"
        )
        self.add = Button(
            theme, "Add model", self.add_column, icon="add", tip="Add another model to compare"
        )
        self.how = AnswerSettings()
        self.prompts = PromptPane(self._context)
        self.prompts.wanted.connect(self.ask_all)
        self.prompts.edited.connect(self._keep_prompts)
        self.prompts.export_wanted.connect(self._write)

    def _lay_out(self) -> None:
        head = QHBoxLayout()
        head.addWidget(make_label("Chat", "heading"), 1)
        head.addWidget(self.new)
        head.addWidget(self.add)
        buttons = QVBoxLayout()
        buttons.setSpacing(6)
        buttons.addWidget(self.send)
        buttons.addWidget(self.stop)
        asks = QHBoxLayout()
        asks.setSpacing(8)
        asks.addWidget(self.prompt, 1)
        asks.addLayout(buttons)
        column = QVBoxLayout(self)
        column.setContentsMargins(24, 20, 24, 20)
        column.setSpacing(12)
        column.addLayout(head)
        column.addWidget(self.banner)
        column.addLayout(self._row, 1)
        column.addLayout(asks)
        theme = self._context.theme
        how = CollapsibleSection(theme, "Generation settings", self.how)
        how.set_note("By default: the most likely token each time, up to 256 tokens.")
        self.fold = CollapsibleSection(theme, "Test prompts", self.prompts)
        column.addWidget(how)
        column.addWidget(self.fold)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if watched is self.prompt and isinstance(event, QKeyEvent):
            is_enter = event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter)
            # Enter alone starts a new line: a question may have several.
            with_control = bool(event.modifiers() & Qt.KeyboardModifier.ControlModifier)
            if event.type() == QEvent.Type.KeyPress and is_enter and with_control:
                self.ask()
                return True
        return super().eventFilter(watched, event)

    # ------------------------------------------------------------ data

    async def _find(self, core: CoreApi, report: Report) -> Found:
        """Find the run's checkpoints, artifacts and project."""
        steps: tuple[CheckpointSnapshot, ...] = ()
        made: tuple[ArtifactSnapshot, ...] = ()
        what = self._run.run_id if self._run else self._wanted.what if self._wanted else ""
        if self._run is not None:
            steps = await core.do(FindCheckpoints(run_id=self._run.run_id))
            made = await core.do(ListArtifacts(run_id=self._run.run_id))
        elif self._wanted is not None:
            made = (await core.do(GetArtifact(name=self._wanted.what)),)
        return steps, made, await find_project(core, what)

    def _show_found(self, found: Found) -> None:
        self._is_looking = False
        steps, made, self._project = found
        self._choices = offer(self._run, steps, made)
        wanted = name_artifact(self._wanted, made)
        for choice in choose_columns(self._choices, wanted)[:MOST_COLUMNS]:
            self.add_column(choice)
        if not self.columns:
            self.banner.show_message(
                "warning",
                "No model to chat with",
                "The nodes that respond have no checkpoint, and this PC has no artifact.",
            )
        self._refresh_project()

    def _show_nothing_found(self, error: RacklessError) -> None:
        self._is_looking = False
        self.banner.show_error(error)
        self._review()

    def _refresh_project(self) -> None:
        project = self._project
        self.fold.setVisible(project is not None)
        if project is None:
            return
        self._context.bridge.run(
            lambda core, report: read_project(core, project), self._show_project
        )

    def _show_project(self, found: Kept) -> None:
        prompts, past = found
        # Prompts being edited must not be overwritten by the saved ones.
        if not self.prompts.prompts():
            self.prompts.show_prompts(prompts)
        self.prompts.show_past(past)

    # ------------------------------------------------------------ actions

    def _collect(self, column: ChatColumn, found: Answers) -> None:
        # Columns finish at different times; `_review` saves once all of them are done.
        self._answers[column] = Compared(title=column.title(), answers=found)

    def _keep_answers(self) -> None:
        """Save the answers to the test prompts once every column has finished."""
        # Cleared at once: `_review` runs at every change, and one round is saved once.
        prompts, self._asked = self._asked, ()
        # A column that was stopped or failed at every prompt has nothing to compare.
        models = tuple(one for one in self._answers.values() if any(one.answers))
        if self._project is None or not models:
            return
        project, now_s = self._project, self._context.cluster.now_s()
        kept = AnswerComparison(
            time_s=now_s, prompts=prompts, models=models, system=self.how.settings().system.strip()
        )
        self._context.bridge.do(
            chats.SaveComparison(project=project, found=kept),
            lambda result: self._refresh_project(),
            self.banner.show_error,
        )

    def _keep_prompts(self, prompts: tuple[str, ...]) -> None:
        project = self._project
        if project is not None:
            save = chats.SavePrompts(project=project, prompts=prompts)
            self._context.bridge.do(save, failure=self.banner.show_error)

    def _write(self, found: AnswerComparison, path: str) -> None:
        project = self._project
        assert project is not None, "only a project has answers"
        self._context.bridge.do(
            chats.WriteComparison(project=project, found=found, path=Path(path)),
            lambda result: self.banner.show_message("good", "Answers saved", path),
            self.banner.show_error,
        )

    def _stop(self) -> None:
        for column in self.columns:
            column.stop()

    def _forget(self) -> None:
        for column in self.columns:
            column.forget()

    def _remove_column(self, column: ChatColumn) -> None:
        column.unload()
        self.columns.remove(column)
        self._row.removeWidget(column)
        # Hidden first: deletion is deferred, and a dead column must not flash.
        column.hide()
        column.deleteLater()
        self._review()

    def _review(self) -> None:
        is_busy = any(column.is_busy for column in self.columns)
        has_prompt = bool(self.prompt.toPlainText().strip())
        self.send.setEnabled(bool(self.columns) and has_prompt and not is_busy)
        self.stop.setEnabled(is_busy)
        self.new.setEnabled(not is_busy)
        # `_show_found` adds the first columns itself, so nothing is added before it has run.
        has_room = len(self.columns) < MOST_COLUMNS and not self._is_looking
        self.add.setEnabled(bool(self._choices) and has_room)
        self.prompts.set_busy(is_busy or not self.columns)
        for column in self.columns:
            column.show_remove_button(len(self.columns) > 1)
        # The last column has just finished the test prompts.
        if self._asked and not is_busy:
            self._keep_answers()

    def _leave(self) -> None:
        # A model that is not unloaded would hold GPU memory on its node until it idles out.
        self._op.cancel()
        for column in self.columns:
            column.unload()


async def find_project(core: CoreApi, what: str) -> Project | None:
    """Return the project (base model and data) of a run or an artifact; None: unknown."""
    try:
        return await core.do(chats.FindProject(what=what))
    except UserError:
        return None


async def read_project(core: CoreApi, project: Project) -> Kept:
    """Return a project's test prompts and its saved comparisons."""
    prompts = await core.do(chats.ReadPrompts(project=project))
    return prompts, await core.do(chats.ListComparisons(project=project))


def open_chat(
    context: Context, parent: QWidget, run: RunSnapshot | None, wanted: Subject | None = None
) -> ChatDialog:
    """Open a modeless chat window."""
    dialog = ChatDialog(context, parent, run, wanted)
    # Without this flag every closed chat would live as long as the window.
    dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    dialog.show()
    return dialog
