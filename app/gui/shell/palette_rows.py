"""Paint a row of the command palette: icon, title with matched letters, note, shortcut."""

from __future__ import annotations

from PySide6.QtCore import QModelIndex, QObject, QPersistentModelIndex, QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QFontMetricsF, QPainter, QTextCharFormat, QTextLayout
from PySide6.QtWidgets import QStyle, QStyledItemDelegate, QStyleOptionViewItem

from app.flows.palette import Entry
from app.gui.kit.theme import Theme

# UserRole + 1 is the default role of QStandardItem.setData, which holds the index of the command.
ENTRY, PLACES = int(Qt.ItemDataRole.UserRole) + 2, int(Qt.ItemDataRole.UserRole) + 3
ROW_PX = 40
PAD_PX, GAP_PX, ICON_PX, KEY_PX = 12, 12, 16, 22

Index = QModelIndex | QPersistentModelIndex


class PaletteRows(QStyledItemDelegate):
    def __init__(self, theme: Theme, parent: QObject) -> None:
        super().__init__(parent)
        self._theme = theme

    def sizeHint(self, option: QStyleOptionViewItem, index: Index) -> QSize:
        return QSize(0, ROW_PX)

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        entry: Entry = index.data(ENTRY)
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        row = QRectF(option.rect)
        if option.state & QStyle.StateFlag.State_Selected:
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(self._theme.palette.color("selected"))
            painter.drawRoundedRect(row, 8, 8)
        row.adjust(PAD_PX, 0, -PAD_PX, 0)
        icon = QRectF(row.left(), row.center().y() - ICON_PX / 2, ICON_PX, ICON_PX)
        self._theme.paint_icon(painter, entry.icon, "muted", icon)
        row.setLeft(icon.right() + GAP_PX)
        row.setRight(self._paint_right(painter, entry, row))
        used = self._paint_title(painter, entry.title, index.data(PLACES), row)
        row.setLeft(row.left() + used + GAP_PX)
        # In less room, an ellipsis is all that would be left of the note.
        if entry.note and row.width() > 24:
            font = self._theme.font(12)
            note = QFontMetricsF(font).elidedText(
                entry.note, Qt.TextElideMode.ElideRight, row.width()
            )
            self._theme.paint_text(painter, row, note, 12, "muted")
        painter.restore()

    def _paint_title(
        self, painter: QPainter, title: str, places: tuple[int, ...], row: QRectF
    ) -> float:
        """Paint the title with the matched letters highlighted; return its width in pixels."""
        font = self._theme.font(13, 500)
        shown = QFontMetricsF(font).elidedText(title, Qt.TextElideMode.ElideRight, row.width())
        # drawText knows one format per call; a layout takes ranges.
        layout = QTextLayout(shown, font)
        match = QTextCharFormat()
        match.setFontWeight(700)
        match.setForeground(self._theme.palette.color("accent"))
        ranges = []
        for place in places:
            one = QTextLayout.FormatRange()
            one.start, one.length, one.format = place, 1, match
            ranges.append(one)
        layout.setFormats(ranges)
        layout.beginLayout()
        line = layout.createLine()
        layout.endLayout()
        painter.setPen(self._theme.palette.color("text"))
        layout.draw(painter, QPointF(row.left(), row.center().y() - line.height() / 2))
        return float(line.naturalTextWidth())

    def _paint_right(self, painter: QPainter, entry: Entry, row: QRectF) -> float:
        """Paint the keys of the shortcut, or the group if it has none; return their left edge."""
        right = row.right()
        if not entry.shortcut:
            width = QFontMetricsF(self._theme.font(12)).horizontalAdvance(entry.group)
            place = QRectF(right - width, row.top(), width, row.height())
            self._theme.paint_text(painter, place, entry.group, 12, "muted")
            return float(place.left() - GAP_PX)
        metrics = QFontMetricsF(self._theme.font(12, 500))
        for key in reversed(entry.shortcut.split("+")):
            width = max(metrics.horizontalAdvance(key) + 12, KEY_PX)
            cap = QRectF(right - width, row.center().y() - KEY_PX / 2, width, KEY_PX)
            painter.setPen(self._theme.palette.color("border_strong"))
            painter.setBrush(self._theme.palette.color("surface"))
            painter.drawRoundedRect(cap.adjusted(0.5, 0.5, -0.5, -0.5), 5, 5)
            inset = (width - metrics.horizontalAdvance(key)) / 2
            self._theme.paint_text(
                painter, cap.adjusted(inset, 0, 0, 0), key, 12, "text", weight=500
            )
            right = cap.left() - 4
        return float(right - GAP_PX)
