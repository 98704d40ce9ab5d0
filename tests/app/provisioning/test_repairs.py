"""What repairs say of themselves."""

from __future__ import annotations

import pytest

from agents.contract.repair import RepairStep
from app.provisioning.repairs import (
    Repair,
    install_compiler,
    install_driver,
    set_mtu,
    show_command,
    synchronise_clock,
)


def test_a_repair_says_whether_an_administrator_is_needed() -> None:
    as_user = RepairStep(says="Look", run=("true",), as_root=False)
    assert synchronise_clock().needs_admin
    assert not Repair(id="a", title="", explanation="", steps=(as_user,)).needs_admin
    assert Repair(id="a", title="", explanation="", where="windows", script="x").needs_admin


def test_a_repair_has_what_its_place_needs() -> None:
    step = RepairStep(says="Look", run=("true",))
    for fields in (
        {},
        {"where": "person", "steps": (step,)},
        {"where": "windows"},
        {"steps": (step,), "script": "x"},
    ):
        with pytest.raises(ValueError, match="repair a"):
            Repair(id="a", title="", explanation="", **fields)  # type: ignore[arg-type]


def test_commands_are_shown_as_a_person_types_them() -> None:
    repair = install_compiler("3.12")
    shown = [show_command(step) for step in repair.steps]
    assert shown[-1] == "sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y python3.12-dev"
    assert show_command(set_mtu("eth0", 1400, 1500).steps[0], is_undo=True) == (
        "sudo ip link set dev eth0 mtu 1400"
    )


def test_what_stays_after_undoing_is_said() -> None:
    assert install_compiler("3.12").not_undone == ()
    assert install_driver().not_undone == ("Install the driver that Ubuntu recommends",)
