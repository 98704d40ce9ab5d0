"""Runs that nodes list and that are not known to be this home's, with what the user can do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from PySide6.QtWidgets import QFrame, QVBoxLayout, QWidget

from app.core.runs import AdoptRun, FindRuns, IgnoreRun, StopRunOnNode, TakeOverRun
from app.events import FoundRun, RunSnapshot
from app.gui.kit.banner import Banner
from app.gui.kit.confirm import confirm
from app.gui.kit.flow_layout import FlowLayout
from app.gui.kit.primitives import Button, make_label
from app.gui.session.context import Context
from app.presentation.found_text import ask_to_adopt, describe_found, may_stop, may_take_over

MOST_ROWS = 5
"""Maximum number of runs shown; a node may list any number."""


class FoundPane(QFrame):
    """One row per run; hidden while there are no such runs."""

    def __init__(self, context: Context, parent: QWidget, banner: Banner) -> None:
        super().__init__(parent)
        self._context, self._banner = context, banner
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._rows: list[QWidget] = []
        context.cluster.found_changed.connect(self.show_found)
        self.show_found()

    def show_found(self) -> None:
        """Show the runs that are found now."""
        for row in self._rows:
            self._column.removeWidget(row)
            row.hide()
            row.deleteLater()
        found = self._context.cluster.found
        self._rows = [self._make_row(run) for run in found[:MOST_ROWS]]
        if len(found) > MOST_ROWS:
            rest = f"{len(found) - MOST_ROWS} more are listed by: rackless runs found"
            self._rows.append(make_label(rest, "caption", wraps=True))
        for row in self._rows:
            self._column.addWidget(row)
        self.setVisible(bool(found))

    def _make_row(self, run: FoundRun) -> QWidget:
        row = QWidget(self)
        line = FlowLayout(lead=make_label(describe_found(run), wraps=True))
        for text, act, tip, is_offered in (
            ("Watch\u2026", self.adopt, "Show it among your runs, after a question", True),
            (
                "Take over\u2026",
                self.take_over,
                "Resume it from this PC after a loss",
                may_take_over(run),
            ),
            ("Stop there\u2026", self.stop, f"End it on {run.node}", may_stop(run)),
            ("Ignore", self.ignore, "Do not show it again", True),
        ):
            if is_offered:
                line.addWidget(Button(self._context.theme, text, partial(act, run), tip=tip))
        row.setLayout(line)
        return row

    def adopt(self, run: FoundRun) -> None:
        if self._ask(f"Watch {run.name or run.run_id}?", ask_to_adopt(run), "Watch it"):
            self._do_adopt(run, lambda adopted: None)

    def take_over(self, run: FoundRun) -> None:
        if not self._ask(f"Take over {run.name or run.run_id}?", ask_to_adopt(run), "Take over"):
            return
        self._do_adopt(run, self._take_over_adopted)

    def _take_over_adopted(self, run: RunSnapshot) -> None:
        self._context.bridge.do(TakeOverRun(run_id=run.run_id), failure=self._banner.show_error)

    def _do_adopt(self, run: FoundRun, then: Callable[[RunSnapshot], None]) -> None:
        request = AdoptRun(run_id=run.run_id, node=run.node, files=run.files)
        self._context.bridge.do(request, success=then, failure=self._banner.show_error)

    def stop(self, run: FoundRun) -> None:
        text = f"It ends on {run.node}, and its other nodes notice that."
        if self._ask(f"Stop {run.name or run.run_id}?", text, "Stop there", is_dangerous=True):
            self._context.bridge.do(
                StopRunOnNode(run_id=run.run_id, node=run.node),
                # Asks the nodes again, so that the row shows what became of it.
                success=lambda stopped: self._look_again(),
                failure=self._banner.show_error,
            )

    def _look_again(self) -> None:
        self._context.bridge.do(FindRuns(), failure=self._banner.show_error)

    def ignore(self, run: FoundRun) -> None:
        self._context.bridge.do(
            IgnoreRun(run_id=run.run_id, node=run.node), failure=self._banner.show_error
        )

    def _ask(self, title: str, text: str, action: str, *, is_dangerous: bool = False) -> bool:
        theme = self._context.theme
        return confirm(self, theme, title, text, action, is_dangerous=is_dangerous)
