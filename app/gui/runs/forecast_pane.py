"""The forecast of a run next to its measurements, as a tab of the run page."""

from __future__ import annotations

from functools import partial

from PySide6.QtCore import Signal
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QVBoxLayout, QWidget

from app.core.runs import CompareForecast
from app.gui.kit.primitives import make_label
from app.gui.session.context import Context
from app.gui.tables.rows_model import RowsModel
from app.gui.tables.run_columns import forecast_columns
from app.gui.tables.view import TableView
from app.planning.accuracy.forecast_accuracy import ForecastComparison
from app.presentation.plan_text import ComparedRow, describe_comparison

_NOTHING = "No forecast: this PC did not know the size of the model when the run was launched."


class ForecastPane(QWidget):
    """Table of forecast and measurement; queries the core when shown and at each visible
    `refresh`.
    """

    loaded = Signal(object)
    """`Forecast` of the run's newest attempt, or None."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self._run_id = ""
        self._attempt: int | None = None
        self.model: RowsModel[ComparedRow] = RowsModel(forecast_columns(), key=lambda row: row.what)
        self.note = make_label(role="muted", wraps=True)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 12, 0, 0)
        column.setSpacing(8)
        column.addWidget(self.note)
        column.addWidget(TableView(context.theme, self.model, "Forecast and measurement"), 1)

    def open_run(self, run_id: str) -> None:
        """Show another run."""
        self._run_id, self._attempt = run_id, None
        self.model.reset([])
        self.note.hide()
        self.loaded.emit(None)
        self.refresh()

    def show_attempt(self, attempt: int) -> None:
        """Load the forecast of this attempt, unless it is loaded: each attempt has its own plan."""
        if attempt != self._attempt:
            self._attempt = attempt
            self._load()

    def refresh(self) -> None:
        """Query the newest measurements, unless the pane is hidden."""
        # A comparison reads the whole journal of the run: not worth it behind another tab.
        if self.isVisible():
            self._load()

    def _load(self) -> None:
        run_id = self._run_id
        if run_id:
            show = partial(self._show, run_id)
            self._context.bridge.do(CompareForecast(run_id=run_id), show)

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.refresh()

    def _show(self, run_id: str, found: ForecastComparison | None) -> None:
        # The answer is for a run that is no longer shown.
        if run_id != self._run_id:
            return
        self.model.reset(describe_comparison(found) if found is not None else [])
        self.loaded.emit(found.forecast if found is not None else None)
        self.note.setText(_NOTHING if found is None else "; ".join(found.forecast.assumptions))
        self.note.setVisible(bool(self.note.text()))
