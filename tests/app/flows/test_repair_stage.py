"""What the dialog of a repair shows and lets a person do, from the first look to the undo."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.contract.repair import Change, ChangeStep, RepairPreview, StepPreview
from app.flows.repair import Offer
from app.flows.repair_stage import RepairStage
from app.provisioning.check_row import make_row
from app.provisioning.repairs import Repair, install_driver
from app.provisioning.system_repairs import synchronise_clock

CLOCK = synchronise_clock()
ROW = make_row("clock", "a", "warn", "late", repair=CLOCK)
STAGE = RepairStage(offer=Offer("a", CLOCK, (ROW,)))
NEEDED = RepairPreview(steps=(StepPreview(state="needed"),), admin="password")
DONE = ChangeStep(step=CLOCK.steps[0], state="done")
CHANGE = Change(
    number=1, repair="time-sync", title="T", by="me", began_s=1, ended_s=2, steps=(DONE,)
)
APPLIED = replace(STAGE, shown=NEEDED, change=CHANGE)
DRIVER = replace(STAGE, offer=Offer("a", install_driver(), (ROW,)), shown=NEEDED)


def failed(**values: object) -> RepairStage:
    return replace(APPLIED, change=replace(CHANGE, **values))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stage", "apply", "undo", "password", "tone", "says"),
    [
        (STAGE, False, False, False, "busy", "Checking a"),
        (replace(STAGE, shown=NEEDED), True, False, True, "", ""),
        (replace(STAGE, shown=replace(NEEDED, admin="root")), True, False, False, "", ""),
        (
            replace(STAGE, shown=replace(NEEDED, admin="none")),
            *(False, False, False, "warning", "cannot be applied"),
        ),
        (
            replace(STAGE, shown=replace(NEEDED, steps=(StepPreview(state="in place"),))),
            *(False, False, False, "calm", "Already in place"),
        ),
        (replace(DRIVER, waits=True), False, False, False, "warning", "Restart a"),
        (
            replace(APPLIED, rows=(replace(ROW, status="pass"),)),
            *(False, True, True, "good", "Repaired on a"),
        ),
        (replace(APPLIED, rows=(ROW,)), False, True, True, "warning", "still finds"),
        (failed(problem="It broke."), False, True, True, "error", "It broke."),
        (failed(problem="It broke.", steps=()), False, False, False, "error", "It broke."),
        (failed(needs_restart=True), False, True, True, "warning", "Applied on a"),
        (failed(undone_s=3.0), False, False, False, "calm", "Undone on a"),
        (failed(undo_problem="It stays."), False, True, True, "error", "could not be undone"),
    ],
)
def test_each_stage(
    stage: RepairStage, apply: bool, undo: bool, password: bool, tone: str, says: str
) -> None:
    assert (stage.can_apply, stage.can_undo, stage.asks_password) == (apply, undo, password)
    verdict = stage.judge()
    assert (verdict[0] if verdict else "") == tone
    assert says in (verdict[1] if verdict else "")


def test_a_script_of_windows_is_shown_and_never_applied() -> None:
    script = Repair(id="w", title="W", explanation="", where="windows", script="Set-It\nDo-It")
    stage = RepairStage(offer=Offer("a", script, (ROW,)))
    assert stage.lines == ("Set-It", "Do-It")
    assert not stage.can_apply
    assert "PowerShell" in (stage.judge() or ("", "", ""))[1]
