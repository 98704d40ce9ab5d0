"""Data preview before a run is started: the first rows at once, all rows on demand."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QDialog, QHBoxLayout, QVBoxLayout, QWidget

from agents.contract.data import DataPreview
from agents.contract.spec import RunSpec
from app.core.library import PreviewData
from app.core.runs import ListCaveats
from app.errors import RacklessError
from app.gui.kit.banner import Banner
from app.gui.kit.primitives import Button, make_label
from app.gui.new_run.data_offer import show_offer
from app.gui.new_run.data_view import DataView
from app.gui.session.bridge import Op
from app.gui.session.context import Context
from app.planning.advice.changes import apply_change


class DataDialog(QDialog):
    """Shows a data preview; reading the first rows starts at once and takes seconds.

    `planned` is the spec of the whole form, with which it also shows the caveats of the run. None:
    some answers are not valid yet.
    """

    rows_wanted = Signal()
    """The user wants to look through all rows."""
    advised = Signal(object)
    """Settings by which the data can be read, by dotted key of the run file."""

    def __init__(
        self, context: Context, parent: QWidget, spec: RunSpec, planned: RunSpec | None = None
    ) -> None:
        super().__init__(parent)
        self._context = context
        self.spec = spec
        """Run whose data is shown."""
        self._op: Op | None = None
        self.setWindowTitle("Data preview")
        self.resize(720, 600)
        self.banner = Banner(context.theme)
        self.view = DataView(context.theme, "The first rows appear here once they are read.")
        self.count_all = Button(
            context.theme,
            "Read all rows",
            lambda: self._look(whole=True),
            tip="Count every row. The run reuses the result, so no time is lost.",
        )
        foot = QHBoxLayout()
        foot.addWidget(self.count_all)
        foot.addWidget(
            Button(
                context.theme,
                "Look through all rows",
                self._leave,
                tip="Open the Data page. Your answers are kept as a draft.",
            )
        )
        foot.addStretch(1)
        foot.addWidget(Button(context.theme, "Close", self.accept))
        column = QVBoxLayout(self)
        column.setContentsMargins(24, 20, 24, 20)
        column.setSpacing(12)
        column.addWidget(make_label("Data preview", "heading"))
        column.addWidget(self.banner)
        column.addWidget(self.view, 1)
        column.addLayout(foot)
        # Reading all rows of a large file takes minutes; a closed dialog stops it.
        self.finished.connect(lambda result: self._give_up())
        self._look(whole=False)
        if planned is not None:
            context.bridge.do(
                ListCaveats(spec=planned), self.view.show_caveats, self.banner.show_error
            )

    def _look(self, *, whole: bool) -> None:
        self.count_all.setEnabled(False)
        what = "Reading all rows" if whole else "Reading the first rows"
        self.banner.show_message("busy", what)
        self._op = self._context.bridge.do(
            PreviewData(spec=self.spec, whole=whole),
            success=self._show,
            failure=self._fail,
            progress=lambda text: self.banner.show_message("busy", what, str(text)),
        )

    def _show(self, found: DataPreview) -> None:
        self.banner.hide()
        self.view.show_data(found)
        # Once all rows are read there is nothing more to count.
        self.count_all.setEnabled(not found.whole)

    def _fail(self, error: RacklessError) -> None:
        if not show_offer(self.banner, error, self.spec.data, self._take_offer):
            self.banner.show_error(error)
        self.count_all.setEnabled(True)

    def _take_offer(self, change: Mapping[str, object]) -> None:
        self.advised.emit(change)
        self.spec = apply_change(self.spec, change)
        self._look(whole=False)

    def _leave(self) -> None:
        self.accept()
        self.rows_wanted.emit()

    def _give_up(self) -> None:
        if self._op is not None:
            self._op.cancel()
