"""A few of the faults, each of another kind; `python -m tests.faulty_nodes` tries all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faulty_nodes.fault import Fault, names_fault, try_fault
from tests.faulty_nodes.network_faults import NETWORK_FAULTS
from tests.faulty_nodes.site import Checked, FaultySite
from tests.faulty_nodes.system_faults import SYSTEM_FAULTS

FEW = ("port blocked one way", "noexec home")
FAULTS = {fault.name: fault for fault in (*NETWORK_FAULTS, *SYSTEM_FAULTS)}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FaultySite, Checked]]:
    with FaultySite(tmp_path_factory.mktemp("site"), 2, with_torch=False) as made:
        yield made, made.check()


@pytest.mark.campaign
@pytest.mark.netns
def test_a_few_faults_are_named(site: tuple[FaultySite, Checked]) -> None:
    made, healthy = site
    # Without an environment, which would take too long here, nothing else is wrong.
    assert {check for check, _ in healthy.failed()} == {"environment"}
    for name in FEW:
        verdict = try_fault(made, FAULTS[name], healthy)
        assert verdict.is_good, f"{name}: {verdict.found}, {verdict.others}"


def test_a_row_names_a_fault_only_with_its_cause_and_a_fix() -> None:
    fault = Fault(
        name="f", inject=lambda site, stack: None, check="tcp", status="fail", says="MTU", peer="b"
    )
    row = {
        **{"check": "tcp", "node": "node1", "peer": "b", "status": "fail"},
        **{"message": "MTU black hole", "fix": "do"},
    }
    assert names_fault(fault, row)
    for change in ({"status": "pass"}, {"peer": "c"}, {"message": "slow"}, {"fix": ""}):
        assert not names_fault(fault, row | change)


def test_there_are_enough_faults_of_different_names() -> None:
    assert len(FAULTS) == len(NETWORK_FAULTS) + len(SYSTEM_FAULTS) >= 30
