"""The command palette: a search field with its results, made for the keyboard.

It is a child widget of the window and not a popup, so that no window manager decides where it is
placed or which of the two has the keyboard focus.
"""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import (
    QEvent,
    QModelIndex,
    QObject,
    QPersistentModelIndex,
    QPointF,
    QRectF,
    QSize,
    Qt,
)
from PySide6.QtGui import (
    QColor,
    QFontMetricsF,
    QKeyEvent,
    QPainter,
    QPaintEvent,
    QResizeEvent,
    QStandardItem,
    QStandardItemModel,
    QTextCharFormat,
    QTextLayout,
)
from PySide6.QtWidgets import (
    QAbstractItemView,
    QApplication,
    QLineEdit,
    QListView,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QVBoxLayout,
    QWidget,
)

from app.flows.palette import PaletteEntry, find_entries
from app.gui.kit.primitives import ElidedLabel
from app.gui.kit.theme import Theme
from app.gui.shell.command import Command

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
        entry: PaletteEntry = index.data(ENTRY)
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

    def _paint_right(self, painter: QPainter, entry: PaletteEntry, row: QRectF) -> float:
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


WIDTH_PX = 640
TOP_PX = 72
SHADOW_PX = 16
RADIUS_PX = 12
MAX_ROWS = 9
_LIST_KEYS = (Qt.Key.Key_Up, Qt.Key.Key_Down, Qt.Key.Key_PageUp, Qt.Key.Key_PageDown)


