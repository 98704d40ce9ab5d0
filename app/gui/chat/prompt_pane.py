"""Test prompts of a project, and the answers saved before."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QFileDialog, QHBoxLayout, QVBoxLayout, QWidget

from app.conversation import MOST_PROMPTS, AnswerComparison, read_prompts
from app.gui.kit.inputs import ChoiceBox, TextBox
from app.gui.kit.primitives import Button, make_label
from app.gui.session.context import Context
from app.text import count_of, show_moment

HEIGHT_PX = 96


class PromptPane(QWidget):
    """Editor with one prompt per line, each asked on its own in every column."""

    wanted = Signal(tuple)
    """Prompts to ask."""
    edited = Signal(tuple)
    """Edited prompts of the project."""
    export_wanted = Signal(object, str)
    """Comparison to write, and the file to write it to."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self._found: tuple[AnswerComparison, ...] = ()
        self._is_busy = False
        self.text = TextBox()
        self.text.setPlaceholderText("One prompt per line, such as: Who founded Brenford?")
        self.text.setAccessibleName("Prompts, one per line")
        self.text.setFixedHeight(HEIGHT_PX)
        self.text.setTabChangesFocus(True)
        self.ask_all = Button(context.theme, "Ask all", self._ask, icon="chat")
        self.past = ChoiceBox()
        self.past.setSizeAdjustPolicy(ChoiceBox.SizeAdjustPolicy.AdjustToContents)
        self.past.setAccessibleName("Saved answers")
        self.save = Button(
            context.theme, "Save as Markdown\u2026", self._choose_file, icon="export"
        )
        self._note = make_label(
            "Saved for this base model and data. Each prompt is asked on its own, without the "
            "conversation above; answers are saved to compare later.",
            "caption",
            wraps=True,
        )
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(8)
        column.addWidget(self._note)
        column.addWidget(self.text)
        self._too_many = make_label(role="problem", wraps=True)
        column.addWidget(self._too_many)
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addWidget(self.ask_all)
        row.addStretch(1)
        row.addWidget(self.past)
        row.addWidget(self.save)
        column.addLayout(row)
        self.text.textChanged.connect(self._edit)
        self.show_past(())
        # `edited` has no receiver yet, so the empty editor does not overwrite saved prompts.
        self._edit()

    def prompts(self) -> tuple[str, ...]:
        """Return the prompts that are saved and asked, at most `MOST_PROMPTS`."""
        return read_prompts(self.text.toPlainText())[:MOST_PROMPTS]

    def show_prompts(self, prompts: Sequence[str]) -> None:
        self.text.setPlainText("\n".join(prompts))

    def show_past(self, found: tuple[AnswerComparison, ...]) -> None:
        """Offer saved comparisons, newest first."""
        self._found = found
        self.past.clear()
        now_s = self._context.cluster.now_s()
        for one in found:
            models = count_of(len(one.models), "model")
            prompts = count_of(len(one.prompts), "prompt")
            self.past.addItem(f"{show_moment(one.time_s, now_s)}: {models}, {prompts}")
        for widget in (self.past, self.save):
            widget.setVisible(bool(found))

    def set_busy(self, is_busy: bool) -> None:
        """Disable asking while answers arrive."""
        self._is_busy = is_busy
        self.ask_all.setEnabled(not is_busy and bool(self.prompts()))

    def save_to(self, path: str) -> None:
        """Export the chosen comparison."""
        self.export_wanted.emit(self._found[self.past.currentIndex()], path)

    def _ask(self) -> None:
        self.wanted.emit(self.prompts())

    def _edit(self) -> None:
        count = len(read_prompts(self.text.toPlainText()))
        self._too_many.setText(
            f"{count} prompts: only the first {MOST_PROMPTS} are saved and asked."
        )
        self._too_many.setVisible(count > MOST_PROMPTS)
        self.set_busy(self._is_busy)
        self.edited.emit(self.prompts())

    def _choose_file(self) -> None:
        chosen, _ = QFileDialog.getSaveFileName(self, "Save answers", "answers.md")
        if chosen:
            self.save_to(chosen)
