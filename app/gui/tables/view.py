"""The table view of every page: sorting, row selection, filter, and cells with glyphs and bars."""

from __future__ import annotations

import re
from typing import Any, Generic, TypeVar

from PySide6.QtCore import QRectF, QRegularExpression, QSortFilterProxyModel, Qt, Signal
from PySide6.QtGui import QFontMetricsF, QKeyEvent, QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import (
    QAbstractItemView,
    QHeaderView,
    QLineEdit,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QTableView,
)

from app.gui.kit.primitives import set_tooltip
from app.gui.kit.status import paint_status
from app.gui.kit.theme import Theme
from app.gui.tables import rows_model
from app.telemetry.state import Status

T = TypeVar("T")
ROW_HEIGHT_PX = 36
CELL_PAD_PX = 13
BAR_WIDTH_PX = 64
CORNER_PX = 8
"""Height of the rounded corners, which a selected row would paint over."""
MARK_PX = 3
"""Width of the accent at the left of a selected row; the tint alone has too little contrast."""
SPLIT_COLORS = ("chart_temperature", "chart_utilisation", "chart_muted", "chart_memory")
"""Colours of the parts of a stacked bar, in order."""


class CellDelegate(QStyledItemDelegate):
    """Draws states with a glyph, and shares as bars."""

    def __init__(self, theme: Theme, view: QTableView) -> None:
        super().__init__(view)
        self._theme = theme

    def paint(
        self, painter: QPainter, option: QStyleOptionViewItem, index: rows_model.Index
    ) -> None:
        status, share = index.data(rows_model.STATUS_ROLE), index.data(rows_model.PROGRESS_ROLE)
        split = index.data(rows_model.SPLIT_ROLE)
        style: Any = option  # the type stubs lack the fields of the C++ struct
        is_plain = status is None and share is None and split is None
        if is_plain:  # the style draws text, selection and focus better than we could
            super().paint(painter, option, index)
        painter.save()
        if split is not None:
            self._paint_split(painter, style, split)
        elif not is_plain:
            self._paint_cell(painter, style, status, share, str(index.data()))
        painter.setPen(self._theme.palette.color("chart_grid"))
        painter.drawLine(style.rect.bottomLeft(), style.rect.bottomRight())
        is_first = style.rect.left() <= 0 and index.column() == 0
        if is_first and style.state & QStyle.StateFlag.State_Selected:
            edge = QRectF(style.rect.left(), style.rect.top(), MARK_PX, style.rect.height() - 1)
            painter.fillRect(edge, self._theme.palette.color("accent"))
        painter.restore()

    def _paint_cell(
        self, painter: QPainter, style: Any, status: Status | None, share: float | None, text: str
    ) -> None:
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        colors = self._theme.palette
        if style.state & QStyle.StateFlag.State_Selected:
            painter.fillRect(style.rect, colors.color("selected"))
        area = QRectF(style.rect).adjusted(CELL_PAD_PX, 1, -8, 0)
        if status is not None:
            paint_status(painter, self._theme, status, area, 13)
        else:
            self._paint_progress(painter, area, share or 0.0, text)
        # The painter is shared with the cells that the style draws.
        painter.setRenderHint(QPainter.RenderHint.Antialiasing, False)

    def _paint_split(self, painter: QPainter, style: Any, parts: tuple[float, ...]) -> None:
        colors = self._theme.palette
        if style.state & QStyle.StateFlag.State_Selected:
            painter.fillRect(style.rect, colors.color("selected"))
        area = QRectF(style.rect).adjusted(CELL_PAD_PX, 0, -CELL_PAD_PX, 0)
        bar = QRectF(area.left(), area.center().y() - 4, area.width(), 8)
        painter.fillRect(bar, colors.color("chart_grid"))
        left = bar.left()
        for share, name in zip(parts, SPLIT_COLORS, strict=True):
            width = share * bar.width()
            seen = width - 1 if width > 3 else width  # a gap: parts must not differ by colour alone
            painter.fillRect(QRectF(left, bar.top(), seen, bar.height()), colors.color(name))
            left += width

    def _paint_progress(self, painter: QPainter, area: QRectF, share: float, text: str) -> None:
        colors = self._theme.palette
        bar = QRectF(area.left(), area.center().y() - 3, BAR_WIDTH_PX, 6)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(colors.color("chart_grid"))
        painter.drawRoundedRect(bar, 3, 3)
        if share > 0:
            painter.setBrush(colors.color("accent"))
            # No narrower than its round ends, or the first few percent would look like none.
            bar.setWidth(max(6.0, BAR_WIDTH_PX * min(share, 1.0)))
            painter.drawRoundedRect(bar, 3, 3)
        painter.setPen(colors.color("text"))
        painter.setFont(self._theme.font(13))
        words = area.adjusted(BAR_WIDTH_PX + 10, 0, 0, 0)
        shown = QFontMetricsF(painter.font()).elidedText(
            text, Qt.TextElideMode.ElideRight, words.width() + 0.5
        )
        painter.drawText(words, int(Qt.AlignmentFlag.AlignVCenter), shown)


