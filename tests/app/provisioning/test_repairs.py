"""What repairs say of themselves, and what their steps do where their commands are played."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from agents.children import Children
from agents.contract.repair import RepairOrder, RepairStep, UndoOrder
from agents.node.administrator import Administrator
from agents.node.repair import apply, preview, undo
from agents.state import Home
from app.provisioning.network_repairs import keep_wifi_awake, open_ufw, set_mtu, widen_ports
from app.provisioning.repairs import (
    Repair,
    install_compiler,
    install_driver,
    keep_driver_loaded,
    show_command,
)
from app.provisioning.system_repairs import (
    add_swap,
    forbid_sleep,
    grow_shared_memory,
    keep_after_logout,
    name_own_address,
    renew_machine_id,
    synchronise_clock,
)

HOSTS = "127.0.0.1\tlocalhost\n127.0.1.1\tpc1.lan pc1\n10.0.0.9 pc10\n"
REPAIRS = (
    synchronise_clock(has_service=False),
    install_compiler("3.12"),
    keep_driver_loaded(),
    set_mtu("eth0", 1400, 1500),
    open_ufw("a", "10.0.0.2"),
    keep_wifi_awake("wlan0"),
    widen_ports((60000, 60999)),
    name_own_address("pc1", "10.0.0.5"),
    forbid_sleep(),
    renew_machine_id("hash", "boot"),
    keep_after_logout("anna"),
    add_swap(),
)
# Each keeps one state per name in a folder, in the words of the real command.
PLAYED = {
    "timedatectl": "case $1 in show) cat ntp;; set-ntp) [ $2 = true ] && echo yes >ntp ||"
    " echo no >ntp;; esac",
    "dpkg-query": 'shift 3; for p; do cat "pkg-$p" || exit 1; done',
    "apt-get": 'case $1 in install) echo installed >"pkg-$3";; remove) rm "pkg-$3";; esac',
    "nvidia-smi": "case $1$2 in -pm1) echo Enabled >pm;; -pm0) echo Disabled >pm;;"
    " *) cat pm;; esac",
    "ip": "case $2 in route) cat route;; *) echo $6 >mtu;; esac",
    "ufw": 'case $1 in status) cat ufw;; allow) echo "Anywhere  ALLOW  $5/tcp" >>ufw;;'
    " delete) echo Status: active >ufw;; esac",
    "iw": 'case $3 in get) cat iw;; set) echo "Power save: $5" >iw;; esac',
    "sysctl": 'case $1 in -n) cat ports;; -w) echo "${2#*=}" >ports;; esac',
    "systemctl": 'case $1 in show) cat "$5";; mask) echo masked >"$2";;'
    ' unmask) echo loaded >"$2";; esac',
    "loginctl": 'case $1 in enable-linger) echo >"linger-$2";; *) rm "linger-$2";; esac',
    "fallocate": 'truncate -s "$2" swapfile',
    "mkswap": "true",
    "swapon": 'case $1 in --show*) cat swaps;; *) echo "$1" >swaps;; esac',
    "swapoff": ": >swaps",
}
BEFORE = {
    "ntp": "no",
    "pm": "Disabled",
    "mtu": "1400",
    "ufw": "Status: active",
    "iw": "Power save: on",
    "route": "10.0.0.2 dev eth0 src 10.0.0.1 uid 0",
    "ports": "60000 60999",
    "swaps": "",
    **dict.fromkeys(("sleep.target", "suspend.target", "hibernate.target"), "loaded"),
    "hybrid-sleep.target": "masked",
}


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with the state of a PC whose commands are played."""
    state, programs = tmp_path / "state", tmp_path / "bin"
    for folder in (state, programs, tmp_path / "home", state / "etc" / "sysctl.d"):
        folder.mkdir(parents=True)
    for name, text in BEFORE.items():
        (state / name).write_text(f"{text}\n" if text else "", encoding="utf-8")
    (state / "etc" / "hosts").write_text(HOSTS, encoding="utf-8")
    (state / "etc" / "fstab").write_text("UUID=1 / ext4 defaults 0 1\n", encoding="utf-8")
    for name, body in PLAYED.items():
        (programs / name).write_text(f"#!/bin/sh\ncd {state}\n{body}\n", encoding="utf-8")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return state


