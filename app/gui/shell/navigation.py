"""The list of pages on the left of the window."""

from __future__ import annotations

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtWidgets import QButtonGroup, QHBoxLayout, QLabel, QToolButton, QVBoxLayout, QWidget

from app.gui.kit.actions import TEXTS, Actions
from app.gui.kit.primitives import make_label, set_tooltip
from app.gui.kit.theme import Theme

WIDTH_PX = 176
PLACES = ("overview", "nodes", "runs", "artifacts", "data", "settings")


class Navigation(QWidget):
    chosen = Signal(str)

    def __init__(self, theme: Theme, actions: Actions) -> None:
        super().__init__()
        self.setObjectName("navigation")
        # Without it, a plain QWidget ignores the background of the style sheet.
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.setFixedWidth(WIDTH_PX)
        self._theme = theme
        self._mark = QLabel()
        self._group = QButtonGroup(self)
        self.places: dict[str, QToolButton] = {}
        column = QVBoxLayout(self)
        column.setContentsMargins(12, 20, 12, 16)
        column.setSpacing(4)
        brand = QHBoxLayout()
        brand.setContentsMargins(8, 0, 0, 0)
        brand.setSpacing(10)
        brand.addWidget(self._mark)
        brand.addWidget(make_label("Rackless", "brand"), 1)
        column.addLayout(brand)
        column.addSpacing(16)
        for name in PLACES[:-1]:
            column.addWidget(self._make_place(name, actions))
        column.addStretch(1)
        column.addWidget(self._make_place(PLACES[-1], actions))  # at the bottom
        theme.changed.connect(self._paint_icons)
        self._paint_icons()

    def show_place(self, name: str) -> None:
        """Highlight the current page."""
        self.places[name].setChecked(True)
        self._paint_icons()

    def _make_place(self, name: str, actions: Actions) -> QToolButton:
        button = QToolButton()
        button.setObjectName("place")
        button.setText(f"  {TEXTS[name].text}")
        button.setAccessibleName(TEXTS[name].text)
        set_tooltip(button, actions.tip(name))
        button.setCheckable(True)
        button.setIconSize(QSize(18, 18))
        button.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextBesideIcon)
        button.setFixedWidth(WIDTH_PX - 24)
        button.setMinimumHeight(38)
        # A click leaves the focus where it was; only Tab reaches the buttons.
        button.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        button.clicked.connect(lambda: self.chosen.emit(name))
        self._group.addButton(button)
        self.places[name] = button
        return button

    def _paint_icons(self) -> None:
        self._mark.setPixmap(self._theme.pixmap("rackless", "text", 24, self.devicePixelRatioF()))
        for name, button in self.places.items():
            color = "accent" if button.isChecked() else "muted"
            button.setIcon(self._theme.icon(name, color, 18))
