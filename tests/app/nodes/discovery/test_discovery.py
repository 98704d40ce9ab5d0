"""Candidates: what each source says, how they are joined, and that nothing is sent to them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.nodes.discovery import mdns
from app.nodes.discovery.candidate import name_overlay
from app.nodes.discovery.discover import Sources, list_candidates, try_candidates
from app.nodes.discovery.mdns import Announced, ask_mdns, make_query, parse_answer
from app.nodes.discovery.neighbours import Neighbour, parse_arp_command, parse_proc_arp
from app.nodes.node import Node, SshAddress
from app.nodes.ssh_hosts import SshHost
from tests.app.nodes.discovery.responder import announcement
from tests.cluster.master import Master
from tests.cluster.namespaces import Cluster
from tests.draws import seed

PROC_ARP = """IP address       HW type     Flags       HW address            Mask     Device
192.168.1.1      0x1         0x2         A4:91:b1:0c:22:3e     *        enp5s0
192.168.1.77     0x1         0x0         00:00:00:00:00:00     *        enp5s0
100.101.2.3      0x1         0x2         02:00:00:00:00:01     *        tailscale0
"""
# `arp -a` as Windows and macOS print it: the words change with the language, the columns do not.
ARP_OUTPUTS = {
    "English": """
Interface: 192.168.1.10 --- 0xb
  Internet Address      Physical Address      Type
  192.168.1.1           a4-91-b1-0c-22-3e     dynamic
  192.168.1.255         ff-ff-ff-ff-ff-ff     static
  224.0.0.22            01-00-5e-00-00-16     static
""",
    "German": """
Schnittstelle: 192.168.1.10 --- 0xb
  Internetadresse       Physische Adresse     Typ
  192.168.1.1           a4-91-b1-0c-22-3e     dynamisch
  192.168.1.255         ff-ff-ff-ff-ff-ff     statisch
  239.255.255.250       01-00-5e-7f-ff-fa     statisch
""",
    "French": """
Interface\ufffd: 192.168.1.10 --- 0xb
  Adresse Internet      Adresse physique      Type
  192.168.1.1           a4-91-b1-0c-22-3e     dynamique
  255.255.255.255       ff-ff-ff-ff-ff-ff     statique
""",
    "Japanese, in bytes that are no ASCII": """
\ufffd\ufffd\ufffd\ufffd: 192.168.1.10 --- 0xb
  \ufffd\ufffd\ufffd\ufffd\ufffd   \ufffd\ufffd\ufffd\ufffd   \ufffd\ufffd
  192.168.1.1           a4-91-b1-0c-22-3e     \ufffd\ufffd\ufffdI
""",
    "macOS": """
