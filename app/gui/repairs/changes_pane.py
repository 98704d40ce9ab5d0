"""Changes that repairs made on the selected node, from its own log, with Undo."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QHBoxLayout, QVBoxLayout

from agents.contract.repair import Change, ChangeList
from app.core.repairs import ReadChanges, UndoChanges
from app.errors import RacklessError
from app.flows.repair import (
    can_undo,
    describe_change_steps,
    describe_undone,
    find_problems,
    judge_change,
    show_state,
    summarise_changes,
    wants_password,
)
from app.gui.kit.banner import Banner
from app.gui.kit.confirm import confirm
from app.gui.kit.inputs import TextBox
from app.gui.kit.primitives import Button, make_label
from app.gui.repairs.node_pane import ChangingPane
from app.gui.repairs.sudo_password import SudoPassword
from app.gui.session.bridge import work_of
from app.gui.session.context import Context
from app.gui.tables.rows_model import Column, RowsModel
from app.gui.tables.view import TableView
from app.text import show_foreign, show_moment

_NOTHING = ChangeList(changes=(), admin="none")


class ChangesPane(ChangingPane):
    """The log of one node."""

    asks_each_time = True  # a repair may have changed the node while this tab was hidden

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._log = _NOTHING
        theme = context.theme
        self.model: RowsModel[Change] = RowsModel(self._columns(), key=lambda one: one.number)
        self.table = TableView(theme, self.model, "Changes")
        self.table.sort_by("No.", Qt.SortOrder.DescendingOrder)
        self.summary = make_label(role="muted", wraps=True)
        self.steps = TextBox()
        self.steps.setObjectName("code")
        self.steps.setReadOnly(True)
        self.steps.setAccessibleName("Steps of the selected change")
        self.password = SudoPassword()
        self.undo = Button(theme, "Undo", self._undo_one, tip="Take back the selected change")
        self.undo_all = Button(
            theme, "Undo all", self._ask_undo_all, role="danger", tip="Take back all changes"
        )
        self.again = Button(theme, "Refresh", self.refresh, icon="refresh", role="link")
        self._lay_out()
        self.password.returnPressed.connect(self._leave_password)
        self.table.chosen.connect(self._show_steps)
        self._show_steps()
        self.show_node("")

    def refresh(self) -> None:
        """Ask the node for its log."""
        name = self._shown = self._name
        self.summary.setText(
            f"Reading from {name}\u2026" if name else "Select a node to see its changes."
        )
        if name:
            self.read(work_of(ReadChanges(node=name)), self._take_named, self._fail)
        else:
            self.stop_reading()
        self.show_work()
        self.table.say_when_empty("")
        # Numbers of the previous node's changes must not be undone on this one.
        self._take(_NOTHING)

    # ------------------------------------------------------------ layout

    def _columns(self) -> list[Column[Change]]:
        return [
            Column(
                title="No.",
                text=lambda one: str(one.number),
                sort=lambda one: one.number,
                width_px=52,
            ),
            Column(title="Repair", text=lambda one: one.title, stretches=True),
            Column(
                title="When",
                text=lambda one: show_moment(one.began_s, self._context.cluster.now_s()),
                sort=lambda one: one.began_s,
                width_px=88,
            ),
            Column(title="By", text=lambda one: one.by, width_px=100),
            Column(title="State", text=show_state, status=judge_change, width_px=124),
        ]

    def _lay_out(self) -> None:
        head = QHBoxLayout()
        head.setSpacing(8)
        head.addWidget(self.summary, 1)
        for button in (self.again, self.undo, self.undo_all):
            head.addWidget(button)
        body = QHBoxLayout()
        body.setSpacing(12)
        body.addWidget(self.table, 5)
        body.addWidget(self.steps, 3)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 12, 0, 0)
        column.setSpacing(8)
        column.addLayout(head)
        column.addWidget(self.banner)
        column.addWidget(self.password)
        column.addLayout(body, 1)

    def _take_named(self, log: ChangeList) -> None:
        self._take(log)
        self.summary.setText(summarise_changes(self._name, log.changes))
        self.table.say_when_empty("Repairs that the Check tab offers are listed here, with Undo.")

    def _take(self, log: ChangeList) -> None:
        self._log = log
        self.model.reset(log.changes)
        if log.changes:
            self.table.select(log.changes[-1].number)
        self._show_steps()

    def _fail(self, error: RacklessError) -> None:
        self.summary.setText("")
        self._show_steps()
        self.banner.show_error(error)

    def _show_steps(self) -> None:
        change = self.table.selected()
        lines = describe_change_steps(change) if change is not None else ()
        self.steps.setPlainText(show_foreign("\n".join(lines), keep="\n"))
        self.steps.setVisible(bool(self._log.changes))
        is_idle = self.is_idle
        self.undo.setEnabled(is_idle and change is not None and can_undo(change))
        undoable = [one for one in self._log.changes if can_undo(one)]
        self.undo_all.setEnabled(is_idle and bool(undoable))
        self.again.setEnabled(is_idle and bool(self._name))
        self.password.ask(self._shown, is_wanted=wants_password(self._log))
        self.password.setEnabled(is_idle)

    # ------------------------------------------------------------ undo

    def _leave_password(self) -> None:
        """Move the focus to the action that needs the password; Enter alone undoes nothing."""
        (self.undo if self.undo.isEnabled() else self.undo_all).setFocus()

    def _undo_one(self) -> None:
        change = self.table.selected()
        if change is not None:
            self._undo((change.number,))

    def _ask_undo_all(self) -> None:
        undoable = [one.title for one in reversed(self._log.changes) if can_undo(one)]
        if confirm(
            self,
            self._context.theme,
            f"Undo all changes on {self._shown}?",
            "Taken back, in this order:\n"
            + "\n".join(f"{place}. {title}" for place, title in enumerate(undoable, 1)),
            "Undo all",
            is_dangerous=True,
        ):
            self._undo(())

    def _undo(self, numbers: Sequence[int]) -> None:
        name, password = self._shown, self.password.take()
        self.change(
            f"Undoing on {name}",
            UndoChanges(node=name, numbers=numbers, password=password),
            partial(show_undone, name),
            at_close=f"Undoing on {name} continues there; its Changes tab shows the outcome.",
        )
        self._show_steps()


def show_undone(name: str, changes: tuple[Change, ...], banner: Banner) -> None:
    """Show how many changes of a node were undone, and why others were not."""
    problems = find_problems(changes)
    banner.show_message(
        "warning" if problems else "good", f"{describe_undone(changes)} on {name}", problems
    )
