"""The stages of a run whose GPUs hold parts of the model, as a tab of the run page."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QLabel, QVBoxLayout, QWidget

from app.events import RankProgress
from app.gui.charts.layer_strip import LayerStrip
from app.gui.kit.primitives import make_label, make_scroll_area, make_selectable
from app.gui.kit.theme import Theme
from app.planning.accuracy.forecast_accuracy import Forecast
from app.presentation.stage_text import (
    StageRow,
    describe_division,
    describe_measured,
    list_run_stages,
)


class StagesPane(QWidget):
    """One line per rank: its layers as a strip, its memory as planned and as measured."""

    has_stages = Signal(bool)
    """True if the run has stages; other runs hide the tab."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme = theme
        self._rows: list[StageRow] = []
        self._ranks: tuple[RankProgress, ...] = ()
        self.lines: list[StageLine] = []
        self.summary = make_selectable(make_label(role="muted", wraps=True))
        body = QWidget()
        self._lines_column = QVBoxLayout(body)
        self._lines_column.setContentsMargins(0, 0, 12, 0)
        self._lines_column.setSpacing(12)
        self._lines_column.addStretch(1)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 12, 0, 0)
        column.setSpacing(8)
        column.addWidget(self.summary)
        column.addWidget(make_scroll_area(body), 1)

    def show_forecast(self, forecast: Forecast | None) -> None:
        """Show the stages of an attempt; None, or another mode: no stages."""
        self._rows = list_run_stages(forecast) if forecast is not None else []
        self.has_stages.emit(bool(self._rows))
        text = ""
        if forecast is not None:
            text = describe_division(
                self._rows, forecast.step_s, forecast.bubble_s, forecast.wire_s
            )
        self.summary.setText(f"Planned: {text}" if text else "")
        self.summary.setVisible(bool(text))
        self._fill()

    def show_ranks(self, ranks: Sequence[RankProgress]) -> None:
        """Show the newest measurements of the ranks."""
        self._ranks = tuple(ranks)
        self._fill()

    def _fill(self) -> None:
        while len(self.lines) < len(self._rows):
            self.lines.append(line := StageLine(self._theme))
            self._lines_column.insertWidget(len(self.lines) - 1, line)
        measured = {rank.rank: rank for rank in self._ranks}
        for number, line in enumerate(self.lines):
            line.setVisible(number < len(self._rows))
            if number < len(self._rows):
                row = self._rows[number]
                line.show_stage(row, describe_measured(row, measured.get(row.rank)))


class StageLine(QWidget):
    """One GPU: name, strip of its layers, what they need."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._title = make_label(role="subheading", wraps=True)
        self._strip = LayerStrip(theme)
        self._text: QLabel = make_label(role="caption", wraps=True)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(4)
        for part in (self._title, self._strip, self._text):
            column.addWidget(part)

    def show_stage(self, row: StageRow, measured: str) -> None:
        """Show one stage and what its rank has measured; empty: nothing yet."""
        self._title.setText(row.title)
        self._strip.show_stage(row)
        planned = f"planned {row.memory_text}" if row.memory_text else ""
        self._text.setText(", ".join(part for part in (row.layers_text, planned, measured) if part))

    def text(self) -> str:
        """Return the whole text of the line."""
        return f"{self._title.text()}, {self._text.text()}"
