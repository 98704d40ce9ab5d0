"""Nodes as a check sees them: what they said of themselves, with parts replaced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agents.contract.node import EnvironmentReport, InterfaceFacts, NodeFacts
from agents.contract.requests.examination import (
    DeviceFacts,
    DriverFacts,
    Examination,
    NetworkFacts,
    SystemFacts,
    WslFacts,
)
from app.nodes.endpoints import Endpoint
from app.provisioning.check_row import CheckedGroup, CheckedNode

CARD = DeviceFacts(
    name="eth0",
    kind="ethernet",
    mtu=1500,
    speed_mbit=1000,
    best_speed_mbit=1000,
    is_full_duplex=True,
    has_carrier=True,
    packets=10**6,
    errors=0,
    dropped=0,
    carrier_losses=1,
)
FACTS = NodeFacts(
    hostname="pc",
    os="Ubuntu",
    kernel="6",
    python="3.12",
    architecture="x86_64",
    memory_bytes=32 << 30,
    memory_available_bytes=24 << 30,
    machine_id="m",
)
SYSTEM = SystemFacts(
    sudo="password",
    home="/home/u/.rackless",
    home_writable=True,
    home_executable=True,
    home_file_system="ext4",
    inodes=10**7,
    inodes_free=10**6,
    swap_bytes=8 << 30,
    shm_bytes=16 << 30,
    shm_free_bytes=16 << 30,
    clock_synchronised=True,
    clock_service="on",
    boot_id="b",
    hostname_addresses=("10.0.0.1",),
    first_process="systemd",
    ends_at_logout=False,
    lingers=False,
    may_sleep=False,
    temporary_folder="/tmp",
    temporary_free_bytes=8 << 30,
    temporary_writable=True,
    max_open_files=1024,
    max_processes=60_000,
    max_address_bytes=2**63 - 1,
)


def system_with(**changes: Any) -> Examination:
    return Examination(system=replace(SYSTEM, **changes))


def network_with(*devices: DeviceFacts, **changes: Any) -> Examination:
    network = NetworkFacts(devices=devices, port_range=(32768, 60999), rdma=())
    return Examination(system=SYSTEM, network=replace(network, **changes))


def driver_with(**changes: Any) -> Examination:
    return Examination(system=SYSTEM, driver=DriverFacts(**changes))


def wsl_with(**changes: Any) -> Examination:
    return Examination(system=SYSTEM, wsl=WslFacts(**changes))


def checked(
    examination: Examination | None = None,
    *,
    name: str = "a",
    address: str = "10.0.0.1",
    facts: NodeFacts = FACTS,
) -> CheckedNode:
    device = InterfaceFacts(name="eth0", address=address, mtu=1500)
    return CheckedNode(
        name=name,
        facts=replace(facts, interfaces=facts.interfaces or (device,)),
        environment=EnvironmentReport(python="/p", python_version="3.12.1", fits=True),
        examination=network_with(CARD) if examination is None else examination,
        round_trip_s=0.001,
        skew_s=0.0,
        num_nodes=2,
    )


def group_of(*nodes: CheckedNode, interface: str | None = "eth0") -> CheckedGroup:
    """Nodes whose first address is the one for training."""
    return CheckedGroup(
        clients={},
        nodes={node.name: node for node in nodes},
        endpoints={
            node.name: Endpoint(address=node.facts.interfaces[0].address, interface=interface)
            for node in nodes
        },
        reduce_timeout_s=1.0,
    )
