"""Request a plan at every change of a form, and show the answer to the newest request only.

While the user types, a plan uses only facts known here, which takes milliseconds. After a pause,
missing facts are queried from nodes and the hub, which takes as long as they need.
"""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QObject, QTimer

from agents.contract.spec import RunSpec
from app.core.plans import RankUpgrades
from app.core.runs import PlanRun
from app.errors import RacklessError, UserError
from app.gui.new_run.plan_view import PlanView
from app.gui.session.bridge import Bridge
from app.planning.candidate import Plan
from app.planning.upgrades import Upgrades
from app.text import capitalize

REST_MS = 800
"""Pause in typing after which nodes and hub are queried, in milliseconds."""


class LivePlan(QObject):
    """Sends one request at a time; of those that wait meanwhile only the newest is sent."""

    def __init__(self, bridge: Bridge, view: PlanView) -> None:
        super().__init__(view)
        self._bridge, self._view = bridge, view
        self._wanted: RunSpec | None = None
        # Request in flight, and whether it may query nodes and the hub.
        self._asked: tuple[RunSpec, bool] | None = None
        self._answered: RunSpec | None = None
        self._rest = QTimer(self, singleShot=True)
        self._rest.timeout.connect(lambda: self._ask(ask_remote=True))
        view.purchases_wanted.connect(self._ask_purchases)

    def follow(self, spec: RunSpec | None, words: str) -> None:
        """Plan `spec` from now on; None: nothing to plan yet, for the reason in `words`."""
        if spec is None:
            self._wanted = self._answered = None
            self._rest.stop()
            self._view.show_nothing(words)
        elif spec != self._wanted:
            self._wanted = spec
            self._view.close_purchases()
            self._rest.start(REST_MS)
            self._ask(ask_remote=False)

    def again(self) -> None:
        """Plan the same spec again, since its inputs (such as the data size) may be known
        better now.
        """
        self._answered = None
        self._ask(ask_remote=False)

    def _ask_purchases(self) -> None:
        spec = self._wanted
        if spec is None:
            return

        def show(found: Upgrades) -> None:
            if spec == self._wanted:  # else the form has changed since
                self._view.show_purchases(found)

        self._bridge.do(
            RankUpgrades(spec=spec, ask_remote=False),
            show,
            lambda error: self._view.show_no_purchases(f"{capitalize(str(error).rstrip('.'))}."),
        )

    def _ask(self, *, ask_remote: bool) -> None:
        spec = self._wanted
        # One request at a time: `_finish` sends the newest spec once the answer is here.
        if spec is None or self._asked is not None or (ask_remote and spec == self._answered):
            return
        self._asked = spec, ask_remote
        self._bridge.do(
            # The form itself marks data that is missing, and may still lack any.
            PlanRun(spec=spec, ask_remote=ask_remote, check_data=False),
            self._take,
            self._fail,
        )

    def _take(self, plan: Plan) -> None:
        self._finish(lambda: self._view.show_plan(plan), is_answer=True)

    def _fail(self, error: RacklessError) -> None:
        asked, hint = self._asked, error.hint if isinstance(error, UserError) else ""
        if asked is not None and not asked[1]:
            self._finish(lambda: self._view.show_nothing("Looking up the model\u2026"))
        else:
            self._finish(lambda: self._view.show_problem(str(error).rstrip("."), hint), True)

    def _finish(self, show: Callable[[], None], is_answer: bool = False) -> None:
        asked, self._asked = self._asked, None
        if asked is None:
            return
        # The form has changed since: this answer is stale, ask for the newest.
        if asked[0] != self._wanted:
            self._ask(ask_remote=False)
            return
        if is_answer:
            self._answered = asked[0]
        show()
        # The quick request lacked something that only nodes or the hub know. If the user has
        # stopped typing, ask them now; otherwise the timer will.
        if not is_answer and not self._rest.isActive():
            self._ask(ask_remote=True)
