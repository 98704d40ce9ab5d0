"""One row: as a run learns it, or as it is written."""

from __future__ import annotations

from html import escape

from PySide6.QtWidgets import QTabWidget, QVBoxLayout, QWidget

from agents.contract.requests.rows import WholeRow
from app.gui.kit.primitives import make_label
from app.gui.kit.reader import Reader
from app.gui.kit.theme import Theme
from app.gui.new_run.data_view import LEGEND, shown_html
from app.presentation.data_text import spell_out
from app.presentation.rows_text import describe_place, describe_state
from app.text import count_of

_NOTHING = "Choose a row to see what is learned of it."


class RowPane(QWidget):
    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme = theme
        self._row: WholeRow | None = None
        self.title = make_label("", "subheading", wraps=True)
        self.learned = Reader()
        self.learned.setAccessibleName("Row as learned")
        self.raw = Reader()
        self.raw.setAccessibleName("Row as written")
        self.tabs = QTabWidget()
        self.tabs.tabBar().setAccessibleName("Form of the row")
        self.tabs.addTab(self.learned, "As learned")
        self.tabs.addTab(self.raw, "As written")
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 12, 0, 0)
        column.setSpacing(8)
        column.addWidget(self.title)
        column.addWidget(self.tabs, 1)
        theme.changed.connect(self._draw)
        self.show_row(None)

    def show_row(self, row: WholeRow | None) -> None:
        """Show a row; None: none is chosen."""
        self._row = row
        self._draw()

    def _draw(self) -> None:
        row = self._row
        self.title.setVisible(row is not None)
        if row is None:
            self.learned.setPlainText(_NOTHING)
            self.raw.setPlainText("")
            return
        brief = row.brief
        facts = [describe_place(brief)]
        if brief.num_tokens is not None:
            facts.append(f"{count_of(brief.num_tokens, 'token')}, {brief.num_targets:,} learned")
        if state := describe_state(brief):
            facts.append(state)
        self.title.setText(" \u00b7 ".join(facts))
        # As text: a row may hold the mark-up of a stranger.
        self.raw.setPlainText(spell_out(row.raw))
        palette = self._theme.palette
        if row.shown is None:
            text = escape(spell_out(brief.reason or "it has nothing to learn"))
            self.learned.setHtml(f"<p>This row is left out: {text}.</p>")
            return
        # The title above says the rest, but not which answer of a pair is the chosen one.
        is_pair = len(row.shown.conversations) > 1
        text = shown_html((row.shown,), palette, is_titled=is_pair)
        self.learned.setHtml(text + LEGEND.format(palette.good_tint))
