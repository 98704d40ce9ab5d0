"""Open the dialogs that belong to no page.

Each is imported when it is first opened, since importing all of them would delay the first frame.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QFileDialog

from app.events import RunSnapshot
from app.gui.kit.confirm import confirm
from app.gui.session.context import Context
from app.gui.shell.shell import Shell

if TYPE_CHECKING:
    from agents.contract.spec import RunSpec
    from app.gui.new_run.new_run_dialog import NewRunDialog
    from app.gui.shell.palette import CommandPalette
    from app.gui.shell.report_process import ReportProcess


class Dialogs:
    """Opens dialogs, and keeps the answers of a New run form that was closed as a draft."""

    def __init__(self, context: Context, window: Shell) -> None:
        self._context, self._window = context, window
        self._palette: CommandPalette | None = None
        self._report: ReportProcess | None = None

    def ask_new_run(self, file: Path | None = None) -> None:
        """Open the New run dialog, filled in from `file` or else from the draft."""
        dialog = self._make_new_run_dialog()
        if file is not None:
            dialog.open_file(file)
        else:
            # A run started from a file leaves the draft alone: its answers came from elsewhere.
            dialog.started.connect(lambda run_id: self._keep_draft({}))
            if self._window.state.draft:
                dialog.take_up(self._window.state.draft)
        dialog.open()

    def _keep_draft(self, draft: dict[str, str]) -> None:
        self._window.state.draft = draft

    def repeat_run(self, run: RunSnapshot) -> None:
        """Open the New run dialog with the settings of `run`."""
        dialog = self._make_new_run_dialog()
        dialog.repeat(run)
        dialog.open()

    def use_data(self, spec: RunSpec) -> None:
        """Open the New run dialog with the data of `spec` and the meanings of its columns."""
        dialog = self._make_new_run_dialog()
        dialog.use_data(spec)
        dialog.open()

    def _make_new_run_dialog(self) -> NewRunDialog:
        from app.gui.new_run.new_run_dialog import NewRunDialog

        dialog = NewRunDialog(self._context, self._window)
        # The window is its parent: without this, every dialog ever opened would stay in memory.
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.started.connect(self._window.open_run)
        dialog.left.connect(self._keep_draft)
        dialog.rows_wanted.connect(self._window.open_data)
        return dialog

    def choose_run_file(self) -> None:
        chosen, _ = QFileDialog.getOpenFileName(
            self._window, "Run file", filter="Run files (*.yaml *.yml)"
        )
        if chosen:
            self.ask_new_run(Path(chosen))

    def ask_node(self, *, this_pc: bool = False) -> None:
        """Open the Add a PC dialog, set to this PC or to SSH."""
        from app.gui.nodes.add_node_dialog import AddNodeDialog

        dialog = AddNodeDialog(self._context, self._window)
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        if this_pc:
            dialog.choose_this_pc()
        dialog.open()

    def show_shortcuts(self) -> None:
        """Open the list of keyboard shortcuts."""
        from app.gui.shell.shortcuts_dialog import ShortcutsDialog

        dialog = ShortcutsDialog(self._context.theme, self._window, self._window.actions_)
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.open()

    def show_help(self, topic: str = "") -> None:
        """Open the troubleshooting page, at a topic if one is given."""
        from app.gui.shell.help_dialog import HelpDialog

        dialog = self._window.findChild(HelpDialog)
        if dialog is None:
            dialog = HelpDialog(self._context.theme, self._window)
            dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        if topic:
            dialog.open_topic(topic)
        dialog.show()
        dialog.raise_()
        dialog.activateWindow()

    def save_report(self) -> None:
        """Ask for a file, and save a report for support there."""
        from app.gui.shell.report_process import WHAT, ReportProcess

        if self._report is None:
            self._report = ReportProcess(self._window.banner, self._context.home, self._window)
        if self._report.is_busy:
            return
        name = time.strftime("rackless-report-%Y%m%d-%H%M%S.zip")
        question = "Save a report for support?"
        if not confirm(self._window, self._context.theme, question, WHAT, "Choose a file"):
            return
        chosen, _ = QFileDialog.getSaveFileName(
            self._window, "Save a report", str(Path.home() / name), "Zip files (*.zip)"
        )
        if chosen:
            self._report.start(Path(chosen))

    def open_palette(self) -> None:
        """Open the command palette; close it if it is open."""
        from app.gui.shell.commands import list_commands
        from app.gui.shell.palette import CommandPalette

        # Kept, unlike the dialogs: the palette has to find out that it is open, to close then.
        if self._palette is None:
            self._palette = CommandPalette(self._context.theme, self._window)
        # Listed again at each opening: runs and nodes come and go.
        self._palette.open_with(list_commands(self._window, self._context, self.repeat_run))
