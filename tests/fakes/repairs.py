"""Repairs of a made-up cluster: a log of changes that the fake core keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from agents.contract.messages import Progress
from agents.contract.repair import (
    AdminWay,
    Change,
    ChangeList,
    ChangeStep,
    FileEdit,
    RepairPreview,
    RepairStep,
    StepPreview,
)
from app.core.action import Report
from app.core.repairs import ApplyRepair, ReadChanges, RetestRow, ShowRepair, UndoChanges
from app.errors import AdminRefused
from app.provisioning.check_row import CheckRow

HOSTS = "127.0.0.1\tlocalhost\n127.0.1.1\tgamma\n\n::1\tip6-localhost\n"


class FakeRepairs:
    """`core.repairs` of the fake core: keeps a log, and asks sudo for `password`."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self.admin: AdminWay = "password"
        self.password = "open sesame"
        self.heard: list[str] = []
        """Passwords that came in."""
        self.log: dict[str, list[Change]] = {}
        self.problem = ""
        """Why the next repair fails; empty: it does not."""

    async def preview(self, action: ShowRepair, report: Report) -> RepairPreview:
        return RepairPreview(
            steps=tuple(_preview(step) for step in action.repair.steps), admin=self.admin
        )

    async def apply(self, action: ApplyRepair, report: Report) -> Change:
        self._require(action.node, action.password)
        for step in action.repair.steps:
            report(Progress(message=f"{step.says} ..."))
            await asyncio.sleep(0)
        log = self.log.setdefault(action.node, [])
        now_s = self._now_s()
        state = "failed" if self.problem else "done"
        steps = tuple(_record(step, state) for step in action.repair.steps)
        change = Change(
            number=len(log) + 1,
            repair=action.repair.id,
            title=action.repair.title,
            by="anna@desk",
            began_s=now_s,
            ended_s=now_s + 1,
            steps=steps,
            problem=self.problem,
            needs_restart=action.repair.needs_restart,
        )
        log.append(change)
        return change

    async def retest(self, action: RetestRow, report: Report) -> tuple[CheckRow, ...]:
        if self.problem:
            return (action.row,)
        return (replace(action.row, status="pass", message="nothing is wrong any more", fix=""),)

    async def changes(self, action: ReadChanges, report: Report) -> ChangeList:
        return ChangeList(changes=tuple(self.log.get(action.node, ())), admin=self.admin)

    async def undo(self, action: UndoChanges, report: Report) -> tuple[Change, ...]:
        log = self.log.get(action.node, [])
        chosen = [
            index
            for index in reversed(range(len(log)))
            if (log[index].number in action.numbers if action.numbers else log[index].has_undo_left)
        ]
        steps = [one.step for index in chosen for one in log[index].steps]
        if any(step.undo or step.edit for step in steps):
            self._require(action.node, action.password)
        for index in chosen:
            log[index] = _take_back(log[index], self._now_s())
        return tuple(log[index] for index in chosen)

    def _require(self, node: str, password: str) -> None:
        self.heard.append(password)
        if self.admin == "password" and password != self.password:
            raise AdminRefused(
                f"{node}: sudo on this node did not take the password.",
                "Type it again",
                where=node,
                again=True,
            )


def _preview(step: RepairStep) -> StepPreview:
    if step.edit is None:
        return StepPreview(state="needed")
    return StepPreview(
        state="needed", before=HOSTS, after=step.edit.apply_to(HOSTS), sha256="5" * 64
    )


def _record(step: RepairStep, state: str) -> ChangeStep:
    edit: FileEdit | None = step.edit
    done = ChangeStep(step=step, state="done" if state == "done" else "failed", exit_code=0)
    if edit is None:
        return done
    return replace(done, path=edit.path, before=HOSTS, after=edit.apply_to(HOSTS), mode=0o644)


def _take_back(change: Change, now_s: float) -> Change:
    steps = tuple(
        replace(one, undone="yes" if one.step.can_undo else "impossible") for one in change.steps
    )
    left = "; ".join(one.step.says for one in steps if one.undone == "impossible")
    problem = f"'{left}' cannot be taken back." if left else ""
    is_over = any(one.undone == "yes" for one in steps)
    undone_s = now_s if is_over else None
    return replace(change, steps=steps, undone_s=undone_s, undo_problem=problem)
