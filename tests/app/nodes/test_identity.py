"""A PC is known by its host key and machine id, wherever it answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents.contract.node import NodeFacts
from agents.contract.requests.node import ReadFacts
from agents.contract.wake import WakeTarget
from app.errors import HostKeyChanged, HostKeyUnknown, PcCloned, UserError
from app.events import NodeSnapshot, NodeState
from app.nodes import finder
from app.nodes.client import NodeClient
from app.nodes.fleet import Fleet
from app.nodes.identity import SilentNodes, explain_key, require_same
from app.nodes.node import Node, NodeIdentity, SshAddress
from app.nodes.transport.loopback import LoopbackNode, power_cut, start_loopback
from tests.fakes.cluster import make_facts
from tests.fakes.fleet import Seen, fleet_at
from tests.fakes.ssh import address_of, loopback_node, make_key

NOBODY = SshAddress(host="192.168.1.2", user="u")


async def move_server(server: LoopbackNode, folder: Path, address: str) -> LoopbackNode:
    """Let the PC answer at another address only, as after a new lease of its router."""
    await asyncio.to_thread(power_cut, server.home)
    await server.process.wait()
    key = make_key(folder).with_name("key.pub")
    return await start_loopback(server.home, key, address=address, port=server.port)


def confirmed(master: Path) -> list[str]:
    return [line.split()[0] for line in (master / "known_hosts").read_text().splitlines()]


async def test_a_node_is_found_and_reached_at_its_new_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = tmp_path / "m"
    monkeypatch.setattr(finder, "_neighbours", lambda host: iter(["127.0.0.1", "127.0.0.3"]))
    async with loopback_node(tmp_path) as server, fleet_at(master, Seen()) as fleet:
        await fleet.join(Node(name="pc", address=address_of(server)), server.fingerprint)
        old = address_of(server)
        moved = await move_server(server, tmp_path, "127.0.0.3")
        twin = Node(name="other", address=address_of(moved))
        with pytest.raises(HostKeyUnknown, match="the confirmed key of pc"):
            await fleet.join(twin)
        with pytest.raises(UserError, match="is the PC of pc, which was added as") as refused:
            await fleet.join(twin, server.fingerprint)
        assert f"rackless nodes set-address pc --ssh {address_of(moved)}" in refused.value.hint
        assert fleet.names() == ("pc",)
        assert len(confirmed(master)) == 1, "nothing of the one that was turned down stays"

        (found,) = await finder.find_host(old, master)
        assert found == replace(old, host="127.0.0.3")
        node = await fleet.move("pc", found)  # the key is known: nobody is asked
        assert (node.state, node.address) == ("online", str(found))
        assert confirmed(master) == [f"[127.0.0.3]:{server.port}"]
        assert (await fleet.client("pc").ask(ReadFacts())).machine_id
        await asyncio.to_thread(power_cut, moved.home)
        await moved.process.wait()


async def test_an_address_that_changed_hands_is_told_from_a_stranger(tmp_path: Path) -> None:
    master = tmp_path / "m"
    async with (
        loopback_node(tmp_path, "one") as one,
        loopback_node(tmp_path, "two") as two,
        fleet_at(master, Seen()) as fleet,
    ):
        await fleet.join(Node(name="one", address=address_of(one)), one.fingerprint)
        await fleet.join(Node(name="two", address=address_of(two)), two.fingerprint)
        with pytest.raises(HostKeyUnknown, match=r"one had another at .*127\.0\.0\.1"):
            await fleet.move("one", replace(address_of(two), host="localhost"))
        await asyncio.to_thread(power_cut, one.home)
        taken = await move_server(replace(two, port=one.port), tmp_path, "127.0.0.1")
        with pytest.raises(HostKeyChanged, match="host key of two, not of one") as changed:
            await fleet.client("one").ask(ReadFacts())
        assert "rackless nodes find one" in changed.value.hint
        await asyncio.to_thread(power_cut, taken.home)
        await taken.process.wait()


def test_a_key_of_nobody_stays_a_hard_stop(tmp_path: Path) -> None:
    error = HostKeyChanged("192.168.1.2:22", "SHA256:old", "SHA256:new")
    node = Node(name="pc", address=NOBODY)
    told = explain_key(error, node, [node], tmp_path)
    assert told is error
    assert "someone is intercepting" in told.message
    assert "rackless nodes find pc" in told.hint


def test_a_cloned_disk_is_another_pc() -> None:
    known = NodeIdentity(machine_id="a", agent_home="/home/u")
    node = Node(name="pc", address=NOBODY, identity=known)
    require_same(node, None)  # a node of an earlier version: its host key has to do
    require_same(node, replace(known, agent_home="/elsewhere"))
    with pytest.raises(UserError, match="another PC than pc was: its machine id differs"):
        require_same(node, replace(known, machine_id="b"))


Facts = dict[str, dict[str, Any]]


@contextlib.asynccontextmanager
async def clones(
    folder: Path, monkeypatch: pytest.MonkeyPatch, facts: Facts
) -> AsyncIterator[tuple[Fleet, list[LoopbackNode]]]:
    """A fleet and PCs with one host key; `facts` replaces what each says of itself, by name."""
    ask = NodeClient.ask

    async def answer(client: NodeClient, request: Any, progress: Any = None) -> Any:
        answer = await ask(client, request, progress)
        changes = facts.get(client.name, {}) if isinstance(answer, NodeFacts) else {}
        return replace(answer, **changes) if changes else answer

    monkeypatch.setattr(NodeClient, "ask", answer)
    key = make_key(folder, "host-key")
    async with contextlib.AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(loopback_node(folder, name, "--host-key", str(key)))
            for name in facts
        ]
        yield await stack.enter_async_context(fleet_at(folder / "m", Seen())), servers


def image(**changes: Any) -> dict[str, Any]:
    return {
        "agent_home": "/home/u/agent",
        "boot_id": "b",
        "macs": ("02:00:00:00:00:01",),
        **changes,
    }


@pytest.mark.parametrize(
    ("other", "unlike"),
    [
        (image(boot_id="c"), "boot ids"),
        (image(macs=("02:00:00:00:00:02",)), "network cards"),
        # Another user of the clone.
        (image(agent_home="/home/v/agent", boot_id="c"), "boot ids"),
    ],
)
async def test_cloned_pcs_that_answer_at_once_are_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any], unlike: str
) -> None:
    facts = {"one": image(), **{f"pc{number}": dict(other) for number in range(3)}}
    async with clones(tmp_path, monkeypatch, facts) as (fleet, (first, *others)):
        await fleet.join(Node(name="one", address=address_of(first)), first.fingerprint)
        # Each of several equal PCs is told, and none of them is kept.
        for number, server in enumerate(others):
            clone = Node(name=f"pc{number}", address=address_of(server))
            with pytest.raises(PcCloned, match=f"cloned from one disk: .* {unlike}") as refused:
                await fleet.join(clone, server.fingerprint)
            assert "sudo systemd-machine-id-setup" in refused.value.hint
            assert "sudo ssh-keygen -A" in refused.value.hint
            assert "set-address" not in refused.value.hint
        assert fleet.names() == ("one",)
        # Nor does a node become its clone, while it still answers itself.
        facts["one"], facts_before = other, replace(make_facts(), **image())
        monkeypatch.setattr(Fleet, "_ask_now", always(facts_before))
        with pytest.raises(PcCloned, match=unlike):
            await fleet.move("one", address_of(others[0]), others[0].fingerprint)
        assert fleet.node("one").address == address_of(first)


def always(facts: NodeFacts) -> Callable[[Fleet, str], Awaitable[NodeFacts]]:
    async def ask_now(fleet: Fleet, name: str) -> NodeFacts:
        return facts

    return ask_now


@pytest.mark.parametrize(
    ("other", "is_added"),
    [
        # The same PC by its Wi-Fi: it lists all its cards at each address.
        (image(macs=("02:00:00:00:00:01", "02:00:00:00:00:02")), False),
        # Nothing is known of its cards.
        (image(macs=(), boot_id=None), False),
        # Another user of the same PC.
        (image(agent_home="/home/v/agent"), True),
    ],
)
async def test_one_pc_at_two_addresses_is_one_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any], is_added: bool
) -> None:
    facts = {"lan": image(), "wifi": other}
    async with clones(tmp_path, monkeypatch, facts) as (fleet, (lan, wifi)):
        await fleet.join(Node(name="lan", address=address_of(lan)), lan.fingerprint)
        again = Node(name="wifi", address=address_of(wifi))
        with (
            contextlib.nullcontext()
            if is_added
            else pytest.raises(UserError, match="is the PC of lan, which was added as")
        ):
            await fleet.join(again, wifi.fingerprint)
        assert ("wifi" in fleet.names()) is is_added


async def test_a_search_takes_no_clone_of_a_node_that_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"one": image(), "clone": image()}
    async with clones(tmp_path, monkeypatch, facts) as (fleet, (first, clone)):
        await fleet.join(Node(name="one", address=address_of(first)), first.fingerprint)
        wake = WakeTarget(mac="02:00:00:00:00:01", broadcast="10.0.0.255", device="eth0")
        await fleet.change(replace(fleet.node("one"), wake=wake))
        await asyncio.to_thread(power_cut, first.home)
        facts["one"] = image(boot_id="c", macs=("02:00:00:00:00:02",))
        place = address_of(clone)
        with pytest.raises(UserError, match="but not its network card 02:00:00:00:00:01") as told:
            await fleet.move("one", place, requires_card=True)
        assert f"rackless nodes set-address one --ssh {place}" in told.value.hint
        facts["one"] = image(boot_id="c", macs=(wake.mac, "02:00:00:00:00:02"))
        assert (await fleet.move("one", place, requires_card=True)).state == "online"


def test_silent_nodes_are_searched_for_less_and_less_often() -> None:
    silent = SilentNodes()

    def due(state: NodeState, now_s: float) -> tuple[str, ...]:
        node = NodeSnapshot(name="pc", transport="ssh", address="u@h:22", state=state)
        local = NodeSnapshot(name="here", transport="local", address="", state="unreachable")
        return silent.due((node, local), now_s)

    searched = [now_s for now_s in range(0, 4000, 10) if due("unreachable", now_s)]
    assert searched == [60, 360, 960, 2160]
    assert not due("online", 4000.0)
    assert [s for s in range(4010, 4100, 10) if due("refused", s)] == [4070]
