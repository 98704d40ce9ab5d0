"""Labels, buttons and rules in the house look."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from PySide6.QtCore import QSize, Qt
from PySide6.QtGui import (
    QClipboard,
    QContextMenuEvent,
    QGuiApplication,
    QKeyEvent,
    QKeySequence,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QResizeEvent,
)
from PySide6.QtWidgets import (
    QDialog,
    QFrame,
    QHBoxLayout,
    QLabel,
    QMenu,
    QPushButton,
    QScrollArea,
    QSizePolicy,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.gui.kit.theme import Theme
from app.text import BREAK, let_break

MAX_TIP_LINE_CHARS = 100
"""Characters of a tooltip that fit into one line."""


class WrappedLabel(QLabel):
    """Words on as many lines as they need; a layout that is short of room never cuts the last.

    A long word, such as a path, is broken, so that it makes no window wider. What a person copies,
    and what `text` returns, has no breaks in it.
    """

    _room_px = 0
    """Width that a layout gave; 0: none did yet."""

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self.setText(text)

    def setText(self, text: str) -> None:
        self._text = text
        super().setText(let_break(text))

    def text(self) -> str:
        return self._text

    def selectedText(self) -> str:
        return super().selectedText().replace(BREAK, "")

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.matches(QKeySequence.StandardKey.Copy) and self.hasSelectedText():
            self._copy()
        else:
            super().keyPressEvent(event)

    def contextMenuEvent(self, event: QContextMenuEvent) -> None:
        if not self.textInteractionFlags() & Qt.TextInteractionFlag.TextSelectableByMouse:
            super().contextMenuEvent(event)
            return
        menu = QMenu(self)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.addAction("Copy", self._copy).setEnabled(self.hasSelectedText())
        whole = len(let_break(self._text))
        menu.addAction("Select all", lambda: self.setSelection(0, whole))
        menu.popup(event.globalPos())

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        super().mouseReleaseEvent(event)
        if self.hasSelectedText() and QGuiApplication.clipboard().supportsSelection():
            self._copy(QClipboard.Mode.Selection)

    def _copy(self, mode: QClipboard.Mode = QClipboard.Mode.Clipboard) -> None:
        QGuiApplication.clipboard().setText(self.selectedText(), mode)

    def sizeHint(self) -> QSize:
        is_fixed = self.minimumWidth() == self.maximumWidth()
        width = self.minimumWidth()
        return QSize(width, self.heightForWidth(width)) if is_fixed else super().sizeHint()

    def minimumSizeHint(self) -> QSize:
        least = super().minimumSizeHint()
        if not self._room_px:
            return least
        return QSize(least.width(), self.heightForWidth(self._room_px))

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        if self._room_px != self.width():
            self._room_px = self.width()
            self.updateGeometry()


def make_label(text: str = "", role: str = "", *, wraps: bool = False) -> QLabel:
    """Return a label; `role` is a name in window.qss such as `title` or `caption`."""
    label = WrappedLabel(text) if wraps else QLabel(text)
    label.setTextFormat(Qt.TextFormat.PlainText)
    label.setObjectName(role)
    label.setWordWrap(wraps)
    return label


def make_selectable(label: QLabel) -> QLabel:
    """Let a person mark and copy the text of a label, with the keyboard too."""
    label.setTextInteractionFlags(
        Qt.TextInteractionFlag.TextSelectableByMouse
        | Qt.TextInteractionFlag.TextSelectableByKeyboard
    )
    return label


class ElidedLabel(QLabel):
    """One line that ends in dots where room is short, with the whole text as tooltip."""

    def __init__(self, text: str = "", role: str = "") -> None:
        super().__init__(text)
        self.setObjectName(role)
        self.setTextFormat(Qt.TextFormat.PlainText)
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        text = self.fontMetrics().elidedText(
            self.text(), Qt.TextElideMode.ElideRight, self.contentsRect().width()
        )
        self.setToolTip(make_tooltip(self.text()) if text != self.text() else "")
        painter.setPen(self.palette().color(self.foregroundRole()))
        painter.drawText(self.contentsRect(), int(self.alignment()), text)

    def minimumSizeHint(self) -> QSize:
        return QSize(24, super().minimumSizeHint().height())


def make_tooltip(text: str) -> str:
    """Return a text as a tooltip shows it as it is, on as many lines as it needs.

    Qt takes one with a tag for HTML, and any other for a single line, however long.

    >>> plain_tip("the <b> of Q&A")
    '<p style="white-space:pre-wrap">the &lt;b&gt; of Q&amp;A</p>'
    """
    if len(text) <= MAX_TIP_LINE_CHARS and "<" not in text:
        return text
    return f'<p style="white-space:pre-wrap">{escape(text)}</p>'


def escape_mnemonic(text: str) -> str:
    """Return a text as an entry of a menu shows it whole: `&` marks a key there.

    >>> plain_action("Q&A")
    'Q&&A'
    """
    return text.replace("&", "&&")


def make_separator(*, upright: bool = False) -> QFrame:
    """Return a hairline."""
    rule = QFrame()
    rule.setObjectName("upright" if upright else "rule")
    return rule


def make_panel() -> QFrame:
    """Return a surface with a border."""
    panel = QFrame()
    panel.setObjectName("panel")
    return panel


def make_scroll_area(content: QWidget) -> QScrollArea:
    """Return the content in what scrolls upright where it is too tall."""
    scroll = QScrollArea()
    scroll.setWidgetResizable(True)
    scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
    scroll.setFocusPolicy(Qt.FocusPolicy.NoFocus)
    scroll.setFrameShape(QFrame.Shape.NoFrame)
    scroll.setWidget(content)
    return scroll


class Button(QPushButton):
    """A button whose icon follows the theme."""

    def __init__(
        self,
        theme: Theme,
        text: str,
        pressed: Callable[[], object],
        *,
        icon: str = "",
        role: str = "",
        tip: str = "",
    ) -> None:
        super().__init__()
        self._theme, self._icon = theme, icon
        self.setText(text)
        self.setObjectName(role)
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.setToolTip(tip)
        self.clicked.connect(lambda: pressed())
        if icon:
            self.setIconSize(QSize(16, 16))
            theme.changed.connect(self._paint_icon)
            self._paint_icon()

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:
        """Do the main deed of a step once: a second press would be for what comes after it."""
        if self.objectName() == "primary":
            event.accept()
        else:
            super().mouseDoubleClickEvent(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.isAutoRepeat() and event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            event.accept()  # a key that is held does a deed once
        else:
            super().keyPressEvent(event)

    def setText(self, text: str) -> None:
        """Set the words, a little away from the icon."""
        super().setText(f" {text}" if self._icon else text)
        self.setAccessibleName(text)

    def _paint_icon(self) -> None:
        colors = {"primary": "on_accent", "danger": "error", "link": "accent"}
        color = colors.get(self.objectName(), "text")
        self.setIcon(self._theme.icon(self._icon, color, 16))


class IconButton(QToolButton):
    """A button of an icon alone; its tooltip is its name."""

    def __init__(self, theme: Theme, icon: str, name: str, pressed: Callable[[], object]) -> None:
        super().__init__()
        self.setToolTip(name)
        self.setAccessibleName(name)
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        self.setIconSize(QSize(16, 16))
        self.clicked.connect(lambda: pressed())
        self._theme, self._icon = theme, icon
        theme.changed.connect(self._paint_icon)
        self._paint_icon()

    def _paint_icon(self) -> None:
        self.setIcon(self._theme.icon(self._icon, "muted", 16))


def make_dialog_buttons(theme: Theme, dialog: QDialog, action: QWidget) -> QHBoxLayout:
    """Return the last row of a dialog: Cancel, and the action."""
    row = QHBoxLayout()
    row.setSpacing(8)
    row.addStretch(1)
    row.addWidget(Button(theme, "Cancel", dialog.reject))
    row.addWidget(action)
    if isinstance(action, QPushButton):
        action.setDefault(True)
    return row


def set_style_property(widget: QWidget, name: str, value: object) -> None:
    """Set a property that window.qss selects on, and apply the style anew."""
    if widget.property(name) == value:
        return
    widget.setProperty(name, value)
    widget.style().unpolish(widget)
    widget.style().polish(widget)


def copy_to_clipboard(text: str) -> None:
    """Put a text on the clipboard."""
    QGuiApplication.clipboard().setText(text)


def set_page_margins(layout: QVBoxLayout | QHBoxLayout, widget: QWidget) -> None:
    """Give a page its outer room."""
    widget.setObjectName("page")
    widget.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
    layout.setContentsMargins(24, 20, 24, 20)
    layout.setSpacing(16)
