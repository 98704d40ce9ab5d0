"""Labels, buttons and small helpers that every page is built from."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape
from typing import Protocol

from PySide6.QtCore import QPoint, QSize, Qt
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
    QToolTip,
    QVBoxLayout,
    QWidget,
)

from app.gui.kit.theme import Theme
from app.text import BREAK, let_break, show_foreign

MAX_TIP_LINE_CHARS = 100
"""Maximum length of a tooltip on one line, in characters; a longer one wraps."""


class WrappedLabel(QLabel):
    """A word-wrapped label that keeps its full height in any layout.

    QLabel reports a minimum height for its preferred width, so a narrow layout cuts the last line;
    this one reports the height for the width it really got. Long words, such as paths, may break
    anywhere, so that they widen no window; `text` and the clipboard get them without the breaks.
    """

    # Width given by the layout, in pixels; 0 before the first layout.
    _room_px = 0

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self.setText(text)

    def setText(self, text: str) -> None:
        self._text = show_foreign(text, keep="\n")
        super().setText(let_break(self._text))

    def text(self) -> str:
        return self._text

    def selectedText(self) -> str:
        return super().selectedText().replace(BREAK, "")

    def keyPressEvent(self, event: QKeyEvent) -> None:
        # QLabel's own copy would put the break characters on the clipboard.
        if event.matches(QKeySequence.StandardKey.Copy) and self.hasSelectedText():
            self._copy()
        else:
            super().keyPressEvent(event)

    def contextMenuEvent(self, event: QContextMenuEvent) -> None:
        if not self.textInteractionFlags() & Qt.TextInteractionFlag.TextSelectableByMouse:
            super().contextMenuEvent(event)
            return
        menu = QMenu(self)
        # A popup menu is not deleted by closing it.
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.addAction("Copy", self._copy).setEnabled(self.hasSelectedText())
        # The selection counts the break characters that are shown, not those of `text`.
        whole = len(let_break(self._text))
        menu.addAction("Select all", lambda: self.setSelection(0, whole))
        menu.popup(event.globalPos())

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        super().mouseReleaseEvent(event)
        # X11 and Wayland paste the selection with the middle button.
        if self.hasSelectedText() and QGuiApplication.clipboard().supportsSelection():
            self._copy(QClipboard.Mode.Selection)

    def _copy(self, mode: QClipboard.Mode = QClipboard.Mode.Clipboard) -> None:
        QGuiApplication.clipboard().setText(self.selectedText(), mode)

    # For a label of fixed width, QLabel's own hint belongs to a width of its choosing.
    def sizeHint(self) -> QSize:
        is_fixed = self.minimumWidth() == self.maximumWidth()
        width = self.minimumWidth()
        return QSize(width, self.heightForWidth(width)) if is_fixed else super().sizeHint()

    def minimumSizeHint(self) -> QSize:
        minimum = super().minimumSizeHint()
        if not self._room_px:
            return minimum
        return QSize(minimum.width(), self.heightForWidth(self._room_px))

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        if self._room_px != self.width():
            # The minimum height depends on the width, so the layout has to ask again.
            self._room_px = self.width()
            self.updateGeometry()


class PlainLabel(QLabel):
    """A label for foreign text: shows HTML literally, and invisible characters as escapes."""

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self.setTextFormat(Qt.TextFormat.PlainText)
        self.setText(text)

    def setText(self, text: str) -> None:
        super().setText(show_foreign(text, keep="\n"))


def make_label(text: str = "", role: str = "", *, wraps: bool = False) -> QLabel:
    """Return a plain-text label; `role` is a name in window.qss such as `title` or `caption`."""
    label = WrappedLabel(text) if wraps else PlainLabel(text)
    # Foreign names and messages may look like HTML, which Qt would render.
    label.setTextFormat(Qt.TextFormat.PlainText)
    label.setObjectName(role)
    label.setWordWrap(wraps)
    return label


def make_selectable(label: QLabel) -> QLabel:
    """Make the text of a label selectable with mouse and keyboard."""
    label.setTextInteractionFlags(
        Qt.TextInteractionFlag.TextSelectableByMouse
        | Qt.TextInteractionFlag.TextSelectableByKeyboard
    )
    return label


class ElidedLabel(PlainLabel):
    """One line, elided if it does not fit; the tooltip then shows the whole text."""

    def __init__(self, text: str = "", role: str = "") -> None:
        super().__init__(text)
        self.setObjectName(role)
        # Ignored: the full width of the text must not widen the layout.
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        text = self.fontMetrics().elidedText(
            self.text(), Qt.TextElideMode.ElideRight, self.contentsRect().width()
        )
        # Only when painting is the width known that decides this.
        set_tooltip(self, self.text() if text != self.text() else "")
        painter.setPen(self.palette().color(self.foregroundRole()))
        painter.drawText(self.contentsRect(), int(self.alignment()), text)

    def minimumSizeHint(self) -> QSize:
        return QSize(24, super().minimumSizeHint().height())


def make_tooltip(text: str) -> str:
    """Return `text` so that a tooltip shows it literally, wrapped where it is long.

    Qt renders text that contains a tag or an entity as HTML, and never wraps plain text.

    >>> make_tooltip("the <b> of Q&A")
    '<p style="white-space:pre-wrap">the &lt;b&gt; of Q&amp;A</p>'
    """
    text = show_foreign(text, keep="\n\t")
    if len(text) <= MAX_TIP_LINE_CHARS and not {"<", "&"} & set(text):
        return text
    return f'<p style="white-space:pre-wrap">{escape(text)}</p>'


class HasToolTip(Protocol):
    """A widget, an action or a tray icon."""

    def setToolTip(self, tip: str, /) -> None: ...


def set_tooltip(target: HasToolTip, text: str) -> None:
    """Set the tooltip of a widget or an action; every tooltip is set by this function.

    Text of others may contain tags, and Qt would read the file of an image that one names.
    """
    target.setToolTip(make_tooltip(text))


def show_tooltip(place: QPoint, text: str, widget: QWidget) -> None:
    """Show a tooltip at once, such as that of a painted part of a widget."""
    QToolTip.showText(place, make_tooltip(text), widget)


def escape_mnemonic(text: str) -> str:
    """Return `text` for a menu: on one line, with each `&` doubled.

    A single one marks the access key, and a tab begins the column of shortcuts.

    >>> escape_mnemonic("Q&A")
    'Q&&A'
    """
    return show_foreign(text).replace("&", "&&")


def plain_for_desktop(text: str) -> str:
    """Return `text` for notifications and the tray, without a tag or an entity.

    Desktops of Linux take it for HTML, and would load the images that it names.

    >>> plain_for_desktop("<img src='x'> Q&amp;A").isascii(), plain_for_desktop("Q & A")
    (False, 'Q & A')
    """
    text = show_foreign(text, keep="\n").replace("<", "\u2039").replace(">", "\u203a")
    # Only what would be an entity; a lone ampersand is shown by all of them.
    return re.sub(r"&(?=#?\w+;)", "\uff06", text)


def make_separator(*, upright: bool = False) -> QFrame:
    """Return a one-pixel line."""
    rule = QFrame()
    rule.setObjectName("upright" if upright else "rule")
    return rule


def make_panel() -> QFrame:
    """Return a frame with the background and border of a panel."""
    panel = QFrame()
    panel.setObjectName("panel")
    return panel


def make_scroll_area(content: QWidget) -> QScrollArea:
    """Return `content` in an area that scrolls vertically, never horizontally."""
    scroll = QScrollArea()
    scroll.setWidgetResizable(True)
    scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
    # Tab goes to the content; the area itself would be an extra stop without a function.
    scroll.setFocusPolicy(Qt.FocusPolicy.NoFocus)
    scroll.setFrameShape(QFrame.Shape.NoFrame)
    scroll.setWidget(content)
    return scroll


class Button(QPushButton):
    """A push button whose icon follows the theme; `role` is a name in window.qss."""

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
        set_tooltip(self, tip)
        self.clicked.connect(lambda: pressed())
        if icon:
            self.setIconSize(QSize(16, 16))
            theme.changed.connect(self._paint_icon)
            self._paint_icon()

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:
        """Ignore the second click on a main button: the first may have opened a widget there."""
        if self.objectName() == "primary":
            event.accept()
        else:
            super().mouseDoubleClickEvent(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() not in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            super().keyPressEvent(event)
        elif not event.isAutoRepeat():  # a held key acts once
            self.click()  # outside of a dialog, only some desktops let Enter press a button

    def setText(self, text: str) -> None:
        """Set the label, with a space between it and the icon."""
        text = show_foreign(text)
        super().setText(f" {text}" if self._icon else text)
        self.setAccessibleName(text)

    def _paint_icon(self) -> None:
        colors = {"primary": "on_accent", "danger": "error", "link": "accent"}
        color = colors.get(self.objectName(), "text")
        self.setIcon(self._theme.icon(self._icon, color, 16))


class IconButton(QToolButton):
    """A button that shows only an icon; its name is the tooltip."""

    def __init__(self, theme: Theme, icon: str, name: str, pressed: Callable[[], object]) -> None:
        super().__init__()
        set_tooltip(self, name)
        self.setAccessibleName(name)
        # A click leaves the focus where the user is typing.
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        self.setIconSize(QSize(16, 16))
        self.clicked.connect(lambda: pressed())
        self._theme, self._icon = theme, icon
        theme.changed.connect(self._paint_icon)
        self._paint_icon()

    def _paint_icon(self) -> None:
        self.setIcon(self._theme.icon(self._icon, "muted", 16))


def make_dialog_buttons(theme: Theme, dialog: QDialog, action: QWidget) -> QHBoxLayout:
    """Return the bottom row of a dialog: Cancel, then `action` as the default button."""
    row = QHBoxLayout()
    row.setSpacing(8)
    row.addStretch(1)
    row.addWidget(Button(theme, "Cancel", dialog.reject))
    row.addWidget(action)
    if isinstance(action, QPushButton):
        action.setDefault(True)
    return row


def set_style_property(widget: QWidget, name: str, value: object) -> None:
    """Set a property that window.qss selects on, and re-apply the style.

    Qt evaluates property selectors only when a widget is polished.
    """
    if widget.property(name) == value:
        return
    widget.setProperty(name, value)
    widget.style().unpolish(widget)
    widget.style().polish(widget)


def copy_to_clipboard(text: str) -> None:
    """Put `text` on the clipboard."""
    QGuiApplication.clipboard().setText(text)


def set_page_margins(layout: QVBoxLayout | QHBoxLayout, widget: QWidget) -> None:
    """Style `widget` as a page, and set its margins and spacing."""
    widget.setObjectName("page")
    # Without it, a plain QWidget ignores the background of the style sheet.
    widget.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
    layout.setContentsMargins(24, 20, 24, 20)
    layout.setSpacing(16)
