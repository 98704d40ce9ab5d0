"""Show an unexpected exception as one dialog with a report to copy."""

from __future__ import annotations

import platform
import sys
import threading
from types import TracebackType

import PySide6
from PySide6.QtCore import QObject, Signal
from PySide6.QtWidgets import QDialog, QHBoxLayout, QVBoxLayout, QWidget

from agents.shared.files.secrets import format_trace, hide_secrets
from app.gui.kit.inputs import TextBox
from app.gui.kit.primitives import Button, copy_to_clipboard, make_label
from app.gui.kit.theme import Theme


def make_report(details: str) -> str:
    """Return versions and the traceback, without tokens, passwords and keys."""
    return (
        f"Rackless crash report\nPython {platform.python_version()}, PySide6 "
        f"{PySide6.__version__}, {platform.platform()}\n\n{hide_secrets(details.strip())}\n"
    )


class CrashDialog(QDialog):
    def __init__(self, parent: QWidget | None, theme: Theme, details: str) -> None:
        super().__init__(parent)
        self.setWindowTitle("Something went wrong inside Rackless")
        self.resize(680, 440)
        self.report = make_report(details)
        text = TextBox(self.report)
        text.setReadOnly(True)
        text.setObjectName("code")
        text.setAccessibleName("Report")
        column = QVBoxLayout(self)
        column.setContentsMargins(24, 20, 24, 20)
        column.setSpacing(12)
        column.addWidget(make_label("Something went wrong inside Rackless", "heading"))
        column.addWidget(
            make_label(
                "This is a bug in Rackless. Runs on the nodes keep training. The report below "
                "has software versions and the traceback; please include it in your bug report.",
                wraps=True,
            )
        )
        column.addWidget(text, 1)
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addStretch(1)
        copy = Button(theme, "Copy report", lambda: copy_to_clipboard(self.report), icon="copy")
        row.addWidget(copy)
        row.addWidget(Button(theme, "Continue", self.accept, role="primary"))
        column.addLayout(row)


class CrashHook(QObject):
    """Catches unhandled exceptions of every thread, and shows one dialog at a time."""

    # A signal, since exceptions come from any thread while widgets belong to one.
    crashed = Signal(str)

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme = theme
        self.parent_window: QWidget | None = None
        self.dialog: CrashDialog | None = None
        self.crashed.connect(self.show_crash)

    def install(self) -> None:
        """Replace the exception hooks of the interpreter."""
        sys.excepthook = self._caught
        # The documentation of threading.excepthook allows exc_value to be None.
        threading.excepthook = lambda args: self._caught(
            args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback
        )

    def _caught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        details = format_trace(error.with_traceback(trace))
        # The terminal gets it in any case; a program without a window may have none.
        if sys.stderr is not None:
            sys.stderr.write(details)
        if not issubclass(kind, KeyboardInterrupt):
            self.crashed.emit(details)

    def show_crash(self, details: str) -> None:
        """Show a report, unless one is open: errors often come in series."""
        if self.dialog is not None:
            return
        self.dialog = CrashDialog(self.parent_window, self._theme, details)
        self.dialog.finished.connect(self._forget)
        self.dialog.open()

    def _forget(self) -> None:
        self.dialog = None
