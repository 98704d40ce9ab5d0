"""Results of the last check, each with its message, evidence and fix."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtWidgets import QHBoxLayout, QVBoxLayout, QWidget

from app.flows.repair import Offer, collect_offers
from app.gui.kit.help_link import open_help
from app.gui.kit.primitives import Button, copy_to_clipboard, make_label, make_selectable
from app.gui.repairs.repair_dialog import RepairDialog
from app.gui.session.context import Context
from app.gui.tables.node_columns import check_columns
from app.gui.tables.rows_model import RowsModel
from app.gui.tables.view import TableView
from app.presentation.check_text import summarise_check, summarise_part
from app.provisioning.check_row import CheckRow
from app.text import show_foreign


def _key_of(row: CheckRow) -> tuple[str, str, str | None, str]:
    # With the message: one check may have several rows about a node.
    return row.check, row.node, row.peer, row.message


class CheckResults(QWidget):
    """Results of the last check, with the fix for the selected one."""

    ended_unseen = Signal(object)
    """The ShowOutcome of a repair whose dialog was closed before it ended."""

    def __init__(self, context: Context, check: Callable[[], object]) -> None:
        super().__init__()
        self._context = context
        self.model: RowsModel[CheckRow] = RowsModel(check_columns(), key=_key_of)
        self.table = TableView(context.theme, self.model, "Check results")
        self.table.sort_by("Result", Qt.SortOrder.AscendingOrder)
        self.table.say_when_empty(
            "A check tests versions, clocks, every connection and a small all-reduce. It changes "
            "nothing."
        )
        self._summary = make_label("Not checked yet.", "muted", wraps=True)
        self._message = make_selectable(make_label(wraps=True))
        self._evidence = make_selectable(make_label(role="muted", wraps=True))
        self._fix = make_selectable(make_label(role="code", wraps=True))
        self._copy = Button(
            context.theme,
            "Copy fix",
            lambda: copy_to_clipboard(self._fix.text()),
            icon="copy",
            tip="Copy the command that fixes the selected problem, to run it on that PC",
        )
        self._repair = Button(
            context.theme,
            "Fix\u2026",
            self._open_repair,
            icon="repair",
            role="primary",
            tip="See the repair of the selected problem, apply it, and check again",
        )
        self._more = Button(
            context.theme,
            "More about this",
            self._explain,
            role="link",
            tip="Open the troubleshooting page at this problem",
        )
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 12, 0, 0)
        column.setSpacing(8)
        head = QHBoxLayout()
        head.addWidget(self._summary, 1)
        self._again = Button(context.theme, "Check now", check, icon="refresh", role="link")
        head.addWidget(self._again)
        column.addLayout(head)
        column.addWidget(self.table, 1)
        column.addWidget(self._message)
        column.addWidget(self._evidence)
        foot = QHBoxLayout()
        foot.addWidget(self._fix, 1)
        foot.addWidget(self._more)
        foot.addWidget(self._copy)
        foot.addWidget(self._repair)
        column.addLayout(foot)
        self.table.chosen.connect(self._show_fix)
        # Whether a message is cut depends on the width, once all columns have theirs.
        self._soon = QTimer(self, interval=0, singleShot=True)
        self._soon.timeout.connect(self._show_cut)
        self.table.horizontalHeader().sectionResized.connect(lambda *sizes: self._soon.start())
        self._show_fix()

    def begin(self) -> None:
        """Clear the table for the rows of a new check."""
        self.model.reset(())
        self.table.say_when_empty("")
        self._again.setText("Check again")
        self._summary.setText("Checking; rows appear as they are known.")
        self._show_fix()

    def add_row(self, row: CheckRow) -> None:
        """Add a row of the check that is running."""
        self.model.put(row)

    def end_early(self, *, is_cancelled: bool) -> None:
        """Keep the rows of a check that was cancelled or has failed, and say so."""
        statuses = [row.status for row in self.model.rows()]
        self._summary.setText(summarise_part(statuses, is_cancelled=is_cancelled))

    def show_rows(self, rows: tuple[CheckRow, ...]) -> None:
        """Show results and select the first failure."""
        self.model.reset(rows)
        self._summary.setText(f"{summarise_check([row.status for row in rows])}.")
        # Select the first failure, so that its fix is visible at once.
        bad = [row for row in rows if row.status == "fail"]
        if bad:
            self.table.select(_key_of(bad[0]))
        self._show_fix()

    def _show_fix(self) -> None:
        row = self.table.selected()
        fix = row.fix if row is not None else ""
        self._fix.setText(fix)
        self._fix.setVisible(bool(fix))
        self._message.setText(row.message if row is not None else "")
        self._show_cut()
        evidence = row.evidence if row is not None else ""
        self._evidence.setText(f"Read there: {show_foreign(evidence)}")
        self._evidence.setVisible(bool(evidence))
        self._copy.setVisible(bool(fix))
        self._repair.setVisible(row is not None and bool(collect_offers((row,))))
        self._more.setVisible(row is not None and bool(row.topic))

    def _show_cut(self) -> None:
        """Show a message that is cut in its row: the keyboard cannot reach a tooltip."""
        self._message.setVisible(self.table.is_cut("Details", self._message.text()))

    def _open_repair(self) -> None:
        # Collected from all rows: a repair may serve several, which are then tested again.
        rows = self.model.rows()
        chosen = self.table.selected()
        offer = next((one for one in collect_offers(rows) if chosen in one.rows), None)
        if offer is None:
            return
        self.offer_repair(offer, tuple(dict.fromkeys(row.node for row in rows)))

    def offer_repair(self, offer: Offer, names: tuple[str, ...], series: str = "") -> RepairDialog:
        """Open the dialog of a repair, whose rows are replaced once they are tested again.

        `names`: nodes that were checked; `series`: its place among several, such as `1 of 3`.
        """
        dialog = RepairDialog(self._context, offer, names, self, series)
        dialog.retested.connect(self._replace)
        dialog.ended_unseen.connect(self.ended_unseen)
        dialog.open()
        return dialog

    def _replace(self, before: tuple[CheckRow, ...], after: tuple[CheckRow, ...]) -> None:
        """Put rows that were tested again in place of the old ones."""
        for row in before:
            self.model.drop(_key_of(row))
        for row in after:
            self.model.put(row)
        rows = self.model.rows()
        self._summary.setText(f"{summarise_check([row.status for row in rows])}.")
        self.table.select(_key_of(after[0]))
        self._show_fix()

    def _explain(self) -> None:
        row = self.table.selected()
        if row is not None:
            open_help(row.topic)