class CommandPalette(QWidget):
    def __init__(self, theme: Theme, window: QWidget) -> None:
        super().__init__(window)
        self.setObjectName("palette")
        self.setAccessibleName("Command palette")
        self._theme, self._window = theme, window
        self._commands: Sequence[Command] = ()
        self._before: QWidget | None = None
        self.field = QLineEdit()
        self.field.setObjectName("palette")
        self.field.setPlaceholderText("Search actions, pages, runs and nodes")
        self.field.setAccessibleName("Search actions, pages, runs and nodes")
        # Not textChanged: `open_with` clears the field and searches by itself.
        self.field.textEdited.connect(self._search)
        self.field.installEventFilter(self)
        self.model = QStandardItemModel(self)
        self.list = QListView()
        self.list.setObjectName("palette")
        self.list.setAccessibleName("Results")
        self.list.setModel(self.model)
        self.list.setItemDelegate(PaletteRows(theme, self.list))
        # The focus stays on the field, so that the user can keep typing after an arrow key.
        self.list.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.list.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        self.list.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        # All rows have one height, so Qt need not measure each of them.
        self.list.setUniformItemSizes(True)
        self.list.clicked.connect(lambda index: self._act())
        self._nothing = ElidedLabel("", "muted")
        self._nothing.setContentsMargins(10, 0, 10, 10)
        column = QVBoxLayout(self)
        column.setContentsMargins(*(SHADOW_PX + 8 for _ in range(4)))
        column.setSpacing(6)
        column.addWidget(self.field)
        column.addWidget(self.list)
        column.addWidget(self._nothing)
        # No layout of the window holds it, so it follows the window's size by itself.
        window.installEventFilter(self)
        self.hide()

    def open_with(self, commands: Sequence[Command]) -> None:
        """Open the palette with an empty search over `commands`; close it if it is open."""
        if self.isVisible():
            self.leave()
            return
        self._commands = commands
        self._before = QApplication.focusWidget()
        self.field.clear()
        self._search("")
        self.show()
        self.raise_()
        self.field.setFocus()

    def leave(self) -> None:
        """Close, and return the focus to the widget that had it."""
        before, self._before = self._before, None
        self.hide()
        if before is not None and before.isVisible():
            before.setFocus()

    def titles(self) -> list[str]:
        """Return the titles of the results, from the top."""
        return [self.model.item(row).text() for row in range(self.model.rowCount())]

    # ------------------------------------------------------------ keys

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if watched is self.field:
            if event.type() == QEvent.Type.FocusOut and self.isVisible():
                self.leave_if_elsewhere()
            if isinstance(event, QKeyEvent) and event.type() == QEvent.Type.KeyPress:
                return self._take_key(event)
            if isinstance(event, QKeyEvent) and event.type() == QEvent.Type.ShortcutOverride:
                if event.key() != Qt.Key.Key_Escape:
                    return False
                event.accept()  # or the window's Escape shortcut would get it
                return True
        elif isinstance(event, QResizeEvent) and self.isVisible():
            self._place()
        return super().eventFilter(watched, event)

    def leave_if_elsewhere(self) -> None:
        """Close if the focus moved within the window; stay open if it moved to another window."""
        focused = QApplication.focusWidget()
        if focused is not None and focused is not self.field:
            # The user chose where the focus goes: do not take it back.
            self._before = None
            self.hide()

    def _take_key(self, event: QKeyEvent) -> bool:
        if event.key() == Qt.Key.Key_Escape:
            self.leave()
        elif event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            self._act()
        elif event.key() in _LIST_KEYS:
            self._move(event)
        else:
            # Tab is swallowed: it would move the focus away, which closes the palette.
            return event.key() in (Qt.Key.Key_Tab, Qt.Key.Key_Backtab)
        return True

    def _move(self, event: QKeyEvent) -> None:
        last = self.model.rowCount() - 1
        row = self.list.currentIndex().row()
        # The list itself would stop at its ends.
        if event.key() == Qt.Key.Key_Down and row == last:
            self._choose(0)
        elif event.key() == Qt.Key.Key_Up and row <= 0:
            self._choose(last)
        else:
            QApplication.sendEvent(self.list, event)
            self._announce_row()

    # ------------------------------------------------------------ rows

    def _search(self, text: str) -> None:
        self.model.clear()
        entries = [command.entry for command in self._commands]
        for found in find_entries(entries, text):
            entry = entries[found.index]
            item = QStandardItem(entry.title)
            item.setData(entry, ENTRY)
            item.setData(found.places, PLACES)
            item.setData(found.index)
            spoken = (entry.title, entry.group, entry.note, entry.shortcut)
            item.setData(
                ", ".join(part for part in spoken if part), Qt.ItemDataRole.AccessibleTextRole
            )
            self.model.appendRow(item)
        rows = self.model.rowCount()
        self._nothing.setText(f"No results for \u201c{text.strip()}\u201d")
        self._nothing.setVisible(not rows)
        self.list.setVisible(bool(rows))
        self.list.setFixedHeight(min(rows, MAX_ROWS) * ROW_PX + 2)
        self._choose(0)
        self._place()

    def _choose(self, row: int) -> None:
        self.list.setCurrentIndex(self.model.index(row, 0))
        self._announce_row()

    def _announce_row(self) -> None:
        """Announce the row that Enter would choose, as the focus stays on the field."""
        index = self.list.currentIndex()
        row = index.data(Qt.ItemDataRole.AccessibleTextRole) if index.isValid() else "nothing"
        self.field.setAccessibleDescription(f"Enter: {row}")

    def _act(self) -> None:
        index: QModelIndex | QPersistentModelIndex = self.list.currentIndex()
        if index.isValid():
            command = self._commands[self.model.item(index.row()).data()]
            self.leave()
            command.act()  # after leaving: it may open a dialog, which takes the focus

    def _place(self) -> None:
        width = min(WIDTH_PX, self._window.width() - 48) + 2 * SHADOW_PX
        self.setFixedWidth(width)
        self.adjustSize()
        self.move((self._window.width() - width) // 2, TOP_PX - SHADOW_PX)

    def paintEvent(self, event: QPaintEvent) -> None:
        """Paint background and shadow; a QGraphicsEffect would blur again on every frame."""
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        ground = QRectF(self.rect()).adjusted(SHADOW_PX, SHADOW_PX, -SHADOW_PX, -SHADOW_PX)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QColor(0, 0, 0, 5))
        # Faint layers add up to a soft edge.
        for wide in range(SHADOW_PX, 0, -2):
            grown = ground.adjusted(-wide, 4 - wide, wide, wide)
            painter.drawRoundedRect(grown, RADIUS_PX + wide, RADIUS_PX + wide)
        painter.setPen(self._theme.palette.color("border_strong"))
        painter.setBrush(self._theme.palette.color("surface"))
        painter.drawRoundedRect(ground.adjusted(0.5, 0.5, -0.5, -0.5), RADIUS_PX, RADIUS_PX)
