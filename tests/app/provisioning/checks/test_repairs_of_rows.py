"""Which rows of the check carry a repair, with which values, and which do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.contract.node import LinkProbe
from agents.contract.requests.examination import Examination
from app.provisioning.checks import gpu, links, network, system
from app.provisioning.network_repairs import keep_wifi_awake, open_ufw, widen_ports
from app.provisioning.repairs import Repair, install_driver, keep_driver_loaded
from app.provisioning.system_repairs import (
    add_swap,
    forbid_sleep,
    grow_shared_memory,
    keep_after_logout,
    name_own_address,
    synchronise_clock,
)
from tests.fakes.checked import (
    CARD,
    FACTS,
    checked,
    driver_with,
    group_of,
    network_with,
    system_with,
)

UBUNTU = replace(FACTS, os="Ubuntu 24.04.3 LTS", address="10.0.0.1")
DEBIAN = replace(FACTS, os="Debian GNU/Linux 13 (trixie)")
LITTLE = replace(FACTS, memory_bytes=16 << 30)
WSL = replace(UBUNTU, wsl="mirrored", memory_bytes=16 << 30)
UNSYNCED = {"clock_synchronised": False}


@pytest.mark.parametrize(
    ("judge", "examination", "facts", "repair"),
    [
        (system.judge_swap, system_with(swap_bytes=0), LITTLE, add_swap()),
        (system.judge_swap, system_with(swap_bytes=0), WSL, None),
        (
            system.judge_shm,
            system_with(shm_bytes=64 << 20, shm_free_bytes=64 << 20),
            FACTS,
            grow_shared_memory(64 << 20, 32 << 30),
        ),
        (system.judge_shm, system_with(shm_bytes=16 << 30, shm_free_bytes=1), FACTS, None),
        (
            system.judge_sync,
            system_with(**UNSYNCED, clock_service="none"),
            FACTS,
            synchronise_clock(has_service=False),
        ),
        (system.judge_sync, system_with(**UNSYNCED, clock_service="on"), FACTS, None),
        (
            system.judge_hostname,
            system_with(hostname_addresses=("127.0.1.1",)),
            UBUNTU,
            name_own_address("pc", "10.0.0.1"),
        ),
        (system.judge_hostname, system_with(hostname_addresses=("127.0.0.1",)), UBUNTU, None),
        (system.judge_hostname, system_with(hostname_addresses=("127.0.1.1",)), FACTS, None),
        (system.judge_sleep, system_with(may_sleep=True), FACTS, forbid_sleep()),
        (
            system.judge_logout,
            system_with(ends_at_logout=True, user="anna"),
            FACTS,
            keep_after_logout("anna"),
        ),
        (
            network.judge_ports,
            network_with(CARD, port_range=(60000, 60099)),
            FACTS,
            widen_ports((60000, 60099)),
        ),
        (gpu.judge_persistence, driver_with(persistence=False), FACTS, keep_driver_loaded()),
        (gpu.judge_driver, driver_with(num_cards=1, nouveau=True), UBUNTU, install_driver()),
        (gpu.judge_driver, driver_with(num_cards=1, nouveau=True), DEBIAN, None),
    ],
)
def test_a_row_carries_its_repair(
    judge: object, examination: Examination, facts: object, repair: Repair | None
) -> None:
    (row,) = judge(checked(examination, facts=facts))  # type: ignore[operator, arg-type]
    assert row.status in ("warn", "fail")
    assert row.repair == repair


def test_the_driver_has_a_row_only_where_its_mode_is_known() -> None:
    assert gpu.judge_persistence(checked(driver_with())) == ()
    assert gpu.judge_persistence(checked(driver_with(persistence=False), facts=WSL)) == ()
    (row,) = gpu.judge_persistence(checked(driver_with(persistence=True)))
    assert row.status == "pass"


def test_wifi_that_saves_power_can_be_kept_awake() -> None:
    card = replace(CARD, kind="wifi", saves_power=True)
    row, _ = network.judge_interfaces(group_of(checked(network_with(card)), checked(name="b")))
    assert row.repair == keep_wifi_awake("eth0")
    assert "cable" in row.fix
    assert "power_save off" in row.fix


@pytest.mark.parametrize(
    ("firewall", "facts", "failure", "repair"),
    [
        ("ufw", FACTS, "dropped", open_ufw("b", "10.0.0.1")),
        ("none", FACTS, "dropped", None),
        ("ufw", WSL, "dropped", None),
        ("ufw", FACTS, "stalled", None),
    ],
)
def test_a_firewall_is_opened_on_the_node_that_is_called(
    firewall: str, facts: object, failure: str, repair: Repair | None
) -> None:
    peer = checked(
        network_with(CARD, firewall=firewall),
        name="b",
        address="10.0.0.2",
        facts=facts,  # type: ignore[arg-type]
    )
    probe = LinkProbe(failure=failure, reason="no answer")  # type: ignore[arg-type]
    row = links.judge_link(group_of(checked(), peer), "a", "b", probe)
    assert row.repair == repair
