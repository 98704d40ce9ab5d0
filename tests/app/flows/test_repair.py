"""What a person is asked and told about repairs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.contract.repair import (
    Change,
    ChangeStep,
    FileEdit,
    RepairPreview,
    RepairStep,
    StepPreview,
)
from app.flows import repair as flow
from app.provisioning.check_row import make_row
from app.provisioning.network_repairs import open_ufw, set_mtu
from app.provisioning.repairs import Repair, install_driver
from app.provisioning.system_repairs import synchronise_clock

EDIT = FileEdit(
    path="/etc/hosts", swap=(("^127.0.1.1", "10.0.0.5"),), add=("# end",), activate=("reload", "it")
)
STEPS = (RepairStep(says="Correct it", edit=EDIT), RepairStep(says="Say so", run=("echo", "a b")))
REPAIR = Repair(id="hosts", title="Correct hosts", explanation="It helps.", steps=STEPS)


def shown(*states: str, admin: str = "root") -> RepairPreview:
    steps = tuple(StepPreview(state=state) for state in states)  # type: ignore[arg-type]
    return RepairPreview(steps=steps, admin=admin)  # type: ignore[arg-type]


def test_one_repair_of_a_node_is_offered_once_and_only_for_what_is_wrong() -> None:
    clock, mtu = synchronise_clock(), set_mtu("eth0", 1400, 1500)
    rows = (
        make_row("clock", "a", "warn", "late", repair=clock),
        make_row("mtu", "a", "warn", "small", repair=mtu),
        make_row("sync", "a", "fail", "off", repair=clock),
        make_row("clock", "b", "pass", "well", repair=clock),
        make_row("disk", "b", "fail", "full"),
        make_row("tcp", "a", "fail", "closed", repair=open_ufw("b", "10.0.0.1")),
    )
    offers = flow.collect_offers(rows)
    assert [(one.node, one.repair.id) for one in offers] == [
        ("a", "time-sync"),
        ("a", "mtu-eth0"),
        ("b", "firewall-10.0.0.1"),
    ]
    assert [row.check for row in offers[0].rows] == ["clock", "sync"]


def test_steps_are_shown_as_they_will_be_on_the_node() -> None:
    before = "one\ntwo\n127.0.1.1 pc\nthree\n"
    preview = StepPreview(state="needed", before=before, after=EDIT.apply_to(before))
    known = RepairPreview(steps=(preview, StepPreview(state="in place")), admin="root")
    assert flow.describe_steps(REPAIR, known) == (
        "Correct it (as administrator):",
        "    change /etc/hosts",
        "    @@ -1,4 +1,5 @@",
        "     one",
        "     two",
        "    -127.0.1.1 pc",
        "    +10.0.0.5 pc",
        "     three",
        "    +# end",
        "    sudo reload it",
        "Say so: in place already",
    )
    assert flow.describe_steps(REPAIR)[1:4] == (
        "    change /etc/hosts",
        "    ^127.0.1.1 becomes 10.0.0.5",
        "    +# end",
    )
    assert flow.describe_steps(REPAIR)[-1] == "    sudo echo 'a b'"


def test_a_password_is_wanted_only_for_what_is_left_to_do() -> None:
    assert flow.needs_password(REPAIR, shown("in place", "needed", admin="password"))
    assert not flow.needs_password(REPAIR, shown("in place", "in place", admin="password"))
    assert not flow.needs_password(REPAIR, shown("needed", "needed", admin="passwordless"))


def test_what_stands_in_the_way_is_said() -> None:
    offer = flow.Offer("a", REPAIR, ())
    assert flow.find_obstacle(offer, shown("needed", "needed")) == ""
    assert "to do this: sudo echo 'a b'; change /etc/hosts (Correct it)" in flow.find_obstacle(
        offer, shown("needed", "needed", admin="none")
    )
    step = StepPreview(state="blocked", problem="There is no folder.")
    assert flow.find_obstacle(offer, RepairPreview(steps=(step,), admin="root")) == step.problem


def change(**values: object) -> Change:
    done = tuple(ChangeStep(step=step, state="done") for step in STEPS)
    made = Change(number=3, repair="hosts", title="T", by="me", began_s=5, ended_s=6, steps=done)
    return replace(made, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "says", "undoable"),
    [
        ({}, "in force", True),
        ({"ended_s": None}, "interrupted", True),
        ({"problem": "no"}, "failed in part", True),
        ({"problem": "no", "steps": ()}, "failed", False),
        ({"steps": (ChangeStep(step=STEPS[1], state="done"),)}, "in force", False),
        ({"undone_s": 9.0}, "undone", False),
        ({"undone_s": 9.0, "undo_problem": "it stays"}, "undone in part", False),
        ({"undo_problem": "no"}, "could not be undone", True),
    ],
)
def test_the_state_of_a_change(values: dict[str, object], says: str, undoable: bool) -> None:
    assert flow.show_state(change(**values)) == says
    assert flow.can_undo(change(**values)) == undoable
    assert says in flow.describe_change(change(**values), 10.0)


def test_a_record_shows_what_was_done_and_printed() -> None:
    edited = ChangeStep(
        step=STEPS[0], state="done", path="/etc/hosts", before="a\n", after="b\n", undone="yes"
    )
    failed = ChangeStep(step=STEPS[1], state="failed", exit_code=2, output="oh\nno")
    found = flow.describe_change_steps(change(steps=(edited, failed), problem="Say so: no."))
    assert found == (
        "Correct it: done, undone",
        "    change /etc/hosts",
        "    @@ -1 +1 @@",
        "    -a",
        "    +b",
        "Say so: failed, exit code 2",
        "    sudo echo 'a b'",
        "    | oh",
        "    | no",
        "Say so: no.",
    )


def test_a_restart_is_waited_for_only_until_it_happened() -> None:
    driver = install_driver()
    made = change(repair=driver.id, steps=())
    assert flow.waits_for_restart(driver, [made], 4.0)
    assert not flow.waits_for_restart(driver, [made], 7.0)
    assert not flow.waits_for_restart(driver, [made], None)
    assert not flow.waits_for_restart(driver, [change(repair=driver.id, problem="no")], 4.0)
    assert not flow.waits_for_restart(REPAIR, [change()], 4.0)
