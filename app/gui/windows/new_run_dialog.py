"""New run: the questions on the left, what follows from the answers on the right.

All logic is in app.flows.new_run. A problem shows at its field once the person has been there, or
has pressed Start.
"""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import (
    QCheckBox,
    QDialog,
    QFileDialog,
    QHBoxLayout,
    QLabel,
    QScrollArea,
    QVBoxLayout,
    QWidget,
)

from agents.spec import RunSpec
from app.errors import RacklessError
from app.events import RunSnapshot
from app.flows.new_run import Answers, Review, apply_answers, review, to_answers
from app.flows.new_run_fields import FIELDS, Field
from app.gui.context import Context
from app.gui.seam import CoreSeam
from app.gui.widgets.answer_field import AnswerField
from app.gui.widgets.banner import Banner
from app.gui.widgets.parts import Button, make_label, make_panel

RUN_FILES = "Run files (*.yaml *.yml);;All files (*)"
_WIDE = {"model", "train", "eval", "adapter", "nodes", "format", "name", "targets"}


async def read_file(core: CoreSeam, path: Path) -> RunSpec:
    return core.read_run_file(path)


async def write_file(core: CoreSeam, spec: RunSpec, path: Path) -> Path:
    core.write_run_file(spec, path)
    return path


class NewRunDialog(QDialog):
    started = Signal(str)
    """The id of the run that was started."""

    def __init__(self, context: Context, parent: QWidget) -> None:
        super().__init__(parent)
        self._context = context
        self._base: RunSpec | None = None
        self._shows_all = False
        self.setWindowTitle("New run")
        self.resize(960, 720)
        nodes = context.cluster.node_list()
        self.fields = {field.key: AnswerField(context.theme, field, nodes) for field in FIELDS}
        self.banner = Banner(context.theme)
        self.advanced = QCheckBox("Show every setting")
        self._summary = QVBoxLayout()
        self._values: dict[str, QLabel] = {}
        self.start = Button(context.theme, "Start", self._start, icon="resume", role="primary")
        self._sections: list[QWidget] = []
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        body = QHBoxLayout()
        body.setContentsMargins(24, 20, 24, 0)
        body.setSpacing(24)
        body.addWidget(self._make_form(), 1)
        body.addWidget(self._make_side())
        column.addLayout(body, 1)
        foot = QVBoxLayout()
        foot.setContentsMargins(24, 12, 24, 20)
        foot.setSpacing(12)
        foot.addWidget(self.banner)
        foot.addLayout(self._make_foot())
        column.addLayout(foot)
        for field in self.fields.values():
            field.edited.connect(self._review)
        self.advanced.toggled.connect(lambda shows: self._choose_fields())
        self._fill(Answers(name=self._free_name()))
        self._choose_fields()
        self.fields["model"].input.setFocus()

    # ------------------------------------------------------------ layout

    def _make_form(self) -> QScrollArea:
        body = QWidget()
        body.setObjectName("content")
        column = QVBoxLayout(body)
        column.setContentsMargins(0, 0, 16, 16)
        column.setSpacing(12)
        for section in dict.fromkeys(field.section for field in FIELDS):
            column.addWidget(make_label(section, "heading"))
            column.addWidget(self._make_section([f for f in FIELDS if f.section == section]))
            column.addSpacing(12)
        column.addStretch(1)
        scroll = QScrollArea()
        scroll.setWidget(body)
        scroll.setWidgetResizable(True)
        scroll.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        return scroll

    def _make_section(self, asked: list[Field]) -> QWidget:
        box = QWidget()
        column = QVBoxLayout(box)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(16)
        narrow: list[AnswerField] = []
        for field in asked:
            if field.key in _WIDE:
                column.addWidget(self.fields[field.key])
            else:
                narrow.append(self.fields[field.key])
        for left in range(0, len(narrow), 2):
            row = QHBoxLayout()
            row.setSpacing(24)
            for part in narrow[left : left + 2]:
                row.addWidget(part, 1)
            column.addLayout(row)
        return box

    def _make_side(self) -> QWidget:
        panel = make_panel()
        panel.setFixedWidth(280)
        column = QVBoxLayout(panel)
        column.setContentsMargins(20, 16, 20, 16)
        column.setSpacing(12)
        column.addWidget(make_label("What will happen", "heading"))
        self._summary.setSpacing(12)
        column.addLayout(self._summary)
        column.addStretch(1)
        column.addWidget(
            make_label(
                "The model and the data are copied to each node once. The run goes on when this "
                "window is closed.",
                "caption",
                wraps=True,
            )
        )
        return panel

    def _make_foot(self) -> QHBoxLayout:
        theme = self._context.theme
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addWidget(
            Button(
                theme,
                "Open run file\u2026",
                self._choose_file,
                icon="folder",
                tip="Fill the form from a YAML file",
            )
        )
        row.addWidget(
            Button(
                theme,
                "Save as run file\u2026",
                self._choose_place,
                icon="save",
                tip="Write the answers to a YAML file that 'rackless start' takes too",
            )
        )
        row.addWidget(self.advanced)
        row.addStretch(1)
        row.addWidget(Button(theme, "Cancel", self.reject))
        row.addWidget(self.start)
        self.start.setDefault(True)
        return row

    # ------------------------------------------------------------ answers

    def answers(self) -> Answers:
        return Answers(**{key: field.answer() for key, field in self.fields.items()})

    def open_file(self, path: Path) -> None:
        """Fill the form from a run file."""
        self._context.bridge.run(
            lambda core, report: read_file(core, path),
            lambda spec: self._take_file(path, spec),
            self.banner.show_error,
        )

    def save_file(self, path: Path) -> None:
        """Write the answers as a run file."""
        spec = self._spec_or_tell()
        if spec is not None:
            self._context.bridge.run(
                lambda core, report: write_file(core, spec, path),
                lambda written: self.banner.show_message("good", "Saved", str(written)),
                self.banner.show_error,
            )

    def _fill(self, answers: Answers) -> None:
        for key, field in self.fields.items():
            field.set_answer(str(getattr(answers, key)))
        self._review()

    def _take_file(self, path: Path, spec: RunSpec) -> None:
        self._base = spec
        self._shows_all = True
        self._fill(to_answers(spec))
        self.banner.show_message("good", f"Read {path.name}", "Change what you like, then start.")

    def _review(self) -> Review:
        result = review(self.answers(), self._context.cluster.node_list())
        for key, field in self.fields.items():
            finding = result.findings.get(key)
            is_due = self._shows_all or field.was_touched
            is_due = is_due or (finding is not None and finding.severity == "warning")
            field.show_finding(finding if is_due or key == "nodes" else None)
        self._show_summary(result)
        self._choose_fields()
        return result

    def _show_summary(self, result: Review) -> None:
        for label, value in result.summary:
            if label not in self._values:
                self._values[label] = make_label(wraps=True)
                pair = QVBoxLayout()
                pair.setSpacing(2)
                pair.addWidget(make_label(label, "caption"))
                pair.addWidget(self._values[label])
                self._summary.addLayout(pair)
            self._values[label].setText(value)

    def _choose_fields(self) -> None:
        is_adapter = self.fields["adapter"].answer() != "full"
        for key, field in self.fields.items():
            hidden = field.field.advanced and not self.advanced.isChecked()
            if key in ("rank", "alpha", "dropout", "targets"):
                hidden = hidden or not is_adapter
            field.setVisible(not hidden)

    def _free_name(self) -> str:
        taken = {run.name for run in self._context.cluster.runs.values()}
        number = 1
        while f"run-{number}" in taken:
            number += 1
        return f"run-{number}"

    def _spec_or_tell(self) -> RunSpec | None:
        self._shows_all = True
        result = self._review()
        if result.spec is None:
            first = next(key for key in self.fields if key in result.findings)
            if self.fields[first].field.advanced:
                self.advanced.setChecked(True)
            self.fields[first].input.setFocus()
            number = sum(finding.severity == "error" for finding in result.findings.values())
            words = "One answer needs" if number == 1 else f"{number} answers need"
            self.banner.show_message("warning", f"{words} another look", "They are marked above.")
            return None
        if self._base is not None:
            return apply_answers(self._base, self.answers())
        return result.spec

    # ------------------------------------------------------------ deeds

    def _start(self) -> None:
        spec = self._spec_or_tell()
        if spec is None:
            return
        self.start.setEnabled(False)
        self.banner.show_message("busy", "Starting", "Copying what the nodes do not have yet.")
        self._context.bridge.run(
            lambda core, report: core.start_run(spec, report),
            success=self._started,
            failure=self._failed,
            progress=self._show_announced,
        )

    def _show_announced(self, run_id: object) -> None:
        self.banner.show_message("busy", f"Starting {run_id}", "Copying, then launching.")

    def _started(self, run: RunSnapshot) -> None:
        self.started.emit(run.run_id)
        self.accept()

    def _failed(self, error: RacklessError) -> None:
        self.start.setEnabled(True)
        self.banner.show_error(error)

    def _choose_file(self) -> None:
        chosen, _ = QFileDialog.getOpenFileName(self, "Run file", filter=RUN_FILES)
        if chosen:
            self.open_file(Path(chosen))

    def _choose_place(self) -> None:
        name = f"{self.fields['name'].answer().strip() or 'run'}.yaml"
        chosen, _ = QFileDialog.getSaveFileName(self, "Save as run file", name, RUN_FILES)
        if chosen:
            self.save_file(Path(chosen))
