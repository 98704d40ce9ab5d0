"""Artifacts page: table of all artifacts, actions on them, and details of the selected one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import (
    QHBoxLayout,
    QMenu,
    QSplitter,
    QStackedWidget,
    QVBoxLayout,
    QWidget,
)

from app.artifact import ArtifactSnapshot
from app.artifacts.serving import ServeCommand
from app.core.artifacts import ListArtifacts, ListServeCommands, ReadCard
from app.errors import RacklessError
from app.gui.artifacts.artifact_actions import ArtifactActions
from app.gui.artifacts.artifact_details import ArtifactDetails
from app.gui.artifacts.serving_pane import ServingPane
from app.gui.kit.banner import Banner
from app.gui.kit.empty import EmptyState, Waiting
from app.gui.kit.flow_layout import FlowLayout
from app.gui.kit.primitives import Button, IconButton, escape_mnemonic, make_label, set_page_margins
from app.gui.runs.run_actions import RunActions, can_export
from app.gui.session.context import Context
from app.gui.tables.artifact_columns import artifact_columns
from app.gui.tables.rows_model import RowsModel
from app.gui.tables.view import TableView

MAX_RUNS = 20
"""Maximum number of runs in the export menu; older ones can be exported from the Runs page."""


class ArtifactsPage(QWidget):
    export_wanted = Signal()
    """No run can be exported yet, so the Runs page should open."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self.banner = Banner(context.theme)
        self.artifact_actions = ArtifactActions(context, self, self.banner)
        self._runs = RunActions(context, self, self.banner)
        self.model: RowsModel[ArtifactSnapshot] = RowsModel(
            artifact_columns(context.cluster.now_s), key=lambda one: one.label
        )
        self.table = TableView(context.theme, self.model, "Artifacts")
        self.table.sort_by("Created", Qt.SortOrder.DescendingOrder)
        self.serving = ServingPane(context.theme)
        self.details = ArtifactDetails(context, self.serving)
        self.buttons = self._make_buttons()
        self.export = Button(
            context.theme,
            "Export a run",
            lambda: self._ask_run(self.export),
            icon="export",
            role="primary",
            tip="Turn a checkpoint of a run into a model that you can use elsewhere",
        )
        self._stack = QStackedWidget()
        self._stack.addWidget(self._make_empty())
        self._stack.addWidget(self._make_split())
        self._stack.addWidget(Waiting("Looking for your artifacts\u2026"))
        self._is_known = False
        column = QVBoxLayout(self)
        set_page_margins(column, self)
        column.addLayout(self._make_head())
        column.addWidget(self.banner)
        column.addWidget(self._stack, 1)
        self._connect()
        self._choose()

    def open_artifact(self, label: str) -> None:
        """Select an artifact by its label."""
        self.table.select(label)

    def refresh(self) -> None:
        """Reload all artifacts and the state of their copies on this PC."""
        self._context.bridge.do(ListArtifacts(), self._show, failure=self.banner.show_error)

    # ------------------------------------------------------------ layout

    def _make_head(self) -> FlowLayout:
        tip = "Add an artifact folder that was made elsewhere or moved"
        lead = QWidget()
        row = QHBoxLayout(lead)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(8)
        row.addWidget(make_label("Artifacts", "title"))
        self._add = IconButton(self._context.theme, "add", tip, self.artifact_actions.add)
        row.addWidget(self._add)
        row.addStretch(1)
        head = FlowLayout(lead=lead)
        for button in self.buttons.values():
            head.addWidget(button)
        head.addWidget(self.export)
        return head

    def _make_buttons(self) -> dict[str, Button]:
        actions: dict[str, tuple[str, str, str, Callable[[ArtifactSnapshot], object]]] = {
            "delete": (
                "Delete",
                "delete",
                "Delete the artifact and all its copies",
                self.artifact_actions.delete,
            ),
            "chat": (
                "Chat",
                "chat",
                "Chat with the artifact and the original model, side by side",
                self.artifact_actions.chat,
            ),
            "push": (
                "Push\u2026",
                "push",
                "Upload the artifact to the Hugging Face hub",
                self.artifact_actions.push,
            ),
            "copy": (
                "Copy\u2026",
                "copy",
                "Copy the artifact to a node or a folder",
                self.artifact_actions.copy,
            ),
        }
        return {
            name: Button(
                self._context.theme,
                text,
                partial(self._with_chosen, action),
                icon=icon,
                role="danger" if name == "delete" else "",
                tip=tip,
            )
            for name, (text, icon, tip, action) in actions.items()
        }

    def _make_empty(self) -> QWidget:
        theme = self._context.theme
        export = Button(
            theme, "Export a run", lambda: self._ask_run(export), icon="export", role="primary"
        )
        return EmptyState(
            theme,
            "artifacts",
            "No artifacts yet",
            "Export a run to get a model that you can use anywhere: merged, or quantized to 4 to "
            "8 bits. Each artifact comes with a card that lists its measurements.",
            [
                export,
                Button(theme, "Add a folder\u2026", self.artifact_actions.add, icon="folder"),
            ],
        )

    def _make_split(self) -> QSplitter:
        # Cards can be long and tables short, so the user decides how the page is divided.
        split = QSplitter(Qt.Orientation.Vertical)
        split.addWidget(self.table)
        split.addWidget(self.details)
        split.setStretchFactor(0, 1)
        split.setStretchFactor(1, 1)
        split.setChildrenCollapsible(False)
        split.setHandleWidth(16)
        return split

    def _connect(self) -> None:
        cluster = self._context.cluster
        cluster.is_open_changed.connect(self.refresh)
        cluster.artifacts_changed.connect(self.refresh)
        self.table.chosen.connect(self._choose)
        # A double click opens the folder, as in a file manager.
        self.table.opened.connect(partial(self._with_chosen, self._open_folder))
        # Commands are read only for a visible tab; most selections never need them.
        self.details.serve_shown.connect(partial(self._with_chosen, self._load_commands))
        copies = self.details.copies
        copies.delete_wanted.connect(self._delete_copy)
        copies.check_wanted.connect(partial(self._with_chosen, self.artifact_actions.check))
        copies.folder_wanted.connect(self.artifact_actions.open_folder)
        self.serving.taken.connect(self._copy_command)

    # ------------------------------------------------------------ events

    def _show(self, artifacts: tuple[ArtifactSnapshot, ...]) -> None:
        self._is_known = True
        self.model.reset(artifacts)
        self._choose()

    def _choose(self) -> None:
        rows = self.model.rows()
        self._stack.setCurrentIndex(1 if rows else 0 if self._is_known else 2)
        # The details below are never empty while there are artifacts.
        if self.table.selected() is None and rows:
            self.table.selectRow(0)
        artifact = self.table.selected()
        for name, button in self.buttons.items():
            # A push reads local files, so it needs a copy on this PC.
            has_folder = artifact is not None and artifact.folder() is not None
            button.setEnabled(has_folder if name == "push" else artifact is not None)
        # An empty page has its own buttons in the middle.
        for widget in (*self.buttons.values(), self._add, self.export):
            widget.setVisible(bool(rows))
        # This also runs after every reload; the card of an unchanged artifact is not read again.
        if artifact is not None and self.details.show_artifact(artifact):
            self._context.bridge.do(
                ReadCard(name=artifact.label),
                partial(self._show_card, artifact.label),
                # A card that cannot be read is like none: the other tabs still have their data.
                failure=lambda error: self._show_card(artifact.label, ""),
            )

    def _show_card(self, label: str, text: str) -> None:
        if self._is_chosen(label):
            self.details.show_card(text)

    def _ask_run(self, button: Button) -> None:
        """Show a menu of the runs that can be exported; without any, open the Runs page."""
        runs = [run for run in self._context.cluster.run_list() if can_export(run)]
        # Nothing to export: lead to the runs instead of showing an empty menu.
        if not runs:
            self.export_wanted.emit()
            return
        menu = QMenu(self)
        # A popup menu is not deleted by closing it.
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        for run in runs[:MAX_RUNS]:
            menu.addAction(escape_mnemonic(run.name), partial(self._runs.export, run))
        menu.popup(button.mapToGlobal(button.rect().bottomLeft()))

    def _open_folder(self, artifact: ArtifactSnapshot) -> None:
        folder = artifact.folder()
        if folder is not None:
            self.artifact_actions.open_folder(folder)

    def _load_commands(self, artifact: ArtifactSnapshot) -> None:
        self._context.bridge.do(
            ListServeCommands(name=artifact.label),
            partial(self._show_commands, artifact.label),
            failure=partial(self._show_no_commands, artifact.label),
        )

    def _show_commands(self, label: str, commands: tuple[ServeCommand, ...]) -> None:
        if self._is_chosen(label):
            self.serving.show_commands(commands)

    def _show_no_commands(self, label: str, error: RacklessError) -> None:
        if self._is_chosen(label):
            self.serving.say(f"{error}. Copy the artifact to a folder on this PC first.")

    def _is_chosen(self, label: str) -> bool:
        """Return whether an artifact is still selected when an answer for it arrives."""
        chosen = self.table.selected()
        return chosen is not None and chosen.label == label

    def _copy_command(self, command: ServeCommand) -> None:
        self._with_chosen(lambda artifact: self.artifact_actions.copy_command(artifact, command))

    def _delete_copy(self, copy: object) -> None:
        self._with_chosen(lambda artifact: self.artifact_actions.delete(artifact, copy))  # type: ignore[arg-type]

    def _with_chosen(self, action: Callable[[ArtifactSnapshot], object]) -> None:
        artifact = self.table.selected()
        if artifact is not None:
            action(artifact)
