"""Prepare a node: check it, offer its repairs one by one, set it up, and check again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from agents.contract.node import EnvironmentReport
from app.flows.prepare import count_failures, describe_end, needs_environment
from app.flows.repair import Offer, collect_offers
from app.gui.kit.banner import Banner
from app.gui.repairs.repair_dialog import RepairDialog
from app.gui.session.banner_task import build_environment_in_banner, last_with_node
from app.gui.session.context import Context
from app.provisioning.check_row import CheckRow

Rows = tuple[CheckRow, ...]
Check = Callable[[str, Callable[[Rows], None]], None]
"""Checks a node and passes on its rows; shows progress and errors itself."""


class Preparation:
    """Guides the user through the work of `rackless nodes prepare`, one node at a time."""

    def __init__(
        self,
        context: Context,
        banner: Banner,
        check: Check,
        offer: Callable[[Offer, tuple[str, ...], str], RepairDialog],
    ) -> None:
        self._context = context
        self._banner = banner
        self._check = check
        self._offer = offer
        self._name = ""
        self._number = 0
        """Number of the preparation, from 1: answers for an earlier one are ignored."""
        self._rows: Rows = ()
        self._offers: tuple[Offer, ...] = ()
        self._is_changed = False

    def start(self, name: str) -> None:
        """Prepare a node; a preparation under way stops where it is."""
        self._name, self._is_changed = name, False
        self._number += 1
        self._check(name, partial(self._take_rows, self._number))

    def _take_rows(self, number: int, rows: Rows) -> None:
        if number == self._number:
            self._rows, self._offers = rows, collect_offers(rows)
            self._show_offer(0)

    def _show_offer(self, place: int) -> None:
        if place == len(self._offers):
            self._set_up()
            return
        series = f"{place + 1} of {len(self._offers)}"
        dialog = self._offer(self._offers[place], (self._name,), series)
        dialog.finished.connect(lambda code: self._continue(place, dialog, code))

    def _continue(self, place: int, dialog: RepairDialog, code: int) -> None:
        self._is_changed = self._is_changed or dialog.stage.change is not None
        if code == RepairDialog.DialogCode.Accepted:
            self._show_offer(place + 1)
            return
        self._banner.show_message(
            "calm",
            f"Preparing {self._name}: stopped",
            "Repairs that were applied stay; the Changes tab can take them back.",
        )

    def _set_up(self) -> None:
        if needs_environment(self._rows):
            build_environment_in_banner(
                self._context, self._banner, self._name, partial(self._check_again, self._number)
            )
        elif self._is_changed:
            self._check(self._name, partial(self._end, self._number))
        else:
            self._end(self._number, self._rows)

    def _check_again(self, number: int, report: EnvironmentReport) -> None:
        if number == self._number:
            self._is_changed = True
            self._check(self._name, partial(self._end, number))

    def _end(self, number: int, rows: Rows) -> None:
        if number != self._number:
            return
        text = describe_end(self._name, rows, is_changed=self._is_changed)
        if count_failures(rows):
            self._banner.show_message("warning", text, "The Check tab names each, with its fix.")
        else:
            self._banner.show_message("good", text)
        last_with_node(self._context, self._banner, self._name)
