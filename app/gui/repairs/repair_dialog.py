"""One repair: what it runs and edits, Apply, its progress, the check again, and Undo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QDialog, QHBoxLayout, QVBoxLayout, QWidget

from app.core.action import CoreApi, sentences
from app.core.nodes import ListNodes
from app.core.repairs import ApplyRepair, ReadChanges, RetestRow, ShowRepair, UndoChanges
from app.errors import RacklessError
from app.flows.repair import Offer, describe_notes, waits_for_restart
from app.flows.repair_stage import RepairStage, Verdict
from app.gui.kit.banner import Banner
from app.gui.kit.inputs import TextBox
from app.gui.kit.primitives import Button, copy_to_clipboard, make_label
from app.gui.repairs.node_pane import ShowOutcome
from app.gui.repairs.sudo_password import SudoPassword
from app.gui.session.bridge import Op, Report, Work
from app.gui.session.context import Context
from app.provisioning.check_row import CheckRow
from app.text import capitalize, show_foreign


async def preview(core: CoreApi, stage: RepairStage) -> RepairStage:
    """Preview a repair on its node, and find out whether it only waits for a restart."""
    offer = stage.offer
    shown = await core.do(ShowRepair(node=offer.node, repair=offer.repair))
    if not offer.repair.needs_restart:
        return replace(stage, shown=shown)
    log = await core.do(ReadChanges(node=offer.node))
    facts = {node.name: node.facts for node in await core.do(ListNodes())}[offer.node]
    waits = waits_for_restart(offer.repair, log.changes, facts.started_s if facts else None)
    return replace(stage, shown=shown, waits=waits)


async def apply(
    core: CoreApi, stage: RepairStage, password: str, names: Sequence[str], report: Report
) -> RepairStage:
    """Apply the previewed repair, then repeat the checks that asked for it."""
    offer, shown = stage.offer, stage.shown
    assert shown is not None
    change = await core.do(
        ApplyRepair(node=offer.node, repair=offer.repair, shown=shown, password=password),
        sentences(report),
    )
    # Before the restart, a check would only find the old problem.
    if change.problem or change.needs_restart:
        return replace(stage, change=change)
    return replace(stage, change=change, rows=await _check_again(core, stage, names, report))


async def undo(
    core: CoreApi, stage: RepairStage, password: str, names: Sequence[str], report: Report
) -> RepairStage:
    """Undo a repair, then repeat the checks that asked for it."""
    assert stage.change is not None
    numbers = (stage.change.number,)
    (change,) = await core.do(
        UndoChanges(node=stage.offer.node, numbers=numbers, password=password), sentences(report)
    )
    return replace(stage, change=change, rows=await _check_again(core, stage, names, report))


async def _check_again(
    core: CoreApi, stage: RepairStage, names: Sequence[str], report: Report
) -> tuple[CheckRow, ...]:
    report("Checking again")
    found = [await core.do(RetestRow(row=row, names=names)) for row in stage.offer.rows]
    return tuple(row for rows in found for row in rows)


class RepairDialog(QDialog):
    """Guides the user through one repair; a repair under way continues after it is closed.

    `names` are the nodes that were checked. In a `series`, such as `1 of 3`, accepting the dialog
    leads to the next repair and rejecting it stops the series; empty: no series.
    """

    retested = Signal(object, object)
    """Rows for which the repair was offered, and the rows that replace them."""
    ended_unseen = Signal(object)
    """The ShowOutcome of a repair, or of its undo, that ended after the dialog was closed."""

    def __init__(
        self,
        context: Context,
        offer: Offer,
        names: Sequence[str],
        parent: QWidget,
        series: str = "",
    ) -> None:
        super().__init__(parent)
        self._context = context
        self._names = tuple(names)
        self._looking: Op | None = None
        self._is_changing = self._is_left = False
        self.stage = RepairStage(offer=offer)
        self._series = series
        self.setWindowTitle(f"Repair {offer.node}" + (f" ({series})" if series else ""))
        self.setMinimumSize(640, 480)
        theme = context.theme
        self.steps = TextBox()
        self.steps.setObjectName("code")
        self.steps.setReadOnly(True)
        self.steps.setAccessibleName("What it runs and changes")
        self.password = SudoPassword()
        self.banner = Banner(theme, can_close=False)
        self.apply = Button(theme, "Apply", self._apply, role="primary")
        self.undo = Button(theme, "Undo", self._undo, tip="Take back what it changed")
        self.copy = Button(
            theme,
            "Copy",
            lambda: copy_to_clipboard(self.steps.toPlainText()),
            icon="copy",
            tip="Copy the commands, to run them by hand",
        )
        self.next = Button(theme, "Next", self.accept, tip="Continue with the next repair")
        self._exits = self._make_exits()
        self._lay_out(offer)
        self.password.textChanged.connect(lambda text: self._choose_default())
        self.finished.connect(self._leave)
        self._show()
        self.banner.show_notice(self.stage.judge())
        if self.stage.is_ours:
            self._show(is_busy=True)
            self._looking = context.bridge.run(
                lambda core, report: preview(core, self.stage), self._take, self._fail
            )

    def _lay_out(self, offer: Offer) -> None:
        column = QVBoxLayout(self)
        column.setContentsMargins(24, 20, 24, 20)
        column.setSpacing(12)
        column.addWidget(make_label(f"{offer.node}: {offer.repair.title}", "heading", wraps=True))
        column.addWidget(make_label(offer.repair.explanation, wraps=True))
        column.addWidget(self.steps, 1)
        notes = " ".join(describe_notes(offer.repair))
        column.addWidget(make_label(notes, "muted", wraps=True))
        column.addWidget(self.banner)
        column.addWidget(self.password)
        foot = QHBoxLayout()
        foot.setSpacing(8)
        foot.addWidget(self.copy)
        foot.addStretch(1)
        for button in self._exits:
            foot.addWidget(button)
        foot.addWidget(self.undo)
        foot.addWidget(self.apply)
        column.addLayout(foot)

    def _make_exits(self) -> list[Button]:
        if not self._series:
            return [Button(self._context.theme, "Close", self.reject)]
        tip = "Stop here; repairs that were applied stay"
        return [Button(self._context.theme, "Stop", self.reject, tip=tip), self.next]

    def _show(self, *, is_busy: bool = False) -> None:
        stage = self.stage
        text = show_foreign("\n".join(stage.lines), keep="\n")
        if text != self.steps.toPlainText():
            self.steps.setPlainText(text)
        self.apply.setVisible(stage.is_ours and stage.change is None)
        self.apply.setEnabled(stage.can_apply and not is_busy)
        self.undo.setVisible(stage.change is not None)
        self.undo.setEnabled(stage.can_undo and not is_busy)
        self.password.ask(stage.offer.node, is_wanted=stage.asks_password)
        self.password.setEnabled(not is_busy)
        # A node applies one repair at a time.
        self.next.setEnabled(not is_busy)
        self._choose_default()

    def _choose_default(self) -> None:
        """Let Enter apply, or leave; it undoes only once a password was typed."""
        after = self.undo if self.password.text() else self._exits[-1]
        wanted = self.apply if self.stage.change is None else after
        wanted.setDefault(True)

    def _take(self, stage: RepairStage) -> None:
        before, self.stage = self.stage, stage
        if stage.rows and stage.rows != before.rows:
            self.retested.emit(before.rows or stage.offer.rows, stage.rows)
        self._end(lambda banner: banner.show_notice(self._judge()))
        if stage.change is not None:
            self._exits[-1].setFocus()
        elif self.password.isVisible():
            self.password.setFocus()

    def _fail(self, error: RacklessError) -> None:
        self._end(lambda banner: banner.show_error(error))
        if self.password.isVisible():  # the password has to be typed again
            self.password.setFocus()

    def _judge(self) -> Verdict | None:
        """Return the banner; once the dialog is closed, with the name of the repair."""
        verdict, offer = self.stage.judge(), self.stage.offer
        if verdict is None or not self._is_left:
            return verdict
        tone, message, hint = verdict
        return tone, f"{offer.node}: {offer.repair.title}", f"{message}. {hint}".strip()

    def _end(self, show: ShowOutcome) -> None:
        """Show the outcome here, or on the page in view if this dialog was closed."""
        self._looking, self._is_changing = None, False
        if self._is_left:
            self.ended_unseen.emit(show)
            self.deleteLater()
        else:
            self._show()
            show(self.banner)

    def _leave(self, code: int) -> None:
        self._is_left = True
        if self._looking is not None:
            self._looking.cancel()
        # A repair under way still reports to this dialog; `_end` deletes it then.
        if not self._is_changing:
            self.deleteLater()

    def _apply(self) -> None:
        password, stage = self.password.take(), self.stage
        self._change(
            f"Repairing {stage.offer.node}",
            lambda core, report: apply(core, stage, password, self._names, report),
        )

    def _undo(self) -> None:
        password, stage = self.password.take(), self.stage
        self._change(
            f"Undoing on {stage.offer.node}",
            lambda core, report: undo(core, stage, password, self._names, report),
        )

    def _change(self, title: str, work: Work[RepairStage]) -> None:
        self._is_changing = True
        # The focus would go to the field with the steps from what is disabled now.
        self._exits[0].setFocus()
        self._show(is_busy=True)
        at_close = (
            f"{title} continues there, without the check afterwards; its Changes tab shows the "
            "outcome."
        )
        self._context.bridge.run(work, self._take, self._fail, self._report, at_close=at_close)
        self.banner.show_message("busy", title)

    def _report(self, text: str) -> None:
        self.banner.show_message("busy", f"Working on {self.stage.offer.node}", capitalize(text))
