"""A few of the faults, each of another kind; `python -m tests.faulty_nodes` tries all of them."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.master import ROOT
from tests.faulty_nodes.__main__ import FAULTS
from tests.faulty_nodes.fault import Fault, Mended, Verdict, names_fault
from tests.faulty_nodes.home_faults import ODDITIES
from tests.faulty_nodes.mending import Desk, find_repairs, try_fault
from tests.faulty_nodes.report import Results, describe, show_table
from tests.faulty_nodes.site import PASSWORD, Checked, FaultySite
from tests.faulty_nodes.state import hash_tree

FEW = ("few ports", "noexec home")
BY_NAME = {fault.name: fault for fault in FAULTS}
FAULT = Fault(
    name="f",
    inject=lambda site, stack: None,
    check="tcp",
    status="fail",
    says="MTU",
    peer="b",
    repair="mtu-",
)
ROW: dict[str, Any] = {
    **{"check": "tcp", "node": "node1", "peer": "b", "status": "fail"},
    **{"message": "MTU black hole", "fix": "do"},
    "repair": {"id": "mtu-eth0", "node": "", "title": "Send less", "where": "node"},
}
GOOD = Verdict(
    fault=FAULT, seconds=1.0, found=ROW, others=(), mended=Mended(commands=("ip",), retest="pass")
)


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[FaultySite, Checked]]:
    # Not below pytest's own folder, which other users cannot pass through.
    with (
        tempfile.TemporaryDirectory(prefix="rackless-faults-") as folder,
        FaultySite(Path(folder), 2, with_torch=False) as made,
    ):
        yield made, made.check()


@pytest.mark.campaign
@pytest.mark.netns
@pytest.mark.parametrize("name", FEW)
def test_a_fault_is_named_repaired_and_comes_back_with_the_undo(
    site: tuple[FaultySite, Checked], name: str
) -> None:
    made, healthy = site
    # Without an environment, which would take too long here, nothing else is wrong.
    assert {check for check, _ in healthy.failed()} == {"environment"}
    verdict = try_fault(made, BY_NAME[name], healthy)
    assert verdict.is_good, describe(verdict)
    assert bool(verdict.mended.undo) == bool(BY_NAME[name].repair)


def test_a_row_names_a_fault_only_with_its_cause_and_a_fix() -> None:
    assert names_fault(FAULT, ROW)
    for change in ({"status": "pass"}, {"peer": "c"}, {"message": "slow"}, {"fix": ""}):
        assert not names_fault(FAULT, ROW | change)


def test_only_the_repairs_of_a_fault_are_agreed_to() -> None:
    other = ROW | {"repair": {**ROW["repair"], "id": "ports", "title": "More ports"}}
    peer = ROW | {"repair": {**ROW["repair"], "node": "node2"}}
    script = ROW | {"repair": {**ROW["repair"], "where": "windows"}}
    found = find_repairs(FAULT, [ROW, other, peer, script, ROW | {"repair": None}])
    assert found == {("node1", "mtu-eth0"): "Send less", ("node2", "mtu-eth0"): "Send less"}

    desk = Desk({"\nnode1: Send less\n"})
    question = "Apply this? [y/N] "
    assert desk.type("\nnode1: Send less\nWhy.\nSet it:\n    sudo ip link") is None
    assert desk.type(f"\nnode1: More ports\nSet:\n    sudo sysctl\n{question}") == "n"
    assert desk.type(f"\nnode1: Send less\nSet:\n    sudo ip link\n{question}") == "y"
    assert desk.type("Password for sudo on node1: ") == PASSWORD
    assert (desk.commands, desk.num_applied, desk.num_passwords) == (["sudo ip link"], 1, 1)


def test_the_state_of_a_folder_has_modes_and_contents(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("1")
    file.chmod(0o644)
    (tmp_path / "b").symlink_to("a")
    first = hash_tree(tmp_path)
    file.chmod(0o600)
    other_mode = hash_tree(tmp_path)
    file.write_text("2")
    (tmp_path / "b").unlink()
    other_text = hash_tree(tmp_path)
    assert len({first, other_mode, other_text}) == 3
    file.write_text("1")
    file.chmod(0o644)
    (tmp_path / "b").symlink_to("a")
    assert hash_tree(tmp_path) == first


def test_one_thing_that_is_wrong_spoils_the_results() -> None:
    clean = {"seconds": 1.0, "statuses": {}, "false": []}
    assert Results(verdicts=[GOOD], oddities={"odd": ()}, clean=[clean]).are_good
    bad = Mended(retest="fail", problem="it is still there")
    assert not Results(verdicts=[replace(GOOD, mended=bad)]).are_good
    assert not Results(verdicts=[replace(GOOD, found=None)]).are_good
    assert not Results(verdicts=[replace(GOOD, others=("disk node2",))]).are_good
    assert not Results(oddities={"odd": ("home node1 fail",)}).are_good
    assert not Results(clean=[clean | {"false": [ROW]}]).are_good
    assert not Results(left=[("disk", "node1", "fail")]).are_good
    assert "MISS" in show_table([replace(GOOD, mended=bad)])
    assert "problem: it is still there" in describe(replace(GOOD, mended=bad))


def test_faults_have_names_of_their_own_and_try_each_repair_of_the_documentation() -> None:
    assert len(BY_NAME) == len(FAULTS) >= 60
    assert not BY_NAME.keys() & ODDITIES.keys()
    page = (ROOT / "docs/repairs.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+`) \|", page, re.MULTILINE)
    tried = {fault.check for fault in FAULTS if fault.repair}
    assert len(rows) > 10
    assert [row for row in rows if not tried & set(re.findall(r"`([^`]+)`", row))] == []
