"""One column of a chat: a model, the node it runs on, and the conversation with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QHBoxLayout, QVBoxLayout, QWidget

from agents.contract.messages import Progress
from agents.contract.requests.chats import ChatAnswer
from app.conversation import Loaded, Subject, describe_answer
from app.core.action import CoreApi
from app.core.chats import AnswerPiece, AskModel, OpenChat, StopAnswer, UnloadModel
from app.errors import RacklessError, UserError, describe_error
from app.flows.chat import ChatSettings, ModelChoice, make_turn, on_node
from app.gui.chat.transcript import Transcript
from app.gui.kit.inputs import ChoiceBox
from app.gui.kit.primitives import ElidedLabel, IconButton
from app.gui.session.bridge import Op, Report
from app.gui.session.context import Context

ANY_NODE = "Any node"
Answers = tuple[ChatAnswer | None, ...]


@dataclass(frozen=True, slots=True)
class _Asked:
    """Event: the next prompt is asked."""

    prompt: str
    is_alone: bool


class ChatColumn(QWidget):
    """Loads its model at the first question, and unloads it when the window closes."""

    changed = Signal()
    """An answer has started or ended."""
    removed = Signal(object)

    def __init__(
        self, context: Context, choices: Sequence[ModelChoice], chosen: ModelChoice
    ) -> None:
        super().__init__()
        self._context, self._choices = context, choices
        self._loaded: Loaded | None = None
        self._op: Op | None = None
        self._is_stopped = False
        self._done: Callable[[Answers], None] | None = None
        self.who = ChoiceBox()
        self.who.setAccessibleName("Model")
        self.where = ChoiceBox()
        self.where.setAccessibleName("Node")
        self.transcript = Transcript(context.theme, "Conversation")
        self._state = ElidedLabel("Loads with the first question.", "caption")
        self._remove = IconButton(
            context.theme, "close", "Remove this column", lambda: self.removed.emit(self)
        )
        self._lay_out()
        self.show_choices(choices, chosen)
        self.where.addItem(ANY_NODE, "")
        for node in context.cluster.node_list():
            if node.state == "online":
                self.where.addItem(node.name, node.name)
        # `activated` fires for user choices only: filling the boxes must not unload the model.
        for box in (self.who, self.where):
            box.activated.connect(lambda place: self._change())

    @property
    def is_busy(self) -> bool:
        """Return whether the model is loading or answering."""
        return self._op is not None

    def title(self) -> str:
        """Return the name of the model and its node."""
        if self._loaded is None:
            return self.who.currentText()
        return f"{self._loaded.title}, on {self._loaded.node}"

    def show_choices(self, choices: Sequence[ModelChoice], chosen: ModelChoice) -> None:
        """Offer `choices` and select one."""
        self._choices = choices
        self.who.clear()
        for one in choices:
            self.who.addItem(one.label)
        self.who.setCurrentIndex(choices.index(chosen))

    def show_remove_button(self, may: bool) -> None:
        """Show or hide the button that removes the column."""
        self._remove.setVisible(may)

    def ask(
        self,
        prompts: Sequence[str],
        settings: ChatSettings,
        *,
        alone: bool = False,
        done: Callable[[Answers], None] | None = None,
    ) -> None:
        """Ask prompts one after the other.

        Args:
            prompts: questions; more than one only with `alone`.
            settings: system prompt, sampling and maximum length.
            alone: asks each prompt on its own, without the conversation so far.
            done: called with all answers; never called if the model cannot be loaded or is
                stopped while loading.
        """
        said = () if alone else tuple(self.transcript.turns())
        self._is_stopped, self._done = False, done
        subject, loaded = self._subject(), self._loaded

        async def work(core: CoreApi, report: Report) -> Answers:
            held = loaded
            if held is None:
                held = await core.do(OpenChat(subject=subject), report)
            report(held)
            # One entry per prompt, also for those that failed, so that columns stay aligned.
            found: list[ChatAnswer | None] = []
            for place, prompt in enumerate(prompts):
                # Set on the Qt thread by `stop`, which lets this loop end on its own: a cancelled
                # operation would report nothing, and the answers so far would be lost.
                if self._is_stopped:
                    found.append(None)
                    continue
                if place:
                    report(_Asked(prompt, alone))
                turn = make_turn(settings, said, prompt)
                found.append(await _answer(core, held.key, turn, report))
            return tuple(found)

        # show the question at once, so that it is not lost if the model cannot be loaded
        self.transcript.ask(prompts[0], is_alone=alone)
        self._state.setText("Loading\u2026" if loaded is None else "Answering\u2026")
        self._op = self._context.bridge.run(work, self._finish, self._fail, self._hear)
        self.changed.emit()

    def stop(self) -> None:
        """Stop the answer, or cancel loading."""
        if self._op is None:
            return
        self._is_stopped = True
        if self._loaded is None:
            self._op.cancel()
            # Nothing was loaded, so there is no answer to stop on the node: cancelling the load is
            # enough.
            self.transcript.finish(problem="Not asked: stopped before the model was loaded.")
            self._end("Stopped.")
            return
        key = self._loaded.key
        self._context.bridge.do(StopAnswer(key=key))

    def forget(self) -> None:
        """Start a new conversation with the same model."""
        self.transcript.forget()

    def unload(self) -> None:
        """Unload the model."""
        if self._op is not None:
            self._op.cancel()
            self._op = None
        if self._loaded is not None:
            key = self._loaded.key
            self._context.bridge.do(UnloadModel(key=key))
            self._loaded = None

    def _lay_out(self) -> None:
        head = QHBoxLayout()
        head.setSpacing(8)
        head.addWidget(self.who, 3)
        head.addWidget(self.where, 2)
        head.addWidget(self._remove)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(8)
        column.addLayout(head)
        column.addWidget(self.transcript, 1)
        column.addWidget(self._state)

    def _subject(self) -> Subject:
        subject = self._choices[self.who.currentIndex()].subject
        return on_node(subject, str(self.where.currentData()))

    def _change(self) -> None:
        """Start over with another model, which does not know the conversation so far."""
        was_busy = self.is_busy
        self.unload()
        self.transcript.forget()
        self._state.setText("Loads with the first question.")
        # The cancelled request reports nothing any more, so end it here.
        if was_busy:
            self._end("")

    def _hear(self, event: object) -> None:
        match event:
            case Progress(message=text):
                self._state.setText(text)
            case Loaded():
                self._loaded = event
                self._state.setText(_describe_place(event))
            case _Asked():
                self.transcript.ask(event.prompt, is_alone=event.is_alone)
            case AnswerPiece():
                self.transcript.append_piece(event.text)
            case ChatAnswer():
                self.transcript.finish(event.text, describe_answer(event))
            case UserError():
                self.transcript.finish(problem=describe_error(event))

    def _finish(self, found: Answers) -> None:
        # Before `_end`, whose `changed` makes the window save the answers of all columns.
        if self._done is not None:
            self._done(found)
        self._end(_describe_place(self._loaded) if self._loaded else "")

    def _fail(self, error: RacklessError) -> None:
        self.transcript.finish(problem=f"Could not load the model: {describe_error(error)}")
        self._end("Not loaded.")

    def _end(self, state: str) -> None:
        self._op = self._done = None
        if state:
            self._state.setText(state)
        self.changed.emit()


def _describe_place(loaded: Loaded) -> str:
    opened = loaded.opened
    place = "its CPU" if opened.device == "cpu" else f"GPU {opened.device.removeprefix('cuda:')}"
    note = f" ({opened.note})" if opened.note else ""
    return f"On {loaded.node}, {place}, with {opened.runtime}{note}"


async def _answer(core: CoreApi, key: int, turn: Any, report: Report) -> ChatAnswer | None:
    """Return the answer to one turn; None: it failed, and the error was reported."""
    # An error of one prompt stays here, so that the next one is still asked.
    try:
        found = await core.do(AskModel(key=key, turn=turn), report)
    except UserError as error:
        report(error)
        return None
    report(found)
    return found
