"""The table of nodes above its tabs: as high as its rows, so that few nodes leave room below."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import Qt, QTimer
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QSplitter, QWidget

from app.gui.tables.view import TableView

LEAST_ROWS = 3
"""Minimum number of rows that the table has room for."""
TABLE_SHARE = 0.5
"""Maximum share of the height for the table, until the user moves the handle."""
HANDLE_PX = 16


class NodeSplit(QSplitter):
    def __init__(self, table: TableView[Any], tabs: QWidget) -> None:
        super().__init__(Qt.Orientation.Vertical)
        self._table = table
        self._is_moved = False
        self.addWidget(table)
        self.addWidget(tabs)
        self.setChildrenCollapsible(False)
        self.setHandleWidth(HANDLE_PX)
        # A splitter knows new limits of its parts only after a turn of the event loop.
        self._soon = QTimer(self, interval=0, singleShot=True)
        self._soon.timeout.connect(self._divide)
        self.splitterMoved.connect(self._keep)
        for signal in (table.model().rowsInserted, table.model().rowsRemoved):
            signal.connect(lambda *rows: self._soon.start())
        self._soon.start()

    def _divide(self) -> None:
        """Give the table the height of its rows, up to its share, and the tabs the rest."""
        self._table.keep_to_rows(LEAST_ROWS)
        if not self._is_moved:
            whole_px = self.height() - HANDLE_PX
            table_px = min(self._table.maximumHeight(), round(whole_px * TABLE_SHARE))
            self.setSizes([table_px, whole_px - table_px])
            self._table.scrollTo(self._table.currentIndex())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._divide()
        self._soon.start()

    def _keep(self) -> None:
        self._is_moved = True
