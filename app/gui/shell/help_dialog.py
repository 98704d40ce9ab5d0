"""The troubleshooting page: a search field, the symptoms, and the section of the selected one."""

from __future__ import annotations

from PySide6.QtCore import Qt, QTimer
from PySide6.QtWidgets import (
    QAbstractItemView,
    QDialog,
    QHBoxLayout,
    QLineEdit,
    QSplitter,
    QVBoxLayout,
    QWidget,
)

from app.gui.kit.markdown_view import MarkdownView
from app.gui.kit.primitives import Button, make_label
from app.gui.kit.theme import Theme
from app.gui.tables.rows_model import Column, RowsModel
from app.gui.tables.view import TableView
from app.troubleshooting import Section, find_section, read_sections, search_sections

WIDTH_PX, HEIGHT_PX = 980, 620
LIST_PX = 400
SEARCH_MS = 120
"""Pause in typing after which the page is searched, in milliseconds."""


class HelpDialog(QDialog):
    """Not modal: the user reads it next to the page that has the problem."""

    def __init__(self, theme: Theme, parent: QWidget) -> None:
        super().__init__(parent)
        self.setWindowTitle("Troubleshooting")
        self.resize(WIDTH_PX, HEIGHT_PX)
        self._order: dict[str, int] = {}
        self.field = QLineEdit()
        self.field.setPlaceholderText("Search, such as: out of memory")
        self.field.setAccessibleName("Search the troubleshooting page")
        self.field.setClearButtonEnabled(True)
        self._pause = QTimer(self, interval=SEARCH_MS, singleShot=True)
        self._pause.timeout.connect(self._search)
        self.field.textChanged.connect(lambda text: self._pause.start())
        self.field.returnPressed.connect(self._search)
        self.model: RowsModel[Section] = RowsModel(
            [
                Column(
                    title="Problem",
                    text=lambda section: section.title,
                    sort=lambda section: self._order.get(section.topic, 0),
                    stretches=True,
                ),
            ],
            key=lambda section: section.topic,
        )
        self.table = TableView(theme, self.model, "Problems")
        self.table.horizontalHeader().hide()  # one column, in the order of the page
        self.table.chosen.connect(self._show_selected)
        self.reader = MarkdownView()
        self.reader.setAccessibleName("Explanation")
        self._lay_out(theme)
        self._search()
        self.field.setFocus()

    def open_topic(self, topic: str) -> None:
        """Show the section with this topic; the whole list stays visible."""
        self.field.clear()
        self._search()
        section = find_section(topic)
        if section is not None:
            self.table.select(section.topic)
            # Deferred by one turn: a list that was never shown has no height yet.
            QTimer.singleShot(0, self, self._centre)

    def _centre(self) -> None:
        middle = QAbstractItemView.ScrollHint.PositionAtCenter
        self.table.scrollTo(self.table.currentIndex(), middle)

    def _lay_out(self, theme: Theme) -> None:
        left = QWidget()
        column = QVBoxLayout(left)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(8)
        column.addWidget(self.field)
        column.addWidget(self.table, 1)
        split = QSplitter(Qt.Orientation.Horizontal)
        split.addWidget(left)
        split.addWidget(self.reader)
        split.setChildrenCollapsible(False)
        split.setHandleWidth(16)
        split.setSizes([LIST_PX, WIDTH_PX - LIST_PX])
        foot = QHBoxLayout()
        caption = "In a terminal: rackless help WORDS"
        foot.addWidget(make_label(caption, "caption"), 1)
        # No default button: Enter in the search field must not close the dialog.
        close = Button(theme, "Close", self.accept)
        close.setAutoDefault(False)
        foot.addWidget(close)
        whole = QVBoxLayout(self)
        whole.setContentsMargins(24, 20, 24, 20)
        whole.setSpacing(12)
        whole.addWidget(split, 1)
        whole.addLayout(foot)

    def _search(self) -> None:
        self._pause.stop()
        words = self.field.text().strip()
        found = search_sections(words) if words else read_sections()
        self._order = {section.topic: number for number, section in enumerate(found)}
        self.model.reset(found)
        self.table.sort_by("Problem", Qt.SortOrder.AscendingOrder)
        self.table.say_when_empty(f"Nothing on this page has: {words}\nTry fewer words.")
        if found:
            self.table.select(found[0].topic)
        self._show_selected()

    def _show_selected(self) -> None:
        section = self.table.selected()
        if section is None:
            self.reader.clear()
            return
        self.reader.show_markdown(f"## {section.title}\n\n{section.text}")
