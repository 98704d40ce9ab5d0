"""Summary of an export, and the equivalent commands."""

from __future__ import annotations

from PySide6.QtWidgets import QHBoxLayout, QVBoxLayout, QWidget

from app.events import RunSnapshot
from app.flows.export import ExportAnswers, describe_commands, list_jobs
from app.gui.kit.primitives import Button, copy_to_clipboard, make_label, make_selectable
from app.gui.kit.theme import Theme


class SummaryPage(QWidget):
    def __init__(self, theme: Theme, run: RunSnapshot) -> None:
        super().__init__()
        self._run = run
        self._words = make_label(wraps=True)
        self.commands = make_selectable(make_label(role="command", wraps=True))
        copy = Button(
            theme, "Copy", lambda: copy_to_clipboard(self.commands.text()), icon="copy", role="link"
        )
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(12)
        column.addWidget(self._words)
        row = QHBoxLayout()
        row.addWidget(make_label("Equivalent command", "subheading"), 1)
        row.addWidget(copy)
        column.addLayout(row)
        column.addWidget(self.commands)
        column.addStretch(1)

    def show_answers(self, answers: ExportAnswers) -> None:
        """Show the summary of `answers`."""
        step = "the newest checkpoint"
        if answers.checkpoint is not None:
            step = f"the checkpoint of step {answers.checkpoint}"
        lines = [f"From {step} of {self._run.name}, on {answers.node or 'the fastest node'}:"]
        lines += [
            f"\u2022 {job.label} into {job.folder}" for job in list_jobs(self._run.run_id, answers)
        ]
        self._words.setText("\n".join(lines))
        self.commands.setText("\n".join(describe_commands(self._run.run_id, answers)))
