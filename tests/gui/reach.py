"""Can everyone use it? What Tab reaches, what a screen reader is told, and what of a text is cut.

Each check takes the window or dialog of a picture and returns its complaints, one line each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from PySide6.QtCore import QEvent, QPoint, QRect, Qt
from PySide6.QtGui import QAccessible, QHelpEvent
from PySide6.QtTest import QTest
from PySide6.QtWidgets import (
    QAbstractButton,
    QAbstractItemView,
    QAbstractScrollArea,
    QAbstractSpinBox,
    QApplication,
    QComboBox,
    QHeaderView,
    QLabel,
    QLineEdit,
    QPlainTextEdit,
    QProgressBar,
    QScrollBar,
    QStyle,
    QStyleOptionComboBox,
    QTabBar,
    QTableView,
    QTextEdit,
    QToolButton,
    QWidget,
)

from app.gui.charts.plot import Plot
from app.gui.kit.primitives import ElidedLabel
from app.gui.kit.status import StatusPill
from app.gui.logs.log_view import LogView
from app.gui.new_run.plan_view import MemoryBar
from app.gui.overview.card import DeviceCard

CONTROLS = (
    QAbstractButton, QComboBox, QLineEdit, QAbstractSpinBox, QPlainTextEdit, QTextEdit, QTableView,
    QTabBar, Plot, DeviceCard, LogView,
)  # fmt: skip
PAINTED = (Plot, DeviceCard, LogView, MemoryBar, StatusPill, QProgressBar)
MOST_TABS = 400
_WORD = re.compile(r"(?<![\w/.])[A-Za-z]{3,}(?![\w/])")


def describe(widget: QWidget) -> str:
    """Return which widget it is, for a complaint."""
    name = _told(widget) or widget.objectName()
    return f"{type(widget).__name__} '{name}'"


def controls(root: QWidget) -> list[QWidget]:
    """Return what a person can act on now, without the parts that Qt itself makes of them."""
    found = [one for kind in CONTROLS for one in root.findChildren(kind)]
    return [one for one in dict.fromkeys(found) if _is_own(one) and one.isEnabled()]


def _is_own(widget: QWidget) -> bool:
    if not widget.isVisible() or isinstance(widget, (QScrollBar, QHeaderView)):
        return False
    parent = widget.parentWidget()
    inner = (QComboBox, QAbstractSpinBox, QLineEdit, QTabBar, QHeaderView, QAbstractItemView)
    if isinstance(widget, QToolButton) and widget.objectName() == "qt_menubar_ext_button":
        return False
    return not isinstance(parent, inner)


def _told(widget: QWidget) -> str:
    interface = QAccessible.queryAccessibleInterface(widget)
    return interface.text(QAccessible.Text.Name).strip() if interface is not None else ""


def find_unnamed(root: QWidget) -> Iterator[str]:
    """Complain of controls and painted things that a screen reader has no name for."""
    painted = [one for kind in PAINTED for one in root.findChildren(kind) if one.isVisible()]
    for widget in dict.fromkeys([*controls(root), *painted]):
        if not _told(widget):
            parent = widget.parentWidget()
            yield f"no name: {describe(widget)} in {type(parent).__name__}"


def find_unreached(root: QWidget) -> Iterator[str]:
    """Press Tab round the window; complain of controls that never had the focus."""
    root.activateWindow()
    reached: list[QWidget] = []
    at = root.focusWidget() or root
    for _ in range(MOST_TABS):
        QTest.keyClick(at, Qt.Key.Key_Tab)
        now = QApplication.focusWidget()
        if now is None or now in reached:
            break
        reached.append(now)
        at = now
    for widget in controls(root):
        proxied = widget.focusProxy()
        if widget in reached or proxied in reached:
            continue
        if not _shares_group(widget, reached):
            yield f"Tab never reaches {describe(widget)}"


def _shares_group(widget: QWidget, reached: list[QWidget]) -> bool:
    """Tell whether arrow keys lead to it: one of several buttons of which one is chosen."""
    if not isinstance(widget, QAbstractButton):
        return False
    group = widget.group()
    if group is not None and group.exclusive():
        return any(one in reached for one in group.buttons())
    parent = widget.parentWidget()
    return widget.autoExclusive() and any(
        isinstance(one, type(widget)) and one.parentWidget() is parent for one in reached
    )


# ---------------------------------------------------------------- longer texts


def lengthen(text: str) -> str:
    """Return the text as a translation might be: every word 30 % longer; figures stay."""
    return _WORD.sub(lambda word: word[0] + "e" * round(0.3 * len(word[0])), text)


def lengthen_all(root: QWidget) -> None:
    """Make the texts of all widgets longer, in place; column titles and paintings are patched."""
    for label in root.findChildren(QLabel):
        if label.textFormat() == Qt.TextFormat.PlainText and label.text():
            label.setText(lengthen(label.text()))
    for button in root.findChildren(QAbstractButton):
        QAbstractButton.setText(button, lengthen(button.text()))
    for bar in root.findChildren(QTabBar):
        for place in range(bar.count()):
            bar.setTabText(place, lengthen(bar.tabText(place)))
    for box in root.findChildren(QComboBox):
        for place in range(box.count()):
            box.setItemText(place, lengthen(box.itemText(place)))
    for line in root.findChildren(QLineEdit):
        line.setPlaceholderText(lengthen(line.placeholderText()))


def find_cut(root: QWidget) -> Iterator[str]:
    """Complain of texts that do not fit into their place and do not say so."""
    for widget in root.findChildren(QWidget):
        if not widget.isVisible() or not widget.width():
            continue
        if isinstance(widget, QLabel) and widget.text() and not isinstance(widget, ElidedLabel):
            yield from _cut_label(widget)
        elif isinstance(widget, QAbstractButton) and widget.text():
            wanted = widget.sizeHint().width()
            if wanted > widget.width() + 1:
                yield f"{wanted - widget.width()} px too narrow: {describe(widget)}"
        elif isinstance(widget, QTabBar) and widget.count():
            wanted = sum(widget.tabRect(place).width() for place in range(widget.count()))
            if wanted > widget.width():
                yield f"{wanted - widget.width()} px too narrow: tabs '{widget.tabText(0)}'..."
        elif isinstance(widget, QComboBox):
            yield from _cut_combo(widget)
        elif isinstance(widget, QLineEdit) and not isinstance(widget.parent(), QAbstractSpinBox):
            yield from _cut_line(widget)
        elif isinstance(widget, QTableView):
            yield from _cut_header(widget)
        if _is_text(widget):
            yield from _hidden_part(widget, root)


def _is_text(widget: QWidget) -> bool:
    kinds = (QLabel, QAbstractButton, QComboBox, QLineEdit, StatusPill)
    return isinstance(widget, kinds) and _is_own(widget)


def _cut_label(label: QLabel) -> Iterator[str]:
    room = label.contentsRect()
    if label.wordWrap():
        wanted = label.heightForWidth(label.width())
        if wanted > label.height() + 1:
            yield f"{wanted - label.height()} px too low: label '{label.text()[:60]}'"
        widest = max(map(label.fontMetrics().horizontalAdvance, label.text().split()), default=0)
        if widest > room.width() + 1:
            yield f"a word is too wide: label '{label.text()[:60]}'"
    elif label.sizeHint().width() > label.width() + 1:
        wanted = label.sizeHint().width() - label.width()
        yield f"{wanted} px too narrow: label '{label.text()[:60]}'"


def _cut_combo(box: QComboBox) -> Iterator[str]:
    option = QStyleOptionComboBox()
    box.initStyleOption(option)
    room = box.style().subControlRect(
        QStyle.ComplexControl.CC_ComboBox, option, QStyle.SubControl.SC_ComboBoxEditField, box
    )
    wanted = box.fontMetrics().horizontalAdvance(box.currentText())
    if (
        wanted > room.width() + 1
        and not box.isEditable()
        and box.currentText() not in box.toolTip()
    ):
        yield f"{wanted - room.width()} px too narrow: choice '{box.currentText()[:60]}'"


def _cut_line(line: QLineEdit) -> Iterator[str]:
    wanted = line.fontMetrics().horizontalAdvance(line.placeholderText())
    room = line.width() - 24
    if not line.text() and wanted > room and line.placeholderText() not in line.toolTip():
        yield f"{wanted - room} px too narrow: placeholder '{line.placeholderText()[:60]}'"


def _cut_header(table: QTableView) -> Iterator[str]:
    header = table.horizontalHeader()
    is_elided = header.textElideMode() != Qt.TextElideMode.ElideNone
    for number in range(header.count()):
        title = str(table.model().headerData(number, Qt.Orientation.Horizontal) or "")
        tip = table.model().headerData(
            number, Qt.Orientation.Horizontal, Qt.ItemDataRole.ToolTipRole
        )
        wanted = header.sectionSizeFromContents(number).width()
        if header.isSectionHidden(number) or wanted <= header.sectionSize(number) + 1:
            continue
        if not is_elided or title not in str(tip):
            lack = wanted - header.sectionSize(number)
            yield f"{lack} px too narrow: column '{title}' of {table.accessibleName()}"


def _hidden_part(widget: QWidget, root: QWidget) -> Iterator[str]:
    """Complain where a parent cuts the widget off; what can be scrolled to is there."""
    area, at = QRect(QPoint(), widget.size()), widget
    while at is not root and at.parentWidget() is not None:
        area.translate(at.pos())
        at = at.parentWidget()
        if isinstance(at.parentWidget(), QAbstractScrollArea):
            scroll = at.parentWidget()
            bar = scroll.horizontalScrollBar()
            if area.right() > at.width() and bar.maximum() == bar.minimum():
                yield f"beyond the edge: {describe(widget)} by {area.right() - at.width()} px"
            return
        if not at.rect().adjusted(-1, -1, 1, 1).contains(area):
            yield f"outside of {type(at).__name__}: {describe(widget)} {area} in {at.rect()}"
            return


def tooltip_of(widget: QWidget, at: QPoint) -> bool:
    """Ask for the tooltip at a point, as a resting mouse does."""
    event = QHelpEvent(QEvent.Type.ToolTip, at, widget.mapToGlobal(at))
    return QApplication.sendEvent(widget, event)
