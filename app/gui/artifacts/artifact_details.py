"""Details of one artifact: measurements, origin, copies, serving commands and card."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import (
    QHBoxLayout,
    QScrollArea,
    QStackedWidget,
    QTabWidget,
    QVBoxLayout,
    QWidget,
)

from app.artifact import ArtifactCopy, ArtifactSnapshot, Verdict, describe_kind
from app.gui.kit.fact_rows import FactRows
from app.gui.kit.markdown_view import MarkdownView
from app.gui.kit.primitives import Button, make_label
from app.gui.session.context import Context
from app.gui.tables.artifact_columns import copy_columns, measured_columns
from app.gui.tables.rows_model import RowsModel
from app.gui.tables.view import TableView
from app.presentation.result_text import describe_lineage
from app.text import count_of, show_bytes, show_moment

Deed = Callable[[], object]


class Lineage(QScrollArea):
    """Origin of the artifact, from its base model on, as name and value pairs."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._now_s = context.cluster.now_s
        self._rows = FactRows(across_px=24, down_px=8)
        body = QWidget()
        body.setObjectName("content")
        column = QVBoxLayout(body)
        column.setContentsMargins(4, 12, 4, 4)
        column.addLayout(self._rows)
        column.addStretch(1)
        self.setWidget(body)
        self.setWidgetResizable(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)

    def show_artifact(self, artifact: ArtifactSnapshot) -> None:
        """Show the origin of an artifact."""
        rows = [
            *describe_lineage(artifact),
            ("artifact", f"{artifact.label}, {describe_kind(artifact)}"),
            (
                "size",
                f"{show_bytes(artifact.size_bytes)} in {count_of(len(artifact.files), 'file')}",
            ),
            ("created", show_moment(artifact.created_s, self._now_s())),
        ]
        self._rows.show_rows((name.capitalize(), value) for name, value in rows)


# Enabled buttons depend on the selected copy: only folders on this PC can be opened.
class CopiesView(QWidget):
    """Copies of the artifact, with actions on the selected one."""

    delete_wanted = Signal(object)
    """ArtifactCopy to delete."""
    check_wanted = Signal()
    folder_wanted = Signal(str)

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.model: RowsModel[ArtifactCopy] = RowsModel(
            copy_columns(context.cluster.now_s), key=lambda one: (one.kind, one.place)
        )
        self.table = TableView(context.theme, self.model, "Copies of the artifact")
        self.check = Button(
            context.theme,
            "Verify all copies",
            self.check_wanted.emit,
            icon="check",
            tip="Read every copy and compare its hashes",
        )
        self.folder = Button(
            context.theme,
            "Open folder",
            self._open_folder,
            icon="folder",
            tip="Show the selected copy in this PC's file manager",
        )
        self.delete = Button(
            context.theme,
            "Delete copy",
            self._delete,
            icon="delete",
            role="danger",
            tip="Delete the selected copy; others are kept",
        )
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 12, 0, 0)
        column.setSpacing(8)
        column.addWidget(self.table, 1)
        foot = QHBoxLayout()
        foot.setSpacing(8)
        foot.addWidget(self.check)
        foot.addStretch(1)
        foot.addWidget(self.folder)
        foot.addWidget(self.delete)
        column.addLayout(foot)
        self.table.chosen.connect(self._choose)

    def show_copies(self, copies: tuple[ArtifactCopy, ...]) -> None:
        """Show `copies`."""
        # A selection that stays is not signalled, although the state of its copy may have changed.
        self.model.reset(copies)
        self._choose()

    def _choose(self) -> None:
        chosen = self.table.selected()
        self.delete.setEnabled(chosen is not None)
        on_this_pc = chosen is not None and chosen.kind == "folder" and chosen.state != "missing"
        self.folder.setEnabled(on_this_pc)

    def _open_folder(self) -> None:
        chosen = self.table.selected()
        if chosen is not None:
            self.folder_wanted.emit(chosen.place)

    def _delete(self) -> None:
        chosen = self.table.selected()
        if chosen is not None:
            self.delete_wanted.emit(chosen)


class ArtifactDetails(QTabWidget):
    """All details of an artifact, in tabs."""

    serve_shown = Signal()
    """The Serve tab is visible, so its commands are needed."""

    def __init__(self, context: Context, serving: QWidget) -> None:
        super().__init__()
        self.setDocumentMode(True)
        self.lineage = Lineage(context)
        self.measured: RowsModel[Verdict] = RowsModel(measured_columns(), key=lambda v: v.name)
        self._table = TableView(context.theme, self.measured, "Measurements")
        self._nothing = make_label("", "muted", wraps=True)
        self._nothing.setAlignment(Qt.AlignmentFlag.AlignTop)
        self._nothing.setContentsMargins(4, 16, 4, 4)
        self._figures = QStackedWidget()
        self._figures.addWidget(self._table)
        self._figures.addWidget(self._nothing)
        self.copies = CopiesView(context)
        self.card = MarkdownView()
        self.card.setAccessibleName("Artifact card")
        self._serving = serving
        self._shown: ArtifactSnapshot | None = None
        for title, widget in (
            ("Measurements", self._figures),
            ("Origin", self.lineage),
            ("Copies", self.copies),
            ("Serve", serving),
            ("Card", self.card),
        ):
            self.addTab(widget, title)
        self.currentChanged.connect(self._look)

    def show_artifact(self, artifact: ArtifactSnapshot) -> bool:
        """Show an artifact; return False if it is already shown unchanged."""
        if artifact == self._shown:
            return False
        self._shown = artifact
        self.lineage.show_artifact(artifact)
        self.measured.reset(artifact.verdicts)
        self._figures.setCurrentIndex(0 if artifact.verdicts else 1)
        self._nothing.setText(
            "A merged model is the trained model itself. Nothing is rounded, so there is nothing "
            "to compare."
            if artifact.format == "merged" and artifact.origin is not None
            else "No measurements: this artifact was made elsewhere."
        )
        self.copies.show_copies(artifact.copies)
        # The Serve tab may be visible already, with the commands of the previous artifact.
        self._look()
        return True

    # The card comes from a file on this PC, so it arrives later than the rest.
    def show_card(self, text: str) -> None:
        """Show the card (README.md) of a copy on this PC; empty: no card."""
        self.card.show_markdown(
            _without_front_matter(text) or "This PC has no card for this artifact."
        )

    def _look(self) -> None:
        if self.currentWidget() is self._serving:
            self.serve_shown.emit()


def _without_front_matter(text: str) -> str:
    """Return Markdown without its YAML front matter, which only the hub reads."""
    if not text.startswith("---\n"):
        return text
    return text[4:].partition("\n---\n")[2]
