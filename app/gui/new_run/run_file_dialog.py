"""Run file of the current answers: view, copy, save, or keep as a recipe."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QDialog, QFileDialog, QHBoxLayout, QLineEdit, QVBoxLayout, QWidget

from agents.contract.spec import RunSpec
from app.core.library import FormatRunFile, SaveRecipe, WriteRunFile
from app.errors import RacklessError
from app.gui.kit import primitives
from app.gui.kit.banner import Banner
from app.gui.kit.inputs import TextBox
from app.gui.session.context import Context
from app.library.recipes import Recipe
from app.shell_words import command_here
from app.text import file_name

RUN_FILES = "Run files (*.yaml *.yml);;All files (*)"


def describe_start(path: str) -> str:
    """Return the shell command that starts a run file.

    >>> describe_start("my run.yaml")
    "rackless start 'my run.yaml'"
    """
    return command_here("rackless", "start", path)


class RunFileDialog(QDialog):
    """Shows the run file of one spec."""

    recipe_saved = Signal(object)
    """The new Recipe."""

    def __init__(self, context: Context, parent: QWidget, spec: RunSpec) -> None:
        super().__init__(parent)
        self._context, self._spec = context, spec
        self.setWindowTitle(f"Run file of {spec.name}")
        self.resize(720, 640)
        self.banner = Banner(context.theme)
        self.text = TextBox()
        self.text.setReadOnly(True)
        self.text.setObjectName("code")
        self.text.setAccessibleName("Run file")
        # The likely file name; saving replaces it by the path that was chosen.
        self.command = primitives.make_selectable(
            primitives.make_label(
                describe_start(f"{file_name(spec.name)}.yaml"), "code", wraps=True
            )
        )
        self.title = QLineEdit()
        self.title.setAccessibleName("Recipe name")
        self.title.setPlaceholderText("My settings")
        self.keep = primitives.Button(context.theme, "Save as recipe", self._keep)
        self.keep.setEnabled(False)
        self.title.textChanged.connect(lambda words: self.keep.setEnabled(bool(words.strip())))
        # Otherwise Enter in the name field would press another button of the dialog.
        self.keep.setDefault(True)
        column = QVBoxLayout(self)
        column.setContentsMargins(24, 20, 24, 20)
        column.setSpacing(12)
        column.addWidget(primitives.make_label("Run file", "heading"))
        column.addWidget(
            primitives.make_label(
                "Save it, then start the same run from the command line or a script:", wraps=True
            )
        )
        column.addWidget(self.command)
        column.addWidget(self.text, 1)
        column.addWidget(primitives.make_separator())
        column.addWidget(
            primitives.make_label(
                "A recipe keeps every setting except name and nodes. Find it under \u201cStart "
                "from\u201d in the next run.",
                wraps=True,
            )
        )
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addWidget(self.title, 1)
        row.addWidget(self.keep)
        column.addLayout(row)
        column.addWidget(self.banner)
        column.addLayout(self._make_foot())
        context.bridge.do(FormatRunFile(spec=spec), self.text.setPlainText, self._fail)

    def _make_foot(self) -> QHBoxLayout:
        theme = self._context.theme
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addWidget(
            primitives.Button(
                theme,
                "Copy",
                lambda: primitives.copy_to_clipboard(self.text.toPlainText()),
                icon="copy",
            )
        )
        row.addStretch(1)
        row.addWidget(primitives.Button(theme, "Close", self.accept))
        row.addWidget(
            primitives.Button(
                theme, "Save as\u2026", self._choose_place, icon="save", role="primary"
            )
        )
        return row

    def save_file(self, path: Path) -> None:
        """Write the run file."""
        write = WriteRunFile(spec=self._spec, path=path)
        self._context.bridge.do(write, self._show_saved, self._fail)

    def _show_saved(self, path: Path) -> None:
        self.command.setText(describe_start(str(path)))
        self.banner.show_message("good", "Saved", str(path))

    def _choose_place(self) -> None:
        name = f"{file_name(self._spec.name)}.yaml"
        chosen, _ = QFileDialog.getSaveFileName(self, "Save the run file", name, RUN_FILES)
        if chosen:
            self.save_file(Path(chosen))

    def _keep(self) -> None:
        title = self.title.text().strip()
        save = SaveRecipe(title=title, spec=self._spec)
        self._context.bridge.do(save, self._show_kept, self._fail)

    def _show_kept(self, recipe: Recipe) -> None:
        self.title.clear()
        self.recipe_saved.emit(recipe)
        self.banner.show_message(
            "good", f"Saved recipe {recipe.title}", "Find it under \u201cStart from\u201d."
        )

    def _fail(self, error: RacklessError) -> None:
        self.banner.show_error(error)
