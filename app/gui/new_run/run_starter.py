"""Start a run from its form: its progress, a way back, and the question about lost rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from PySide6.QtCore import QObject, Signal

from app.core.runs import StartRun
from app.errors import LeftOutRows, RacklessError
from app.events import RunSnapshot
from app.gui.kit.banner import Banner
from app.gui.kit.primitives import Button
from app.gui.new_run.data_offer import show_offer
from app.gui.session.banner_task import show_error_while
from app.gui.session.bridge import Op
from app.gui.session.context import Context
from app.text import capitalize


class RunStarter(QObject):
    """One start at a time.

    Args:
        context: services of the window.
        banner: banner of the form.
        button: button that starts; off while a start is under way.
    """

    started = Signal(str)
    """Id of the started run."""
    advised = Signal(object)
    """The user takes what a refusal of the data offers: new values by dotted key."""

    def __init__(self, context: Context, banner: Banner, button: Button) -> None:
        super().__init__(banner)
        self._context, self._banner, self._button = context, banner, button
        self._op: Op | None = None

    @property
    def is_busy(self) -> bool:
        """True while a start is under way."""
        return self._op is not None

    def begin(self, start: StartRun) -> None:
        """Start a run."""
        # A second click would launch a second run; failure and cancel enable the button again.
        self._button.setEnabled(False)
        self._show("Copying what the nodes do not have yet.")
        self._op = self._context.bridge.do(
            start,
            success=self._succeed,
            failure=partial(self._fail, start),
            progress=lambda line: self._show(capitalize(str(line))),
            at_close=f"Starting {start.spec.name} stops: it does not train yet. Files already "
            "copied to the nodes are kept.",
        )

    def end(self) -> None:
        """Cancel the start under way."""
        if self._op is not None:
            self._op.cancel()
            self._op = None

    def _show(self, line: str) -> None:
        self._banner.show_message("busy", "Starting", line, ("Cancel start", self._break_off))

    def _break_off(self) -> None:
        self.end()
        # A cancelled operation calls nothing back, so the form is made ready here.
        self._button.setEnabled(True)
        self._banner.show_message(
            "calm",
            "Start cancelled",
            "Files already copied to the nodes are kept for the next start. If the run was "
            "already launched, it is stopped and listed under Runs.",
        )

    def _succeed(self, run: RunSnapshot) -> None:
        self.started.emit(run.run_id)

    def _take_offer(self, change: Mapping[str, object]) -> None:
        self._banner.hide()
        self.advised.emit(change)

    def _fail(self, start: StartRun, error: RacklessError) -> None:
        self._op = None
        self._button.setEnabled(True)
        if isinstance(error, LeftOutRows):
            accepting = replace(start, accept_left_out=True)
            self._banner.show_message(
                "warning",
                f"Nothing was started: {error.message}",
                "Correct the data, or start without what is left out.",
                (error.offer, lambda: self.begin(accepting)),
            )
            return
        if not show_offer(self._banner, error, start.spec.data, self._take_offer):
            show_error_while(self._context, self._banner, error)
