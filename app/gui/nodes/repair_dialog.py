"""One repair: what it runs and edits, Apply, its progress, the check again, and Undo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QDialog, QHBoxLayout, QVBoxLayout, QWidget

from app.core.api import CoreApi
from app.errors import RacklessError
from app.flows.repair import Offer, describe_notes, waits_for_restart
from app.flows.repair_stage import RepairStage
from app.gui.kit.banner import Banner
from app.gui.kit.inputs import TextBox
from app.gui.kit.primitives import Button, copy_to_clipboard, make_label
from app.gui.nodes.sudo_password import SudoPassword
from app.gui.session.bridge import Op, Report
from app.gui.session.context import Context
from app.provisioning.check_row import CheckRow
from app.text import show_foreign


async def look_at(core: CoreApi, stage: RepairStage) -> RepairStage:
    """Ask the node what a repair would do, and whether it only waits for a restart."""
    offer = stage.offer
    shown = await core.repairs.preview(offer.node, offer.repair)
    if not offer.repair.needs_restart:
        return replace(stage, shown=shown)
    log = await core.repairs.changes(offer.node)
    facts = {node.name: node.facts for node in core.nodes.all()}[offer.node]
    waits = waits_for_restart(offer.repair, log.changes, facts.started_s if facts else None)
    return replace(stage, shown=shown, waits=waits)


async def apply(
    core: CoreApi, stage: RepairStage, password: str, names: Sequence[str], report: Report
) -> RepairStage:
    """Apply a repair as it was shown, then check again what it was for."""
    offer, shown = stage.offer, stage.shown
    assert shown is not None
    change = await core.repairs.apply(offer.node, offer.repair, shown, password, report)
    if change.problem or change.needs_restart:
        return replace(stage, change=change)
    return replace(stage, change=change, rows=await _check_again(core, stage, names, report))


async def undo(
    core: CoreApi, stage: RepairStage, password: str, names: Sequence[str], report: Report
) -> RepairStage:
    """Take a repair back, then check again what it was for."""
    assert stage.change is not None
    numbers = (stage.change.number,)
    (change,) = await core.repairs.undo(stage.offer.node, numbers, password, report)
    return replace(stage, change=change, rows=await _check_again(core, stage, names, report))


async def _check_again(
    core: CoreApi, stage: RepairStage, names: Sequence[str], report: Report
) -> tuple[CheckRow, ...]:
    report("Checking again")
    found = [await core.repairs.retest(row, names) for row in stage.offer.rows]
    return tuple(row for rows in found for row in rows)


class RepairDialog(QDialog):
    """Takes a person through one repair.

    `names` are the nodes that were checked. One of a `series`, such as `1 of 3`, is accepted to go
    on with the next and rejected to stop; empty: it stands alone.
    """

    retested = Signal(object, object)
    """Rows for which the repair was offered, and those that stand for them now."""

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
        self._op: Op | None = None
        self.stage = RepairStage(offer=offer)
        self._series = series
        self.setWindowTitle(f"Repair {offer.node}" + (f" ({series})" if series else ""))
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
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
        self.next = Button(theme, "Next", self.accept, tip="Leave this one as it is now, and go on")
        self._lay_out(offer)
        self.finished.connect(lambda code: self._op.cancel() if self._op else None)
        self._show()
        self.banner.show_notice(self.stage.judge())
        if self.stage.is_ours:
            self._begin(
                context.bridge.run(
                    lambda core, report: look_at(core, self.stage), self._take, self._fail
                )
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
        for button in self._make_exits():
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
        wanted = self.undo if stage.change is not None else self.apply
        wanted.setDefault(True)

    def _take(self, stage: RepairStage) -> None:
        before, self.stage, self._op = self.stage, stage, None
        self._show()
        self.banner.show_notice(stage.judge())
        if stage.rows and stage.rows != before.rows:
            self.retested.emit(before.rows or stage.offer.rows, stage.rows)
        if self.password.isVisible():
            self.password.setFocus()

    def _fail(self, error: RacklessError) -> None:
        self._op = None
        self._show()
        self.banner.show_error(error)

    def _begin(self, op: Op) -> None:
        self._op = op
        self._show(is_busy=True)
        self.banner.show_notice(self.stage.judge())

    def _apply(self) -> None:
        password, stage = self.password.take(), self.stage
        self._begin(
            self._context.bridge.run(
                lambda core, report: apply(core, stage, password, self._names, report),
                self._take,
                self._fail,
                self._report,
            )
        )
        self.banner.show_message("busy", f"Repairing {stage.offer.node}", "")

    def _undo(self) -> None:
        password, stage = self.password.take(), self.stage
        self._begin(
            self._context.bridge.run(
                lambda core, report: undo(core, stage, password, self._names, report),
                self._take,
                self._fail,
                self._report,
            )
        )
        self.banner.show_message("busy", f"Undoing on {stage.offer.node}", "")

    def _report(self, text: str) -> None:
        self.banner.show_message("busy", f"Working on {self.stage.offer.node}", text)
