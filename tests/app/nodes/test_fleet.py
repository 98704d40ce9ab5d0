"""A fleet against real SSH servers and real agents: joining, losing, coming back, closing."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from agents.contract.requests.connection import Ping
from app.errors import HostKeyUnknown, LoginRefused, NodeNotReady, NodeUnreachable, UserError
from app.events import NodeRemoved
from app.nodes import archive
from app.nodes import fleet as fleet_module
from app.nodes import watch as watch_module
from app.nodes.fleet import Fleet
from app.nodes.node import Node
from app.nodes.transport.loopback import LoopbackNode, find_processes, power_cut
from app.nodes.watch import pause_before
from tests.fakes.agent import SOURCE, fake_archive
from tests.fakes.fleet import Seen, fleet_at
from tests.fakes.ssh import address_of, connect, loopback_node, make_key, tools_without, until


def node_of(server: LoopbackNode, name: str = "pc") -> Node:
    return Node(name=name, address=address_of(server))


@pytest.fixture
def fake_agent(monkeypatch) -> None:
    """Let the fleet push the fake agent instead of the real one."""
    monkeypatch.setattr(archive, "build_archive", fake_archive)


async def test_a_node_joins_and_can_be_asked(tmp_path: Path) -> None:
    seen = Seen()
    async with loopback_node(tmp_path) as server, fleet_at(tmp_path / "m", seen) as fleet:
        with pytest.raises(HostKeyUnknown):
            await fleet.join(node_of(server))
        assert fleet.names() == ()
        snapshot, facts = await fleet.join(node_of(server), server.fingerprint)
        assert snapshot.state == "online"
        assert snapshot.facts == facts
        assert facts.address == "127.0.0.1"
        assert facts.num_cores
        assert fleet.snapshot("pc").address == str(address_of(server))
        fresh = await fleet.refresh("pc")
        assert fresh.facts is not None
        assert fresh.state == "online"


async def test_a_node_that_cannot_start_the_agent_leaves_no_trace_here(tmp_path: Path) -> None:
    seen = Seen()
    path = tools_without(tmp_path / "bin", "python3")
    async with (
        loopback_node(tmp_path, "pc", "--path", path) as server,
        fleet_at(tmp_path / "m", seen) as fleet,
    ):
        with pytest.raises(NodeNotReady, match="There is no python3"):
            await fleet.join(node_of(server), server.fingerprint)
        assert fleet.names() == ()
        assert (tmp_path / "m" / "known_hosts").read_text() == ""
        assert seen.events == []


async def test_names_and_places_are_unique(tmp_path: Path, fake_agent: None) -> None:
    async with loopback_node(tmp_path) as server, fleet_at(tmp_path / "m", Seen()) as fleet:
        fleet.add(node_of(server))
        with pytest.raises(UserError, match="already a node called pc"):
            await fleet.join(node_of(server))
        with pytest.raises(UserError, match="is already a node: pc"):
            await fleet.join(node_of(server, "other"))
        with pytest.raises(UserError, match="no node called 'nobody'; known: pc"):
            fleet.client("nobody")


async def test_removing_forgets_the_host_key_unless_it_is_shared(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(archive, "build_archive", lambda: fake_archive(FACTS))
    seen = Seen()
    async with loopback_node(tmp_path) as server, fleet_at(tmp_path / "m", seen) as fleet:
        await fleet.join(node_of(server), server.fingerprint)
        await fleet.connect(["pc"])
        await until(lambda: fleet.snapshot("pc").state == "online")
        await fleet.remove("pc")
        assert fleet.names() == ()
        assert seen.events[-1] == NodeRemoved("pc")
        assert (tmp_path / "m" / "known_hosts").read_text() == ""
        with pytest.raises(UserError, match="known: none"):
            await fleet.remove("pc")


FACTS = SOURCE.replace(
    'elif kind == "echo":',
    'elif kind == "facts":\n'
    '            names = ("hostname", "os", "kernel", "python", "architecture")\n'
    "            say(type='response', id=number, result={name: 'x' for name in names})\n"
    '        elif kind == "echo":',
)


@pytest.mark.alone
async def test_samples_follow_a_reconnect_without_gap_or_double(tmp_path: Path) -> None:
    seen = Seen()
    async with loopback_node(tmp_path) as server, fleet_at(tmp_path / "m", seen) as fleet:
        await fleet.join(node_of(server), server.fingerprint)
        await fleet.connect()
        await until(lambda: len(seen.samples()) >= 3)
        # The connection dies, the recorder on the node goes on.
        server.process.kill()
        await until(lambda: fleet.snapshot("pc").state == "unreachable", 3.2)
        assert "was lost" in fleet.snapshot("pc").problem
        await asyncio.sleep(2.0)
        before = len(seen.samples())
        async with loopback_node(tmp_path, port=server.port):
            await until(lambda: fleet.snapshot("pc").state == "online")
            await until(lambda: seen.samples()[before:] and not seen.samples()[-1].replayed)
            sequence = [event.sample.seq for event in seen.samples()]
            assert sequence == list(range(sequence[0], sequence[0] + len(sequence)))
            missed = seen.samples()[before : before + 2]
            assert all(event.replayed for event in missed)


@pytest.mark.alone
async def test_a_node_that_hangs_is_noticed_and_comes_back_on_the_same_link(tmp_path: Path) -> None:
    seen = Seen()
    async with loopback_node(tmp_path) as server, fleet_at(tmp_path / "m", seen) as fleet:
        await fleet.join(node_of(server), server.fingerprint)
        link = await fleet.link("pc")
        os.kill(link.hello.pid, signal.SIGSTOP)
        took_s = await until(lambda: fleet.snapshot("pc").state == "unreachable")
        assert took_s <= 3.2
        assert "has not answered" in fleet.snapshot("pc").problem
        os.kill(link.hello.pid, signal.SIGCONT)
        await until(lambda: fleet.snapshot("pc").state == "online", 2)
        assert await fleet.link("pc") is link
        assert fleet.snapshot("pc").round_trip_s is not None


async def test_a_node_that_hangs_for_long_is_given_up(
    tmp_path: Path, fake_agent, monkeypatch
) -> None:
    monkeypatch.setattr(watch_module, "STALE_AFTER_S", 0.2)
    monkeypatch.setattr(watch_module, "GIVE_UP_AFTER_S", 0.5)
    monkeypatch.setattr("app.nodes.link.CLOSE_GRACE_S", 0.2)
    async with loopback_node(tmp_path) as server, fleet_at(tmp_path / "m", Seen()) as fleet:
        await log_in_once(fleet, server, tmp_path / "m")
        link = await fleet.link("pc")
        os.kill(link.hello.pid, signal.SIGSTOP)
        await until(lambda: link.channel.is_lost, 4)
        await until(lambda: fleet.snapshot("pc").state == "online", 5)
        assert await fleet.link("pc") is not link


async def log_in_once(fleet: Fleet, server: LoopbackNode, master: Path) -> None:
    """Confirm the host key and make the node known, without asking its agent anything."""
    await (await connect(server, master)).close()
    fleet.add(node_of(server))


def test_a_refused_login_is_not_tried_again_by_itself(
    tmp_path: Path, fake_agent, monkeypatch
) -> None:
    tries: list[float] = []

    async def run() -> None:
        async with loopback_node(tmp_path) as server, fleet_at(tmp_path / "m", Seen()) as fleet:
            wrong = Node(name="pc", address=address_of(server, make_key(tmp_path, "other")))
            open_link = fleet_module.open_link

            async def counted(*args, **kwargs):
                tries.append(time.monotonic())
                return await open_link(*args, **kwargs)

            monkeypatch.setattr(fleet_module, "open_link", counted)
            await (await connect(server, tmp_path / "m")).close()
            fleet.add(wrong)
            await fleet.connect(["pc"])
            await until(lambda: fleet.snapshot("pc").state == "refused")
            assert "ssh-copy-id" in fleet.snapshot("pc").hint
            await asyncio.sleep(1.5)
            assert len(tries) == 1
            for _ in range(3):  # requests do not hammer either
                with pytest.raises(LoginRefused):
                    await fleet.client("pc").ask(Ping())
            assert len(tries) == 1
            await fleet.connect(["pc"])  # but a person who asks is heard
            await until(lambda: len(tries) == 2)

    asyncio.run(run())


async def test_a_node_that_is_off_is_tried_with_growing_pauses(tmp_path: Path, monkeypatch) -> None:
    pauses: list[int] = []

    def pause(attempt: int, jitter: float) -> float:
        pauses.append(attempt)
        return 0.05

    monkeypatch.setattr(watch_module, "pause_before", pause)
    seen = Seen()
    async with loopback_node(tmp_path) as server:
        pass
    async with fleet_at(tmp_path / "m", seen) as fleet:
        fleet.add(node_of(server))
        await fleet.connect(["pc"])
        await until(lambda: len(pauses) >= 4)
        assert pauses[:4] == [1, 2, 3, 4]
        assert fleet.snapshot("pc").state == "unreachable"
        assert "nothing listens" in fleet.snapshot("pc").problem
        (standing,) = await fleet.reach()
        assert standing.state == "unreachable"
        with pytest.raises(NodeUnreachable, match="nothing listens"):
            await fleet.client("pc").ask(Ping())


def test_pauses_grow_to_a_limit_and_are_spread() -> None:
    assert [pause_before(n, 0.5) for n in range(1, 9)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert pause_before(3, 0.0) < pause_before(3, 1.0) <= 30
    assert all(pause_before(n, j) <= 30 for n in (1, 50, 10_000) for j in (0.0, 1.0))


async def test_a_request_connects_by_itself(tmp_path: Path, fake_agent: None) -> None:
    async with loopback_node(tmp_path) as server, fleet_at(tmp_path / "m", Seen()) as fleet:
        await log_in_once(fleet, server, tmp_path / "m")
        clients = [fleet.client("pc") for _ in range(10)]
        await asyncio.gather(*(client.ask(Ping()) for client in clients))
        agents = [pid for pid in find_processes(server.home) if pid != server.process.pid]
        assert len(agents) == 1


async def test_a_bug_in_one_nodes_task_is_shown_and_touches_no_other(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    async def broken(*args, **kwargs):
        raise ZeroDivisionError("our fault")

    monkeypatch.setattr(fleet_module, "open_link", broken)
    monkeypatch.setattr(archive, "build_archive", fake_archive)
    async with loopback_node(tmp_path) as server:
        async with fleet_at(tmp_path / "m", Seen()) as fleet:
            fleet.add(node_of(server))
            with pytest.raises(NodeUnreachable, match="an error in Rackless itself"):
                await fleet.client("pc").ask(Ping())
        assert "our fault" in caplog.text


async def test_closing_leaves_no_agent_and_no_task(tmp_path: Path) -> None:
    async with loopback_node(tmp_path) as server:
        async with fleet_at(tmp_path / "m", Seen()) as fleet:
            await fleet.join(node_of(server), server.fingerprint)
            await fleet.connect()
            link = await fleet.link("pc")
            began_s = time.monotonic()
        assert time.monotonic() - began_s < 3
        await until(lambda: not Path(f"/proc/{link.hello.pid}").exists(), 3)
        mine = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert [task.get_name() for task in mine if "node" in task.get_name()] == []


async def test_ten_nodes_connect_at_most_eight_at_a_time(tmp_path: Path, monkeypatch) -> None:
    now, most = 0, 0

    async def slow_link(node, archive, *, home, gate, accept_host_key):
        nonlocal now, most
        async with gate:
            now, most = now + 1, max(most, now + 1)
            await asyncio.sleep(0.05)
            now -= 1
        raise NodeUnreachable("off", "switch it on")

    monkeypatch.setattr(fleet_module, "open_link", slow_link)
    async with loopback_node(tmp_path) as server, fleet_at(tmp_path / "m", Seen()) as fleet:
        for number in range(12):
            fleet.add(node_of(server, f"pc-{number}"))
        await fleet.reach()
        assert most == 8


async def test_a_power_cut_is_noticed_at_once_and_said_once(tmp_path: Path) -> None:
    seen = Seen()
    async with loopback_node(tmp_path) as server, fleet_at(tmp_path / "m", seen) as fleet:
        await fleet.join(node_of(server), server.fingerprint)
        await fleet.connect()
        await until(lambda: fleet.snapshot("pc").round_trip_s is not None)
        await asyncio.to_thread(power_cut, server.home)
        assert await until(lambda: fleet.snapshot("pc").state == "unreachable") < 3.2
        assert seen.states()[-2:] == ["online", "unreachable"]
