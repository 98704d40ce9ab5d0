"""Numbers of all rows: lengths, shares, reasons of rows that are left out, and files."""

from __future__ import annotations

from PySide6.QtWidgets import QVBoxLayout, QWidget

from agents.contract.requests.rows import DataFigures
from app.gui.data.histogram import Histogram
from app.gui.kit.fact_rows import FactRows
from app.gui.kit.primitives import make_label, make_scroll_area
from app.gui.kit.theme import Theme
from app.presentation.rows_text import describe_figures
from app.text import count_of


class NumbersPane(QWidget):
    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self.facts = FactRows(16, 6)
        self.histogram = Histogram(theme)
        self.reasons = FactRows(16, 6)
        self.sources = FactRows(16, 6)
        self._reasons_title = make_label("Why rows are left out", "subheading")
        self._sources_title = make_label("Files", "subheading")
        body = QWidget()
        body.setObjectName("content")
        column = QVBoxLayout(body)
        column.setContentsMargins(0, 12, 12, 12)
        column.setSpacing(12)
        column.addLayout(self.facts)
        column.addWidget(make_label("Rows with up to this many tokens", "subheading"))
        column.addWidget(self.histogram)
        column.addWidget(self._reasons_title)
        column.addLayout(self.reasons)
        column.addWidget(self._sources_title)
        column.addLayout(self.sources)
        column.addStretch(1)
        outer = QVBoxLayout(self)
        outer.setContentsMargins(0, 0, 0, 0)
        outer.addWidget(make_scroll_area(body))

    def show_figures(self, found: DataFigures, most: int) -> None:
        """Show the numbers; `most` is the length at which rows are cut."""
        self.facts.show_rows(describe_figures(found))
        self.histogram.show_lengths(found.lengths, most)
        self.reasons.show_rows((f"{count:,}", reason) for reason, count in found.reasons.items())
        self._reasons_title.setVisible(bool(found.reasons))
        several = found.sources if len(found.sources) > 1 else ()
        about = "" if found.is_tokenized else "about "
        self.sources.show_rows(
            (
                one.name,
                f"{count_of(one.num_rows, 'row')}, {about}{count_of(one.num_tokens, 'token')}"
                + (f", {one.num_left_out:,} left out" if one.num_left_out else ""),
            )
            for one in several
        )
        self._sources_title.setVisible(bool(several))
