"""Count the rows that a run would leave out, once the user rests, and show them with the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, QTimer

from agents.contract.spec import RunSpec
from app.core.library import CountLeftOut
from app.errors import RacklessError
from app.gui.new_run.outlook import LOST, UNUSABLE, Outlook
from app.gui.session.bridge import Bridge, Op
from app.planning.candidate import Advice
from app.presentation.left_out_text import ON_A_NODE, say_count
from app.presentation.offer_text import find_offer
from app.text import capitalize

if TYPE_CHECKING:
    from app.runs.inputs.left_out import DataCount

REST_MS = 800
"""Pause in typing after which rows are counted, in milliseconds."""


class LiveCount(QObject):
    """Counts for the newest answers only: another answer ends the count under way."""

    def __init__(self, bridge: Bridge, outlook: Outlook) -> None:
        super().__init__(outlook)
        self._bridge, self._outlook = bridge, outlook
        self._wanted: RunSpec | None = None
        self._op: Op | None = None
        self._rest = QTimer(self, singleShot=True)
        self._rest.timeout.connect(self._count)

    def follow(self, spec: RunSpec | None) -> None:
        """Count the rows of `spec` from now on; None: the answers are not complete."""
        if spec == self._wanted:
            return
        self.end()
        self._wanted = spec
        self._show((), ())
        if spec is not None:
            self._rest.start(REST_MS)

    def end(self) -> None:
        """End the count under way."""
        self._rest.stop()
        if self._op is not None:
            self._op.cancel()
            self._op = None

    def _count(self) -> None:
        if self._wanted is None:
            return
        self._op = self._bridge.do(
            CountLeftOut(spec=self._wanted),
            self._take,
            self._fail,
            lambda text: self._show((), (capitalize(text),)),
        )

    def _take(self, counts: Sequence[DataCount]) -> None:
        grave: list[str] = []
        calm: list[str] = []
        for one in counts:
            if one.found is None:
                calm.append(f"{one.name}: {ON_A_NODE}.")
            else:
                some = grave if one.found.loses_much else calm
                some.append(f"{capitalize(say_count(one.name, one.found))}.")
        self._show(grave, calm)

    def _fail(self, error: RacklessError) -> None:
        # The form marks data that is missing; other faults stand here before a start.
        offer = find_offer(error, self._wanted.data) if self._wanted is not None else None
        offers = (Advice(text=offer.text, change=offer.change),) if offer is not None else ()
        # Not capitalized: it may begin with a file's name.
        self._show((f"{str(error).rstrip('.')}.",), (), offers)
        self._outlook.left_out.rename(UNUSABLE)

    def _show(
        self, grave: Sequence[str], calm: Sequence[str], offers: Sequence[Advice] = ()
    ) -> None:
        self._outlook.left_out.rename(LOST)
        self._outlook.left_out.show_notes(grave)
        self._outlook.counted.show_notes(calm)
        self._outlook.offers.show_advice(offers)
