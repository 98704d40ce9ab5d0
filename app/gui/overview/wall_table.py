"""The wall as a table: sortable, dense, and readable by screen readers."""

from __future__ import annotations

from collections.abc import Iterable

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QVBoxLayout, QWidget

from app.gui.session.context import Context
from app.gui.tables.device_columns import DeviceRow, device_columns, make_row
from app.gui.tables.rows_model import RowsModel
from app.gui.tables.view import TableView
from app.telemetry.stream import DeviceKey


class WallTable(QWidget):
    """Table of all devices; updated only while visible."""

    device_opened = Signal(object)
    """DeviceKey of the row that was opened."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._cluster = context.cluster
        self.model: RowsModel[DeviceRow] = RowsModel(device_columns(), key=lambda row: row.key)
        self.table = TableView(context.theme, self.model, "All devices")
        self.table.sort_by("Node", Qt.SortOrder.AscendingOrder)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 4, 16, 8)
        column.addWidget(self.table)
        self.table.opened.connect(self._open)
        self._cluster.structure_changed.connect(self.rebuild)
        self._cluster.devices_changed.connect(self.refresh)
        self._cluster.node_changed.connect(self.refresh_node)

    def showEvent(self, event: QShowEvent) -> None:
        # Changes were skipped while the table was hidden.
        self.rebuild()
        super().showEvent(event)

    def rebuild(self) -> None:
        """Rebuild all rows."""
        if self.isVisible():
            keys = [device.key for device in self._cluster.telemetry]
            self.model.reset(self._rows(keys))

    def refresh(self, keys: Iterable[DeviceKey]) -> None:
        """Update the rows of `keys`."""
        if self.isVisible():
            for row in self._rows(keys):
                self.model.put(row)

    def refresh_node(self, name: str) -> None:
        """Update the state of a node."""
        self.refresh(device.key for device in self._cluster.telemetry.of_node(name))

    def _rows(self, keys: Iterable[DeviceKey]) -> list[DeviceRow]:
        nodes, now_s = self._cluster.nodes, self._cluster.now_s()
        known = [self._cluster.telemetry[key] for key in sorted(keys) if key.node in nodes]
        return [make_row(device, nodes[device.key.node], now_s) for device in known]

    def _open(self) -> None:
        row = self.table.selected()
        if row is not None:
            self.device_opened.emit(row.key)
