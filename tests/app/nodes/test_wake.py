"""Waking a node: the packet, where it goes, who sends it, and what is said when nobody wakes."""

from __future__ import annotations

import asyncio
import json
import re
import select
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agents.contract.node import InterfaceFacts
from agents.contract.wake import WakeTarget, magic_packet
from app.errors import NodeUnreachable, UserError
from app.nodes import wake as wake_module
from app.nodes.node import (
    Node,
    SshAddress,
    find_wake_target,
    identity_to_json,
    node_from_json,
    with_identity,
)
from app.nodes.wake import share_network, wake_node
from tests.cluster.master import Master
from tests.cluster.namespaces import Cluster
from tests.fakes.core import make_node
from tests.fakes.ssh import client_of, linked, loopback_node

MAC = "02:00:5e:10:00:07"
CARD = InterfaceFacts(
    name="enp5s0", address="192.168.1.20", mac=MAC, broadcast="192.168.1.255", wakes=True
)
TARGET = WakeTarget(mac=MAC, broadcast="192.168.1.255", device="enp5s0", is_on=True)
NODE = Node(name="big", address=SshAddress(host="192.168.1.20", user="anna"), wake=TARGET)
LISTEN = """
import json, socket
heard = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
heard.bind(("", 9))
print("ready", flush=True)
data, sender = heard.recvfrom(2048)
print(json.dumps([data.hex(), sender[0]]), flush=True)
"""


def facts_with(*cards: InterfaceFacts, **values: object):
    facts = make_node("big").facts
    assert facts is not None
    return replace(facts, interfaces=cards, **values)


def test_the_card_of_the_masters_network_is_learned_kept_and_not_forgotten() -> None:
    docker = replace(CARD, name="docker0", address="172.17.0.1", mac="02:42:00:00:00:01")
    assert find_wake_target(facts_with(docker, CARD)) == TARGET
    assert find_wake_target(facts_with(docker, CARD, address=None)) is None
    assert find_wake_target(facts_with(replace(CARD, mac="nonsense"))) is None
    assert find_wake_target(facts_with(replace(CARD, broadcast="x"))) is None
    assert find_wake_target(facts_with(CARD, wsl="nat")) is None
    node = with_identity(
        replace(NODE, wake=None), facts_with(CARD, machine_id="m", agent_home="/h")
    )
    assert node.wake == TARGET
    stored = json.loads(json.dumps(identity_to_json(node)))
    address = {"transport": "ssh", "host": "192.168.1.20", "port": 22, "user": "anna"}
    assert node_from_json("big", address, stored) == node
    assert node_from_json("big", address, {**stored, "wake": {"mac": "?"}}).wake is None
    # It answers over another card now, or over Wi-Fi: what was learned stays.
    assert with_identity(node, facts_with()).wake == TARGET


def test_a_node_of_another_network_cannot_help() -> None:
    beside = replace(TARGET, mac="02:00:5e:10:00:08")
    assert share_network(TARGET, beside)
    assert not share_network(TARGET, replace(beside, broadcast="10.0.0.255"))
    assert not share_network(TARGET, TARGET)
    assert not share_network(TARGET, None)


async def wake(node: Node, awake_after: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Wake a node that answers at a certain look; return how often it was looked at and sent to."""
    looks, sent = 0, 0

    async def answers() -> bool:
        nonlocal looks
        looks += 1
        return looks > awake_after

    def send(target: WakeTarget, sources: tuple[str, ...]) -> int:
        nonlocal sent
        sent += 1
        return 4

    monkeypatch.setattr(wake_module, "REPEAT_S", 0.01)
    monkeypatch.setattr(wake_module, "send_magic_packet", send)
    await wake_node(node, (), answers, lambda text: None, timeout_s=0.2)
    return looks, sent


async def test_packets_are_sent_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await wake(NODE, 3, monkeypatch) == (4, 4)


@pytest.mark.parametrize(
    ("is_on", "said"),
    [
        (False, "was off there .* sudo ethtool -s enp5s0 wol g"),
        (None, "not known.* sudo ethtool -s enp5s0 wol g"),
        (True, "was set to wake it.*BIOS"),
    ],
)
async def test_a_node_that_stays_silent_says_why_that_may_be(
    is_on: bool | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = replace(NODE, wake=replace(TARGET, is_on=is_on))
    with pytest.raises(NodeUnreachable, match="does not answer") as caught:
        await wake(node, 10**6, monkeypatch)
    assert re.search(said, caught.value.hint)


async def test_a_node_whose_card_is_not_known_says_how_it_becomes_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UserError, match="is not known, so it cannot be woken"):
        await wake(replace(NODE, wake=None), 0, monkeypatch)


async def test_a_node_of_the_same_network_sends_packets_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = replace(TARGET, broadcast="127.255.255.255")
    monkeypatch.setattr(wake_module, "send_magic_packet", lambda target, sources: 0)
    heard = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    monkeypatch.setattr("agents.contract.wake.PORTS", (9,))
    heard.bind(("127.255.255.255", 9))
    heard.settimeout(10)

    async def answers() -> bool:
        return await asyncio.to_thread(heard.recv, 2048) == magic_packet(MAC)

    with heard:
        async with (
            loopback_node(tmp_path, "neighbour") as server,
            linked(server, tmp_path / "master") as link,
        ):
            helper = client_of(link)
            await wake_node(replace(NODE, wake=near), (helper,), answers, lambda text: None)


@pytest.mark.campaign
@pytest.mark.netns
def test_a_stopped_pc_gets_the_packet_and_is_waited_for(tmp_path: Path) -> None:
    with Cluster(tmp_path / "cluster", 1) as cluster:
        (sleeper,) = cluster.nodes
        master = Master(cluster, tmp_path / "home")
        shown = cluster.fingerprint(sleeper)
        there = ("--ssh", f"root@{sleeper.address}", "--key", str(cluster.key))
        master.answer("nodes", "add", "big", *there, "--accept-host-key", shown)
        link = json.loads(cluster.run(sleeper, "ip", "-j", "link", "show", "eth0"))[0]
        cluster.stop_sshd(sleeper)
        # Ended with the cluster, whatever happens here.
        listener = cluster.start(
            sleeper, sys.executable, "-c", LISTEN, stdout=subprocess.PIPE, text=True
        )
        heard = listener.stdout
        assert heard is not None
        assert heard.readline() == "ready\n"
        waking = master.start("nodes", "wake", "big")
        # Else nothing is ever heard.
        if select.select([heard, waking.stderr], [], [], 30)[0] != [heard]:
            waking.kill()
            raise AssertionError(waking.communicate())
        data, sender = json.loads(heard.readline())
        assert data == magic_packet(link["address"]).hex()
        assert sender == cluster.master.address
        cluster.start_sshd(sleeper)
        output, problem = waking.communicate(timeout=60)
        assert waking.returncode == 0, problem
        assert json.loads(output)["state"] == "online"
