"""Links between nodes as a matrix: rows send, columns receive."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from PySide6.QtWidgets import QHBoxLayout, QVBoxLayout, QWidget

from app.core.nodes import ListLinks
from app.events import LinkSnapshot
from app.flows.links import LinkRow, make_matrix, summarise
from app.gui.kit.primitives import Button, make_label
from app.gui.session.context import Context
from app.gui.tables.rows_model import Column, RowsModel
from app.gui.tables.view import TableView
from app.telemetry.state import Status

NAME_PX, CELL_PX = 128, 176


class LinksPane(QWidget):
    """Matrix of links; rebuilt when nodes are added or removed."""

    def __init__(self, context: Context, measure: Callable[[], object]) -> None:
        super().__init__()
        self._context = context
        self._links: tuple[LinkSnapshot, ...] = ()
        self._are_known = False
        # None, unlike (), equals no list of names, so the first `_show` makes a table.
        self._names: tuple[str, ...] | None = None
        self.table: TableView[LinkRow] | None = None
        self.summary = make_label(role="muted", wraps=True)
        self.measure = Button(
            context.theme,
            "Measure links",
            measure,
            icon="refresh",
            role="link",
            tip="Check all nodes and measure every link between them",
        )
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 12, 0, 0)
        self._column.setSpacing(8)
        head = QHBoxLayout()
        head.addWidget(self.summary, 1)
        head.addWidget(self.measure)
        self._column.addLayout(head)
        self._column.addStretch(0)
        context.cluster.structure_changed.connect(self._show)
        context.cluster.is_open_changed.connect(self.reload)
        self._show()

    def reload(self) -> None:
        """Reload the measured links."""
        self._context.bridge.do(ListLinks(), self._take)

    def _take(self, links: tuple[LinkSnapshot, ...]) -> None:
        self._links, self._are_known = links, True
        self._show()

    def _show(self) -> None:
        names = tuple(node.name for node in self._context.cluster.node_list())
        words = summarise(names, self._links, self._context.cluster.now_s())
        self.summary.setText(words if self._are_known else "Looking for measured links\u2026")
        # A link needs two ends.
        self.measure.setEnabled(len(names) > 1)
        # Columns are nodes, so the table is rebuilt only when their names change.
        if names != self._names:
            self._names = names
            self._make_table(names)
        self.model.reset(make_matrix(names, self._links))

    def _make_table(self, names: tuple[str, ...]) -> None:
        columns: list[Column[LinkRow]] = [
            Column(title="From \\ to", text=lambda row: row.node, width_px=NAME_PX)
        ]
        for name in names:
            columns.append(
                Column(
                    title=name,
                    text=partial(_text, name),
                    status=partial(_cell, name),
                    tip=f"From the row's node to {name}",
                    width_px=CELL_PX,
                )
            )
        self.model: RowsModel[LinkRow] = RowsModel(columns, key=lambda row: row.node)
        old, self.table = self.table, TableView(self._context.theme, self.model, "Links")
        if old is not None:
            # Deferred deletion: the old table may be the sender of the signal being handled.
            old.deleteLater()
        # Below the head; the stretch at the end keeps both at the top.
        self._column.insertWidget(1, self.table, 1)


def _text(name: str, row: LinkRow) -> str:
    return row.cells[name].text


def _cell(name: str, row: LinkRow) -> Status:
    return row.cells[name]