class TableView(QTableView, Generic[T]):
    """A sorted and filtered view of a RowsModel."""

    opened = Signal()
    """A row was double clicked, or Enter was pressed on it."""
    chosen = Signal()
    """The selection changed."""

    def __init__(self, theme: Theme, model: rows_model.RowsModel[T], name: str) -> None:
        super().__init__()
        self._rows, self._theme = model, theme
        self._words = ""
        # Rows of the proxy are those on screen; every index is mapped before the model sees it.
        self._proxy = QSortFilterProxyModel(self)
        self._proxy.setSortRole(rows_model.SORT_ROLE)
        self._proxy.setFilterRole(rows_model.WORDS_ROLE)
        self._proxy.setSourceModel(model)
        self.setModel(self._proxy)
        self.setItemDelegate(CellDelegate(theme, self))
        self.setAccessibleName(name)
        # Not by the wheel: letters typed after scrolling would choose another row.
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
        self.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
        self.setVerticalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.setHorizontalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.setShowGrid(False)
        self.setWordWrap(False)
        # Tab leaves the table; by default it would visit every cell.
        self.setTabKeyNavigation(False)
        self.setMouseTracking(True)
        self.verticalHeader().setDefaultSectionSize(ROW_HEIGHT_PX)
        self.verticalHeader().hide()
        self._lay_out_columns()
        self.doubleClicked.connect(lambda: self.opened.emit())
        self.selectionModel().selectionChanged.connect(lambda: self.chosen.emit())

    def sort_by(self, title: str, order: Qt.SortOrder) -> None:
        """Sort by the column with this title, and enable sorting by click."""
        titles = [column.title for column in self._rows.columns]
        self.setSortingEnabled(True)
        self.sortByColumn(titles.index(title), order)

    def say_when_empty(self, words: str) -> None:
        """Set the text in the middle of an empty table."""
        self._words = words
        self.viewport().update()

    def keep_to_rows(self, num_least: int) -> None:
        """Limit the height to that of the present rows, or of `num_least` rows."""
        bar = self.horizontalScrollBar()
        bar_px = bar.sizeHint().height() if bar.maximum() > 0 else 0
        head_px = self.horizontalHeader().sizeHint().height() + 2 * self.frameWidth()
        rows_px = max(self._proxy.rowCount(), num_least) * ROW_HEIGHT_PX
        self.setMaximumHeight(head_px + rows_px + bar_px + CORNER_PX)

    def is_cut(self, title: str, text: str) -> bool:
        """Return whether the column with this title is too narrow for a text."""
        number = [column.title for column in self._rows.columns].index(title)
        return (
            self.fontMetrics().horizontalAdvance(text) > self.columnWidth(number) - 2 * CELL_PAD_PX
        )

    def select_several(self) -> None:
        """Allow selecting several rows, with Ctrl and Shift."""
        self.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)

    def all_selected(self) -> list[T]:
        """Return the selected rows, in the order shown."""
        indexes = sorted(self.selectionModel().selectedRows(), key=lambda index: index.row())
        return [self._rows.row(self._proxy.mapToSource(index).row()) for index in indexes]

    def selected(self) -> T | None:
        """Return the selected row; None if no row or several rows are selected."""
        rows = self.all_selected()
        return rows[0] if len(rows) == 1 else None

    def show_only(self, words: str) -> None:
        """Show only rows that contain all of these words, in any column and order."""
        # Lookaheads match from the same start, so the order of the words does not matter.
        parts = (f"(?=.*{re.escape(word)})" for word in words.split())
        anywhere = QRegularExpression.PatternOption.CaseInsensitiveOption
        self._proxy.setFilterRegularExpression(QRegularExpression("^" + "".join(parts), anywhere))

    def select(self, key: Any) -> None:
        """Select the row with this key."""
        place = self._rows.place_of(key)
        if place is not None:
            self.clearSelection()  # in a multi-selection, selectRow would add to it
            self.selectRow(self._proxy.mapFromSource(self._rows.index(place, 0)).row())

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        if self._words and not self._proxy.rowCount():
            painter = QPainter(self.viewport())
            painter.setPen(self._theme.palette.color("muted"))
            area = self.viewport().rect().adjusted(CELL_PAD_PX, 0, -CELL_PAD_PX, 0)
            flags = Qt.AlignmentFlag.AlignCenter | Qt.TextFlag.TextWordWrap
            painter.drawText(area, int(flags), self._words)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter) and self.selected() is not None:
            self.opened.emit()
        else:
            super().keyPressEvent(event)

    def _lay_out_columns(self) -> None:
        header = self.horizontalHeader()
        header.setHighlightSections(False)
        header.setMinimumSectionSize(48)
        header.setTextElideMode(Qt.TextElideMode.ElideRight)
        header.setSectionResizeMode(QHeaderView.ResizeMode.Interactive)
        header.sectionResized.connect(self._make_room)
        for number, column in enumerate(self._rows.columns):
            wanted = header.sectionSizeFromContents(number).width()
            self.setColumnWidth(number, max(column.width_px, wanted))

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._share_room()

    def _make_room(self, number: int, old_px: int, new_px: int) -> None:
        # The widths that `_share_room` sets arrive here, too, and must not start it again.
        if not self._rows.columns[number].stretches:
            self._share_room()

    def _share_room(self) -> None:
        """Divide the spare width among the columns that stretch, none below its minimum.

        Qt's own Stretch mode shrinks them to nothing where the other columns need all the width.
        """
        columns = self._rows.columns
        stretching = [number for number, column in enumerate(columns) if column.stretches]
        others = sum(
            self.columnWidth(n) for n, column in enumerate(columns) if not column.stretches
        )
        left = self.viewport().width() - others
        for place, number in enumerate(stretching):
            # A part of what is still left, so that rounding loses no pixel.
            share = left // (len(stretching) - place)
            header = self.horizontalHeader().sectionSizeFromContents(number).width()
            width = max(columns[number].width_px, header, share)
            self.setColumnWidth(number, width)
            left -= width


def make_filter(table: TableView[Any], hint: str) -> QLineEdit:
    """Return an input whose words filter the rows of `table`; `hint` lists the fields searched."""
    field = QLineEdit()
    field.setPlaceholderText("Filter")
    set_tooltip(field, hint)
    field.setAccessibleName(hint)
    field.setClearButtonEnabled(True)
    field.setMaximumWidth(180)
    field.textChanged.connect(table.show_only)
    return field
