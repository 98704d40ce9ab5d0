"""Rows about network devices, ways and links."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from agents.contract.node import InterfaceFacts, LinkProbe, NodeFacts
from agents.contract.requests.examination import NO_LIMIT, DeviceFacts, RdmaFacts, Route, Sudo
from agents.contract.wire import from_wire, to_wire
from app.nodes.client import NodeClient
from app.provisioning.check_row import CheckedGroup
from app.provisioning.checks import links, network
from app.provisioning.checks.links import interleave, judge_link
from app.provisioning.network_repairs import set_mtu
from tests.fakes.checked import CARD, FACTS, checked, group_of, network_with


def pair_of(**changes: Any) -> CheckedGroup:
    """Two nodes; the device of the first one has other values."""
    return group_of(
        checked(network_with(replace(CARD, **changes))), checked(name="b", address="10.0.0.2")
    )


@pytest.mark.parametrize(
    ("judge", "changes", "status", "says"),
    [
        ("interfaces", {}, "pass", "eth0 (a network card) joins the nodes at 10.0.0.1"),
        ("interfaces", {"kind": "wifi"}, "warn", "Wi-Fi"),
        ("interfaces", {"kind": "vpn"}, "warn", "a VPN"),
        ("interfaces", {"kind": "bridge"}, "warn", "containers"),
        ("interfaces", {"kind": "wifi", "saves_power": True}, "warn", "it sleeps between packets"),
        ("interfaces", {"has_carrier": False}, "fail", "no link"),
        ("interfaces", {"kind": None}, "unknown", "is not known"),
        ("carriers", {}, "pass", "linked at 1000 Mb/s"),
        ("carriers", {"speed_mbit": 100}, "warn", "could do 1000 Mb/s, but its link runs at 100"),
        ("carriers", {"speed_mbit": 100, "best_speed_mbit": 100}, "warn", "at 100 Mb/s only"),
        ("carriers", {"is_full_duplex": False}, "warn", "half duplex"),
        ("carriers", {"speed_mbit": None}, "unknown", "does not report"),
        ("errors", {}, "pass", "0 of 1000000"),
        ("errors", {"errors": 19, "packets": 1000}, "pass", "19 of 1000"),
        ("errors", {"errors": 400}, "warn", "damages packets"),
        ("errors", {"carrier_losses": 300}, "warn", "lost its link 300 times"),
        ("errors", {"errors": None}, "unknown", "could not be read"),
    ],
)
def test_device_that_joins_the_nodes(
    judge: str, changes: dict[str, Any], status: str, says: str
) -> None:
    row, other = getattr(network, f"judge_{judge}")(pair_of(**changes))
    assert (row.node, row.status, other.status) == ("a", status, "pass")
    assert says in row.message
    assert (row.fix == "") == (status == "pass")


def test_a_better_network_is_named() -> None:
    tunnel = replace(CARD, name="wg0", kind="vpn")
    nodes = [
        checked(
            network_with(tunnel, CARD),
            name=name,
            facts=replace(
                FACTS,
                interfaces=(
                    InterfaceFacts(name="wg0", address=f"10.9.0.{number}"),
                    InterfaceFacts(name="eth0", address=f"192.168.1.{number}"),
                ),
            ),
        )
        for number, name in enumerate("ab", 1)
    ]
    row, _ = network.judge_interfaces(group_of(*nodes, interface="wg0"))
    assert row.status == "warn"
    assert "although eth0 at 192.168.1.1 joins them, too" in row.message
    assert "--ssh USER@192.168.1.1" in row.fix
    lost, _ = network.judge_interfaces(group_of(*nodes, interface=None))
    assert lost.status == "fail"
    assert network.judge_interfaces(group_of(nodes[0])) == ()


@pytest.mark.parametrize(
    ("route", "status", "says"),
    [
        (Route(address="10.0.0.2", device="eth0"), "pass", "eth0 leads to all"),
        (Route(address="10.0.0.2", device="tun0"), "warn", "leave by tun0 (a VPN), not by eth0"),
        (Route(address="10.0.0.2", device="eth0", gateway="10.0.0.9"), "warn", "pass a router"),
        (Route(address="10.0.0.2", device="eth0", mtu=1280), "warn", "packets of 1280 bytes"),
        (Route(address="10.0.0.2"), "fail", "no route from here to b"),
    ],
)
def test_way_to_another_node(route: Route, status: str, says: str) -> None:
    tunnel = DeviceFacts(name="tun0", kind="vpn")
    group = group_of(checked(network_with(CARD, tunnel)), checked(name="b"), checked(name="c"))
    near = Route(address="10.0.0.3", device="eth0")
    row = network.judge_routes(group, "a", {"b": route, "c": near})
    assert row.status == status
    assert says in row.message
    unknown = network.judge_routes(group, "a", {"b": Route(address="10.0.0.2")})
    assert unknown.status == "unknown"


def test_the_node_with_another_packet_size_is_named() -> None:
    nodes = [
        checked(
            name=name,
            facts=replace(
                FACTS, interfaces=(InterfaceFacts(name="eth0", address="10.0.0.1", mtu=mtu),)
            ),
        )
        for name, mtu in (("a", 1500), ("b", 9000), ("c", 1500), ("d", None))
    ]
    rows = {row.node: row for row in network.judge_mtus(group_of(*nodes))}
    statuses = {name: row.status for name, row in rows.items()}
    assert statuses == {"a": "pass", "b": "warn", "c": "pass", "d": "unknown"}
    assert rows["b"].repair == set_mtu("eth0", 9000, 1500)
    (jumbo,) = network.judge_mtus(group_of(nodes[1]))
    assert "jumbo frames" in jumbo.message


@pytest.mark.parametrize(
    ("mtus", "repaired"),
    [
        ((1500, 40), {}),  # two nodes: neither chooses for the other
        ((1500, 9000), {}),
        ((1500, 1500, 9000, 9000), {}),
        ((1500, 9000, 9000), {}),  # a majority, but of a size that only some networks pass
        ((1500, 1280, 1280), {}),
        ((1500, 1500, 1400), {"c": (1400, 1500)}),
        ((1500, 40, 40), {}),
    ],
)
def test_only_a_majority_with_the_usual_packet_size_gives_a_root_command(
    mtus: tuple[int, ...], repaired: dict[str, tuple[int, int]]
) -> None:
    nodes = [
        checked(
            name=name,
            facts=from_wire(
                NodeFacts,
                to_wire(
                    replace(
                        FACTS,
                        interfaces=(InterfaceFacts(name="eth0", address="10.0.0.1", mtu=mtu),),
                    )
                ),
            ),
        )
        for name, mtu in zip("abcd", mtus, strict=False)
    ]
    rows = {row.node: row for row in network.judge_mtus(group_of(*nodes))}
    assert {name: row.repair for name, row in rows.items() if row.repair} == {
        name: set_mtu("eth0", *sizes) for name, sizes in repaired.items()
    }
    commands = {name for name, row in rows.items() if "sudo ip link set dev" in row.fix}
    assert commands == set(repaired)


def test_cloned_disk_is_told_from_two_nodes_on_one_pc() -> None:
    def with_boot(name: str, boot: str) -> Any:
        node = checked(name=name)
        system = replace(node.examination.system, boot_id=boot)
        return replace(node, examination=replace(node.examination, system=system))

    one, same, clone = (with_boot(*pair) for pair in (("a", "1"), ("b", "1"), ("c", "2")))
    rows = network.judge_machines(group_of(one, same, clone))
    assert [row.status for row in rows] == ["pass", "pass", "warn"]
    assert "the machine id of a: its disk was cloned" in rows[2].message
    nameless = checked(facts=replace(FACTS, machine_id=None))
    (row,) = network.judge_machines(group_of(nameless))
    assert row.status == "unknown"


@pytest.mark.parametrize(
    ("locked", "sudo", "status"),
    [(8 << 20, "password", "warn"), (8 << 20, "root", "pass"), (NO_LIMIT, "none", "pass")],
)
def test_rdma_needs_memory_that_may_be_locked(locked: int, sudo: Sudo, status: str) -> None:
    ports = (RdmaFacts(name="mlx5_0", state="ACTIVE", rate="100 Gb/s", link="InfiniBand"),)
    node = checked(network_with(CARD, rdma=ports))
    system = replace(node.examination.system, max_locked_bytes=locked, sudo=sudo)
    examination = replace(node.examination, system=system)
    (row,) = network.judge_rdma(replace(node, examination=examination))
    assert row.status == status
    assert ("8.0 MiB of memory" in row.message) == ("memlock" in row.fix) == (status == "warn")


def test_ports_and_rdma() -> None:
    few = checked(network_with(CARD, port_range=(50000, 50100)))
    unknown = checked(network_with(CARD, port_range=None))
    statuses = [network.judge_ports(node)[0].status for node in (checked(), few, unknown)]
    assert statuses == ["pass", "warn", "unknown"]
    assert network.judge_rdma(checked()) == ()
    ports = (
        RdmaFacts(name="mlx5_0/1", state="ACTIVE", rate="100 Gb/sec", link="InfiniBand"),
        RdmaFacts(name="mlx5_1/1"),
    )
    active, lost = network.judge_rdma(checked(network_with(CARD, rdma=ports)))
    assert (active.status, lost.status) == ("pass", "unknown")
    assert "InfiniBand at 100 Gb/sec" in active.message


def test_each_of_several_cloned_pcs_gets_another_machine_id() -> None:
    cards = [(f"02:00:00:00:00:0{number}",) for number in range(7)]
    nodes = [
        checked(name=f"pc{number}", facts=replace(FACTS, macs=macs))
        for number, macs in enumerate(cards)
    ]
    first, *others = network.judge_machines(group_of(*nodes))
    assert (first.status, {row.status for row in others}) == ("pass", {"warn"})
    edits = [row.repair.steps[0].edit for row in others if row.repair]
    texts = {edit.content for edit in edits if edit}
    assert len(texts) == 6
    assert all(re.fullmatch("[0-9a-f]{32}\n", text or "") for text in texts)
    # The same offer at the next check, so that it is applied once.
    assert [row.repair for row in network.judge_machines(group_of(*nodes))][1:] == [
        row.repair for row in others
    ]


def test_a_host_key_of_two_pcs_is_named() -> None:
    def with_card(name: str, mac: str) -> Any:
        return checked(name=name, facts=replace(FACTS, macs=(mac,)))

    nodes = (with_card("a", "02:1"), with_card("b", "02:1"), with_card("c", "02:3"))
    group = replace(group_of(*nodes), host_keys={name: "SHA256:k" for name in "abc"})
    (row,) = network.judge_host_keys(group)  # b is the same PC as a
    assert (row.check, row.node, row.status) == ("host-key", "c", "warn")
    assert "the SSH host key of a, although their network cards differ" in row.message
    assert "sudo ssh-keygen -A" in row.fix
    own = replace(group, host_keys={name: f"SHA256:{name}" for name in "abc"})
    assert network.judge_host_keys(own) == ()


FAST = {"round_trip_s": 0.0003, "bytes_per_s": 112e6}


@pytest.mark.parametrize(
    ("peer", "probe", "status", "says"),
    [
        ("b", FAST, "pass", "112 MB/s"),
        ("b", {**FAST, "bytes_per_s": 12e6}, "warn", "than Gigabit"),
        ("b", {**FAST, "bytes_per_s": 40e6}, "warn", "than its network cards"),
        ("b", {**FAST, "round_trip_s": 0.050}, "warn", "than Gigabit"),
        ("a", {"round_trip_s": 0.050, "bytes_per_s": 1e6}, "pass", "1 MB/s"),
        ("b", {"round_trip_s": 0.0003}, "pass", "0.30 ms"),
        ("b", {"failure": "dropped"}, "fail", "a firewall on b drops"),
        ("b", {"failure": "refused"}, "fail", "a firewall on b rejects"),
        ("b", {"failure": "no_way", "reason": "No route"}, "fail", "no route to b"),
        ("b", {"failure": "broke", "reason": "reset"}, "fail", "broke: reset"),
        ("b", {"failure": "stalled"}, "fail", "then nothing passes"),
        ("a", {"failure": "dropped"}, "fail", "its own address 10.0.0.1"),
    ],
)
def test_link(peer: str, probe: dict[str, Any], status: str, says: str) -> None:
    row = judge_link(pair_of(), "a", peer, LinkProbe(**probe))
    assert (row.check, row.node, row.peer, row.status) == ("tcp", "a", peer, status)
    assert says in row.message
    assert (row.fix == "") == (status == "pass")


def test_packets_that_are_too_large_are_told_from_a_link_that_stands_still() -> None:
    stalled = LinkProbe(round_trip_s=0.001, failure="stalled", reason="0 bytes")
    small = LinkProbe(round_trip_s=0.001, bytes_per_s=1e6)
    assert "MTU black hole" in judge_link(pair_of(), "a", "b", stalled, small).message
    assert "MTU" not in judge_link(pair_of(), "a", "b", stalled, stalled).message


@pytest.mark.parametrize(
    ("firewall", "wsl", "says"),
    [
        ("ufw", None, "ufw allow proto tcp from 10.0.0.1"),
        ("firewalld", None, 'source address="10.0.0.1"'),
        (None, "mirrored", "Hyper-V firewall"),
    ],
)
def test_firewall_of_the_other_node_is_opened(
    firewall: str | None, wsl: str | None, says: str
) -> None:
    other = checked(
        network_with(CARD, firewall=firewall),
        name="b",
        address="10.0.0.2",
        facts=replace(FACTS, wsl=wsl),
    )
    assert says in links.open_firewall(group_of(checked(), other), "a", "b")


def test_measurements_alternate_between_nodes() -> None:
    async def no_link() -> Any:
        raise AssertionError

    clients = [NodeClient(name, no_link) for name in "abcd"]
    pairs = [(one, other) for one in clients for other in clients]
    ordered = interleave(pairs)
    assert sorted(map(id, ordered)) == sorted(map(id, pairs))
    first = {one.name for pair in ordered[8:10] for one in pair}
    assert len(first) >= 3