? (192.168.1.1) at a4:91:b1:c:22:3e on en0 ifscope [ethernet]
? (192.168.1.66) at (incomplete) on en0 ifscope [ethernet]
? (224.0.0.251) at 1:0:5e:0:0:fb on en0 ifscope permanent [ethernet]
""",
}


def test_the_neighbours_of_linux_are_those_that_have_answered() -> None:
    assert parse_proc_arp(PROC_ARP) == (
        Neighbour("192.168.1.1", "a4:91:b1:0c:22:3e", "enp5s0"),
        Neighbour("100.101.2.3", "02:00:00:00:00:01", "tailscale0"),
    )


@pytest.mark.parametrize("language", ARP_OUTPUTS)
def test_the_neighbours_of_windows_are_read_in_any_language(language: str) -> None:
    found = parse_arp_command(ARP_OUTPUTS[language])
    assert found == (Neighbour("192.168.1.1", "a4:91:b1:0c:22:3e"),)


def test_networks_over_other_networks_are_named() -> None:
    names = [("100.127.0.1", ""), ("10.0.0.1", "wg0"), ("fd7a:115c:a1e0::1", ""), ("pc", "zt3")]
    assert [name_overlay(*one) for one in names] == [
        "Tailscale",
        "WireGuard",
        "Tailscale",
        "ZeroTier",
    ]
    assert not name_overlay("100.128.0.1")


def test_an_answer_that_points_back_is_read_and_a_damaged_one_ends_nothing() -> None:
    packet = announcement("gamer", "192.168.1.20", 2222)
    records = parse_answer(packet)
    assert records.instances == {"gamer._ssh._tcp.local"}
    assert records.places == {"gamer._ssh._tcp.local": ("gamer.local", 2222)}
    assert records.addresses == {"gamer.local": "192.168.1.20"}
    draw = random.Random(seed(7))
    for _ in range(2000):
        broken = bytearray(packet[: draw.randrange(len(packet) + 1)])
        for _ in range(min(3, len(broken))):
            broken[draw.randrange(len(broken))] = draw.randrange(256)
        parse_answer(bytes(broken))
    # A name that points to itself.
    parse_answer(packet[:4] + b"\0\0\0\1\0\0\0\0" + b"\xc0\x0c" + bytes(10))


async def test_the_query_is_answered_within_its_time() -> None:
    class Responder(asyncio.DatagramProtocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

        def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
            assert data == make_query(mdns.SERVICES)
            self.transport.sendto(announcement("gamer", "192.168.1.20", 0), addr)

    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(Responder, ("127.0.0.1", 0))
    group = transport.get_extra_info("sockname")
    try:
        found = await ask_mdns(["127.0.0.1", "192.0.2.9"], group, wait_s=0.2)
    finally:
        transport.close()
    # The second address is not ours; a port of 0 stands for none.
    assert found == (Announced("gamer.local".removesuffix(".local"), "192.168.1.20", 22),)


@contextlib.asynccontextmanager
async def port_that_says(banner: bytes, got: list[bytes]) -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(banner)
        got.append(await reader.read())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_sources_are_joined_known_nodes_marked_and_nothing_is_sent() -> None:
    got: list[bytes] = []
    ssh = port_that_says(b"SSH-2.0-OpenSSH_9.6p1 Ubuntu-3\r\n", got)
    web = port_that_says(b"HTTP/1.1 400 Bad Request\r\n\r\n", got)
    async with ssh as port, web as other:
        address = SshAddress(host="localhost", port=port, user="anna", alias="gamer")
        jump = SshAddress(host="gate", user="anna")
        lab = SshAddress(host="10.0.0.5", user="anna", alias="lab", jumps=(jump,))
        hub = SshAddress(host="example.com", user="git", alias="hub")
        sources = Sources(
            ssh_hosts=tuple(SshHost(address=a, notes=()) for a in (address, lab, hub)),
            announced=(Announced("gamer", "127.0.0.1", port), Announced("tv", "127.0.0.1", other)),
            neighbours=(Neighbour("127.0.0.1", "02:00:00:00:00:01", "wg0"),),
            own={"192.0.2.1": "eth0"},
        )
        known = Node(name="big", address=SshAddress(host="127.0.0.1", port=port, user="anna"))
        candidates = [one for one in list_candidates(sources) if one.sources != ("neighbour",)]
        found = await try_candidates(candidates, [known], sources)
    rows = [(c.target, c.state, c.banner, c.overlay, c.node, c.sources) for c in found]
    assert rows == [
        (
            *("gamer", "open", "SSH-2.0-OpenSSH_9.6p1 Ubuntu-3", "WireGuard", "big"),
            ("ssh-config", "mdns"),
        ),
        ("lab", "not-tried", "", "", "", ("ssh-config",)),
        (f"127.0.0.1:{other}", "closed", "", "WireGuard", "", ("mdns",)),
    ]
    assert set(got) == {b""}


def test_neighbours_are_tried_at_both_usual_ports_and_this_pc_is_left_out() -> None:
    near = (Neighbour("192.168.1.9", "02:00:00:00:00:01"), Neighbour("192.168.1.2", "02:" * 5))
    found = list_candidates(Sources(neighbours=near, own={"192.168.1.2": "eth0"}))
    assert [one.target for one in found] == ["192.168.1.9", "192.168.1.9:2222"]


@pytest.mark.netns
def test_a_pc_of_the_network_is_found_by_its_announcement(tmp_path: Path) -> None:
    with Cluster(tmp_path / "cluster", 2) as cluster:
        node, silent = cluster.nodes
        script = Path(__file__).with_name("responder.py")
        # Ended with the cluster, whatever happens here.
        responder = cluster.start(
            node, sys.executable, str(script), node.address, stdout=subprocess.PIPE, text=True
        )
        assert responder.stdout is not None
        assert responder.stdout.readline() == "ready\n"
        cluster.over_ssh(silent, "true")
        found = Master(cluster, tmp_path / "home").answer("nodes", "discover")
    rows = {one["host"]: one for one in found}
    assert rows[node.address]["name"] == "gamer"
    assert "mdns" in rows[node.address]["sources"]
    assert rows[node.address]["banner"].startswith("SSH-2.0-OpenSSH")
    # The other one says nothing, but this PC has talked to it.
    assert (rows[silent.address]["sources"], rows[silent.address]["state"]) == (
        ["neighbour"],
        "open",
    )
