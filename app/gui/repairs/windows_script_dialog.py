"""Script for the Windows of a node in WSL: choose, see what it changes, save or copy it."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtWidgets import (
    QCheckBox,
    QDialog,
    QFileDialog,
    QHBoxLayout,
    QLineEdit,
    QVBoxLayout,
    QWidget,
)

from app.core.nodes import MakeWindowsScript, SaveWindowsScript
from app.errors import RacklessError
from app.flows.windows_script import (
    how_to_add,
    how_to_run,
    introduce_script,
    list_steps,
    read_options,
)
from app.gui.kit.banner import Banner
from app.gui.kit.inputs import NumberBox
from app.gui.kit.primitives import Button, copy_to_clipboard, make_label, make_selectable
from app.gui.session.context import Context
from app.provisioning.windows.facts import MAX_MEMORY_GIB
from app.provisioning.windows.offer import ScriptOptions, WindowsScript

SCRIPTS = "PowerShell scripts (*.ps1)"


class WindowsScriptDialog(QDialog):
    """Offers the script of one node, generated again when a choice changes.

    `node` is its name, or with `is_new` the suggested name of a PC that will become a node.
    """

    def __init__(
        self, context: Context, parent: QWidget, node: str, *, is_new: bool = False
    ) -> None:
        super().__init__(parent)
        self._context = context
        self._is_new = is_new
        self._script: WindowsScript | None = None
        self._wanted = ("", ScriptOptions())
        whose = "a Windows PC" if is_new else f"the Windows of {node}"
        self.setWindowTitle(f"Script for {whose}")
        self.resize(640, 520)
        self.banner = Banner(context.theme)
        self.name = QLineEdit(node)
        self.name.setAccessibleName("Name that it will have")
        self.memory = NumberBox(minimum=0, maximum=MAX_MEMORY_GIB)
        self.memory.setMinimumWidth(200)
        self.memory.setSuffix(" GiB")
        self.memory.setSpecialValueText("half of the PC's")
        self.memory.setAccessibleName("Memory of WSL")
        self.at_logon = QCheckBox(
            "Start WSL when its user logs on, for accounts without a password"
        )
        self.steps = make_selectable(make_label(wraps=True))
        self.command = make_selectable(make_label(role="code", wraps=True))
        self.save = Button(
            context.theme, "Save as\u2026", self._choose_place, icon="save", role="primary"
        )
        self.copy = Button(context.theme, "Copy", self._copy, icon="copy")
        column = QVBoxLayout(self)
        column.setContentsMargins(24, 20, 24, 20)
        column.setSpacing(12)
        column.addWidget(make_label("Script for Windows", "heading"))
        column.addWidget(make_label(introduce_script("" if is_new else node), wraps=True))
        column.addWidget(self.steps)
        column.addLayout(self._make_choices())
        column.addWidget(self.at_logon)
        column.addWidget(self.command)
        column.addStretch(1)
        column.addWidget(self.banner)
        column.addLayout(self._make_foot())
        self.name.textEdited.connect(self._make_script)
        self.memory.valueChanged.connect(self._make_script)
        self.at_logon.toggled.connect(self._make_script)
        self._make_script()

    def save_file(self, file: Path) -> None:
        """Write the script that is shown."""
        script = self._script
        if script is not None:
            self._context.bridge.do(
                SaveWindowsScript(script=script, file=file),
                lambda saved: self.banner.show_message("good", "Saved", str(saved)),
                self.banner.show_error,
            )

    def _make_choices(self) -> QHBoxLayout:
        row = QHBoxLayout()
        row.setSpacing(8)
        if self._is_new:
            row.addWidget(make_label("Name that it will have"))
            row.addWidget(self.name)
            row.addSpacing(16)
        row.addWidget(make_label("Memory of WSL"))
        row.addWidget(self.memory)
        row.addStretch(1)
        return row

    def _make_foot(self) -> QHBoxLayout:
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addWidget(self.copy)
        row.addStretch(1)
        row.addWidget(Button(self._context.theme, "Close", self.accept))
        row.addWidget(self.save)
        return row

    def _make_script(self) -> None:
        # Nothing can be saved or copied until the script of the present choices is here.
        self._script = None
        self._enable()
        options = read_options(self.memory.value(), self.at_logon.isChecked())
        self._wanted = name, _ = (self.name.text().strip(), options)
        self._context.bridge.do(
            MakeWindowsScript(name=name, options=options),
            lambda script: self._show(script, (name, options)),
            self._fail,
        )

    def _show(self, script: WindowsScript, wanted: tuple[str, ScriptOptions]) -> None:
        if wanted != self._wanted:  # another choice was made meanwhile
            return
        self._script = script
        self.banner.hide()
        self.steps.setText(list_steps(script))
        then = f"\n{how_to_add(script)}" if self._is_new else ""
        self.command.setText(how_to_run(script.file_name) + then)
        if script.notes:
            self.banner.show_message("warning", "Before you run it", ". ".join(script.notes) + ".")
        self._enable()

    def _fail(self, error: RacklessError) -> None:
        self.banner.show_error(error)

    def _enable(self) -> None:
        for button in (self.save, self.copy):
            button.setEnabled(self._script is not None)

    def _copy(self) -> None:
        if self._script is not None:
            copy_to_clipboard(self._script.text)

    def _choose_place(self) -> None:
        if self._script is None:
            return
        chosen, _ = QFileDialog.getSaveFileName(
            self, "Save the script", self._script.file_name, SCRIPTS
        )
        if chosen:
            self.save_file(Path(chosen))