def moved(step: RepairStep, state: Path) -> RepairStep:
    """Return a step with its files in the folder of the played PC, without root."""

    def move(argv: tuple[str, ...]) -> tuple[str, ...]:
        names = {
            "/rackless.swap": "swapfile",
            "/sys/class/net/eth0/mtu": "mtu",
            "/var/lib/systemd/linger/anna": "linger-anna",
        }
        plays = argv[:1] and argv[0] in PLAYED
        return tuple(str(state / names[a]) if a in names and not plays else a for a in argv)

    done = step.done and replace(step.done, argv=move(step.done.argv), as_root=False)
    needs = tuple(replace(one, argv=move(one.argv), as_root=False) for one in step.needs)
    edit = step.edit and replace(step.edit, path=f"{state}{step.edit.path}")
    run, undo = move(step.run), move(step.undo)
    return replace(step, run=run, undo=undo, done=done, needs=needs, edit=edit, as_root=False)


def content_of(state: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(state)): path.read_bytes()
        for path in sorted(state.rglob("*"))
        if path.is_file() and path.stat().st_size < 1 << 20
    }


@pytest.mark.parametrize("repair", REPAIRS, ids=lambda repair: repair.id)
def test_a_repair_works_once_and_is_undone_without_a_trace(repair: Repair, played: Path) -> None:
    if repair.id == "swap" and shutil.which("fallocate") is None:
        pytest.skip("no fallocate")
    admin = Administrator(Children())
    steps = tuple(moved(step, played) for step in repair.steps)
    home = Home(played.parent / "home")
    order = RepairOrder(
        repair=repair.id, title=repair.title, by="me", steps=steps, expected=("",) * len(steps)
    )
    before = content_of(played)
    change = apply(home, order, admin, lambda said: None)
    assert change.problem == ""
    assert change.did_something
    repaired = content_of(played)
    assert repaired != before
    assert {step.state for step in preview(steps, admin).steps} == {"in place"}
    assert not apply(home, order, admin, lambda said: None).did_something
    assert content_of(played) == repaired
    (undone,) = undo(home, UndoOrder(), admin, lambda said: None)
    assert undone.undo_problem == ""
    assert content_of(played) == before
    assert not (played / "swapfile").exists()


@pytest.mark.parametrize(
    ("repair", "name", "text"),
    [
        (set_mtu("eth0", 1400, 1500), "mtu", "9000"),
        (open_ufw("a", "203.0.113.9"), "route", "203.0.113.9 via 10.0.0.254 dev eth0 src 10.0.0.1"),
        (open_ufw("a", "10.0.0.2"), "route", "unreachable 10.0.0.2"),
    ],
)
def test_a_repair_changes_nothing_unless_this_pc_itself_is_as_the_check_said(
    repair: Repair, name: str, text: str, played: Path
) -> None:
    (played / name).write_text(text, encoding="utf-8")
    before = content_of(played)
    steps = tuple(moved(step, played) for step in repair.steps)
    order = RepairOrder(
        repair=repair.id, title=repair.title, by="me", steps=steps, expected=("",) * len(steps)
    )
    home = Home(played.parent / "home")
    change = apply(home, order, Administrator(Children()), lambda said: None)
    assert "this PC is not as the check said" in change.problem
    assert not change.did_something
    assert content_of(played) == before


def test_the_own_name_is_moved_off_loopback_and_nothing_else() -> None:
    edit = name_own_address("pc1", "10.0.0.5").steps[0].edit
    assert edit is not None
    assert edit.apply_to(HOSTS) == HOSTS.replace("127.0.1.1", "10.0.0.5")
    assert name_own_address("pc", "10.0.0.5").steps[0].edit.apply_to(HOSTS) == HOSTS  # type: ignore[union-attr]


def test_a_rule_of_ufw_is_recognised_for_its_address_alone() -> None:
    probe = open_ufw("a", "10.0.0.2").steps[0].done
    assert probe is not None
    table = (
        "Status: active\n\nTo      Action  From\n--      ------  ----\n{}\n22/tcp  ALLOW  Anywhere"
    )
    for line, found in (
        ("Anywhere/tcp               ALLOW       10.0.0.2/tcp", True),
        ("Anywhere/tcp               ALLOW       10.0.0.20/tcp", False),
        ("22/tcp                     ALLOW       10.0.0.2", False),
        ("Anywhere                   DENY        10.0.0.2", False),
    ):
        assert bool(re.fullmatch(probe.shows, table.format(line))) == found, line


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
    assert grow_shared_memory(64 << 20, 32 << 30).not_undone == ()
