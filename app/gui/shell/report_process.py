"""Save a report for support in a process of its own: it works where the window's core does not."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from PySide6.QtCore import QObject, QProcess, QProcessEnvironment

from agents.shared.files.python_child import SAFE_FOLDER, python_environ, same_source
from app.gui.kit.banner import Banner
from app.paths import HOME_VARIABLE

WHAT = (
    "One zip file gets versions, this PC's memory and disk, settings, nodes with their facts, the "
    "last check, the newest runs with the ends of their logs, and reports of faults. Passwords, "
    "tokens, private keys and names of people are taken out. Its README.txt lists all of it."
)


class ReportProcess(QObject):
    """One report at a time, with its progress in a banner."""

    def __init__(self, banner: Banner, home: Path | None, parent: QObject) -> None:
        super().__init__(parent)
        self._banner, self._home = banner, home
        self._file = Path()
        self._process = QProcess(self)
        self._process.finished.connect(lambda code, status: self._end(code))
        self._process.errorOccurred.connect(self._fail)

    @property
    def is_busy(self) -> bool:
        return self._process.state() != QProcess.ProcessState.NotRunning

    def start(self, file: Path) -> None:
        """Start writing the report; a message above the page announces the result."""
        self._file = file
        file.unlink(missing_ok=True)  # the file dialog has asked
        environ = python_environ(os.environ, *same_source())
        if self._home is not None:
            environ[HOME_VARIABLE] = str(self._home)
        environment = QProcessEnvironment()
        for name, value in environ.items():
            environment.insert(name, value)
        self._process.setProcessEnvironment(environment)
        self._process.setWorkingDirectory(SAFE_FOLDER)
        command = ["-m", "app", "doctor", "--json", "--out", str(file)]
        self._banner.show_message("busy", "Collecting a report", "Nodes have 30 s to answer.")
        self._process.start(sys.executable, command)

    def _end(self, code: int) -> None:
        if code != 0:
            self._say_failure(bytes(self._process.readAllStandardError().data()))
            return
        found = json.loads(bytes(self._process.readAllStandardOutput().data()))
        size = f"{len(found['parts'])} parts, {found['bytes']:,} bytes"
        hint = "Read it before you send it: logs hold what programs printed."
        self._banner.show_message("good", f"Saved {self._file} ({size})", hint)

    def _fail(self, error: QProcess.ProcessError) -> None:
        if error == QProcess.ProcessError.FailedToStart:
            self._say_failure(self._process.errorString().encode())

    def _say_failure(self, said: bytes) -> None:
        lines = said.decode("utf-8", "replace").strip().splitlines()
        try:
            failure = json.loads(lines[-1])
            why, hint = str(failure["what"]), str(failure["next"])
        except (IndexError, ValueError, TypeError, KeyError):
            why, hint = (lines or ["it ended early"])[-1], "In a terminal: rackless doctor"
        self._banner.show_message("error", f"The report was not saved: {why}", hint)
