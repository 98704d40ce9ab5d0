"""Calibration data for AWQ and GPTQ: the run's training data, or a file that is checked."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QTimer, Signal
from PySide6.QtWidgets import (
    QFileDialog,
    QHBoxLayout,
    QLineEdit,
    QRadioButton,
    QVBoxLayout,
    QWidget,
)

from app.core.artifacts import CheckCalibration
from app.errors import RacklessError, describe_error
from app.gui.kit.primitives import Button, make_label
from app.gui.session.bridge import Op
from app.gui.session.context import Context
from app.text import count_of

WAIT_MS = 250
"""Pause after the last key before a path is checked, in milliseconds."""


class CalibrationPage(QWidget):
    edited = Signal()

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self._op: Op | None = None
        self.problem = ""
        """Reason why the wizard cannot continue; empty: it can."""
        self.own = QRadioButton("The run's training data")
        self.file = QRadioButton("A data file on this PC")
        self.path = QLineEdit()
        self.path.setAccessibleName("Calibration data file")
        self.path.setPlaceholderText("chats.jsonl, notes.txt, ...")
        # Reading at every key would check paths that are only half typed.
        self._look_soon = QTimer(self, interval=WAIT_MS, singleShot=True)
        self._look_soon.timeout.connect(self._look)
        self._found = make_label(role="caption", wraps=True)
        self.own.setChecked(True)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(8)
        column.addWidget(
            make_label(
                "AWQ and GPTQ round the weights so that the model's answers on this text change "
                "least. They use up to 128 rows of 512 tokens. Choose text like what the model "
                "will see.",
                "muted",
                wraps=True,
            )
        )
        column.addWidget(self.own)
        column.addWidget(self.file)
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addWidget(self.path, 1)
        row.addWidget(Button(context.theme, "Choose\u2026", self._browse, icon="folder"))
        column.addLayout(row)
        column.addWidget(self._found)
        column.addStretch(1)
        # One button is enough: the two toggle together.
        self.own.toggled.connect(lambda checked: self._change())
        self.path.textEdited.connect(lambda text: self._type())

    def answer(self) -> str:
        return "" if self.own.isChecked() else self.path.text().strip()

    def choose(self, path: str) -> None:
        """Restore an earlier answer."""
        if path:
            self.path.setText(path)
            self.file.setChecked(True)
            self._look()

    def _type(self) -> None:
        self.file.setChecked(True)
        self._change()

    def _browse(self) -> None:
        chosen, _ = QFileDialog.getOpenFileName(self, "Data file")
        if chosen:
            self.path.setText(chosen)
            self._type()

    def _change(self) -> None:
        # An answer for the previous path must not mark the new one as valid.
        if self._op is not None:
            self._op.cancel()
        self._found.setText("")
        # Until the file has been read, the wizard must not continue with it.
        self.problem = "" if self.own.isChecked() else "The file has not been read yet."
        if self.file.isChecked():
            self._look_soon.start()
        self.edited.emit()

    def _look(self) -> None:
        path = self.answer()
        if not path:
            self.problem = "Choose a data file." if self.file.isChecked() else ""
            self.edited.emit()
            return
        self._op = self._context.bridge.do(
            CheckCalibration(path=Path(path)), self._show, self._fail
        )

    def _show(self, num_words: int) -> None:
        self.problem = ""
        words = (
            f"{count_of(num_words, 'word')} in its first MiB" if num_words else ("Valid data file")
        )
        self._found.setText(f"{words}: enough for calibration.")
        self.edited.emit()

    def _fail(self, error: RacklessError) -> None:
        self.problem = describe_error(error)
        self.edited.emit()
