"""Measure each link between nodes in both directions, and explain slow and broken ones.

First all pairs try to connect at once, since a silent firewall costs seconds. Then the open ones
are measured; a node takes part in one measurement at a time, so that none distorts another's
figures. Each node also connects to its own address: rank 0 does so in training, and WSL is known to
refuse it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace

from agents.contract.node import LinkProbe
from agents.contract.requests.examination import FindRoutes
from agents.contract.requests.probes import ListenForProbe, ProbeLink
from app.errors import RacklessError, UserError
from app.nodes.client import NodeClient
from app.progress import OnMessage
from app.provisioning.check_row import CheckedGroup, CheckRow, OnRow, Status
from app.provisioning.checks.network import find_device, judge_routes
from app.provisioning.network_repairs import open_ufw
from app.provisioning.repairs import Repair
from app.shell_words import posix_command
from app.text import count_of

PROBE_BYTES = 8 << 20
"""Payload of a bandwidth probe, in bytes: 70 ms at 1 Gb/s, long enough to leave TCP slow start."""
SLOW_BYTES_PER_S = 30e6
"""Throughput below which a link is reported as slow, in bytes per second."""
SLOW_ROUND_TRIP_S = 0.005
"""Round trip above which a link is reported as slow, in seconds."""
MAX_RESENT_SHARE = 0.05
"""Maximum share of packets sent again; overflowing queues of switches also lose some."""
MIN_SPEED_SHARE = 0.4
"""Minimum share of the speed of both network cards that a link must reach."""
SMALL_SEGMENT_BYTES = 536
"""Payload of packets that pass on every path (RFC 1122, section 4.2.2.6), in bytes."""
# Lifetime of a node's probe port; the caller may have to connect to its agent first.
_LISTEN_S = 20.0

Pair = tuple[NodeClient, NodeClient]


async def check_routes(
    group: CheckedGroup, on_row: OnRow, progress: OnMessage
) -> tuple[CheckRow, ...]:
    """Ask each node for the device that it uses to reach the others; one row for each node."""
    progress("asking each node for its route to the others")

    async def ask(client: NodeClient) -> CheckRow:
        peers = {
            name: endpoint.address
            for name, endpoint in group.endpoints.items()
            if name != client.name
        }
        try:
            found = (await client.ask(FindRoutes(addresses=tuple(peers.values())))).routes
        except RacklessError as error:
            fix = f"rackless nodes show {client.name}"
            row = CheckRow(
                check="route", node=client.name, status="unknown", message=str(error), fix=fix
            )
        else:
            row = judge_routes(group, client.name, dict(zip(peers, found, strict=False)))
        on_row(row)
        return row

    clients = group.clients.values() if len(group.clients) > 1 else ()
    return tuple(await asyncio.gather(*(ask(client) for client in clients)))


async def check_links(
    group: CheckedGroup, on_row: OnRow, progress: OnMessage
) -> tuple[CheckRow, ...]:
    """Probe TCP from each node to every node, itself included; one row for each direction."""
    clients = tuple(group.clients.values())
    pairs = [(caller, answerer) for caller in clients for answerer in clients]
    progress(f"trying {count_of(len(pairs), 'connection')}")
    tried = dict(
        zip(pairs, await asyncio.gather(*(_try(group, one) for one in pairs)), strict=True)
    )
    open_pairs = [pair for pair, row in tried.items() if row is None]
    for row in tried.values():
        if row is not None:
            on_row(row)
    busy = {name: asyncio.Lock() for name in group.clients}
    num_done = 0

    async def measure(pair: Pair) -> CheckRow:
        nonlocal num_done
        async with contextlib.AsyncExitStack() as stack:
            # Locks are taken in the order of the names, so two pairs never wait for each other.
            for name in sorted({one.name for one in pair}):
                await stack.enter_async_context(busy[name])
            row = await _measure(group, pair)
        num_done += 1
        on_row(row)
        progress(f"{num_done} of {count_of(len(open_pairs), 'link')} measured")
        return row

    measured = await asyncio.gather(*(measure(pair) for pair in interleave(open_pairs)))
    rows = {(row.node, row.peer): row for row in measured}
    return tuple(
        row or rows[caller.name, answerer.name] for (caller, answerer), row in tried.items()
    )


def interleave(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs ordered so that neighbouring pairs share no node if possible."""
    # Locks are granted in the order of requests: sorted by caller, all pairs would wait for one.
    names = sorted({one.name for pair in pairs for one in pair})
    place = {name: number for number, name in enumerate(names)}

    def round_of(pair: Pair) -> tuple[int, int]:
        first, second = place[pair[0].name], place[pair[1].name]
        return ((second - first) % len(names), first)

    return sorted(pairs, key=round_of)


async def _try(group: CheckedGroup, pair: Pair) -> CheckRow | None:
    """Connect once; return the row of a failed link, or None if it works."""
    probe = await _probe(group, pair, 0)
    if isinstance(probe, CheckRow):
        return probe
    return None if probe.failure is None else judge_link(group, *_names(pair), probe)


async def _measure(group: CheckedGroup, pair: Pair) -> CheckRow:
    caller, answerer = pair
    # A node's link to itself is only tested for reachability, so fewer bytes are enough.
    num_bytes = PROBE_BYTES if caller is not answerer else PROBE_BYTES // 8
    probe = await _probe(group, pair, num_bytes)
    if isinstance(probe, CheckRow):
        return probe
    small: LinkProbe | None = None
    # Lost large packets with passing small ones mean an MTU black hole.
    if probe.failure == "stalled":
        again = await _probe(group, pair, num_bytes // 16, SMALL_SEGMENT_BYTES)
        small = again if isinstance(again, LinkProbe) else None
    return judge_link(group, *_names(pair), probe, small)


async def _probe(
    group: CheckedGroup, pair: Pair, num_bytes: int, segment_bytes: int | None = None
) -> LinkProbe | CheckRow:
    """Measure the link from one node to another; return a row if it could not be tried."""
    caller, answerer = pair
    address = group.endpoints[answerer.name].address
    try:
        door = await answerer.ask(ListenForProbe(address=address, timeout_s=_LISTEN_S))
    except RacklessError as error:
        return _untried(answerer.name, caller.name, error)
    try:
        return await caller.ask(
            ProbeLink(
                address=address,
                port=door.port,
                greeting=door.greeting,
                num_bytes=num_bytes,
                segment_bytes=segment_bytes,
            )
        )
    except RacklessError as error:
        return _untried(caller.name, answerer.name, error)


def judge_link(
    group: CheckedGroup, node: str, peer: str, probe: LinkProbe, small: LinkProbe | None = None
) -> CheckRow:
    """Judge a link; a node's link to itself is never slow.

    Args:
        group: the nodes, whose devices and firewalls explain the measurement.
        node: node that opened the connection.
        peer: node that accepted it.
        probe: the measurement.
        small: the same with small packets, if `probe` stalled.
    """
    if probe.failure is not None:
        message, fix = _explain(group, node, peer, probe, small)
        row = _row(node, peer, "fail", message, fix, probe)
        return replace(row, repair=_find_repair(group, node, peer, probe))
    text = f"round trip {(probe.round_trip_s or 0.0) * 1000:.2f} ms"
    if probe.bytes_per_s is not None:
        text += f", {probe.bytes_per_s / 1e6:.0f} MB/s"
    if probe.resent_share is not None and probe.resent_share > MAX_RESENT_SHARE:
        text += f"; {probe.resent_share:.0%} of the packets had to be sent again"
        fix = "Replace the cables of both PCs, then try other ports of the switch"
        return _row(node, peer, "warn", text, fix, probe)
    slow = _find_slowness(group, node, peer, probe) if node != peer else ""
    if not slow:
        return _row(node, peer, "pass", text, "", probe)
    fix = "Connect both PCs by cable to one Gigabit switch; Wi-Fi and VPNs are too slow"
    return _row(node, peer, "warn", f"{text}; {slow}", fix, probe)


def _find_repair(group: CheckedGroup, node: str, peer: str, probe: LinkProbe) -> Repair | None:
    """Return the repair of a link: a rule for the firewall of the answering node."""
    answerer = group.nodes.get(peer)
    is_closed = probe.failure in ("dropped", "refused") and node != peer
    if not is_closed or answerer is None or answerer.facts.wsl is not None:
        return None
    if answerer.examination.network.firewall != "ufw":
        return None
    return open_ufw(peer, group.endpoints[node].address)


def _find_slowness(group: CheckedGroup, node: str, peer: str, probe: LinkProbe) -> str:
    """Return the reason why a link is slow, or "" if it is not."""
    # Latency before throughput: a slow round trip also lowers the measured throughput.
    if (probe.round_trip_s or 0.0) > SLOW_ROUND_TRIP_S:
        return "much slower than Gigabit Ethernet"
    if probe.bytes_per_s is None:
        return ""
    if probe.bytes_per_s < SLOW_BYTES_PER_S:
        return "much slower than Gigabit Ethernet"
    speeds = [_speed_of(group, name) for name in (node, peer)]
    known = [speed for speed in speeds if speed is not None]
    # The slower card limits the link; with one unknown speed there is no limit to compare with.
    if len(known) == 2 and probe.bytes_per_s * 8e-6 < MIN_SPEED_SHARE * min(known):
        return f"much slower than its network cards, which are linked at {min(known)} Mb/s"
    return ""


def _explain(
    group: CheckedGroup, node: str, peer: str, probe: LinkProbe, small: LinkProbe | None
) -> tuple[str, str]:
    """Return the reason why a link fails, and the fix."""
    address = group.endpoints[peer].address
    if probe.failure == "stalled":
        if small is not None and small.failure is None:
            device = group.endpoints[node].interface or "DEVICE"
            command = posix_command("sudo", "ip", "link", "set", device, "mtu", 1400)
            return (
                f"small packets reach {peer}, but large ones are lost (MTU black hole): "
                f"{probe.reason}",
                f"Give all devices on the path one packet size: {command} on both PCs shows "
                "whether it helps; then turn off jumbo frames or the VPN",
            )
        return (
            f"the connection to {peer} opens, but then nothing passes: {probe.reason}",
            "Check cable and switch; security software may hold connections back",
        )
    if node == peer:
        return (
            f"it cannot connect to its own address {address}: {probe.reason}",
            "WSL: hostAddressLoopback=true below [experimental] in %UserProfile%\\.wslconfig; "
            "elsewhere a firewall on that PC blocks it",
        )
    if probe.failure == "dropped":
        return (
            f"no answer from {peer} at {address}: a firewall on {peer} drops the connection",
            open_firewall(group, node, peer),
        )
    if probe.failure == "refused":
        return (
            f"{peer} at {address} refused the connection: a firewall on {peer} rejects it, or that "
            "PC forwards its ports to another system (WSL in NAT mode does)",
            open_firewall(group, node, peer),
        )
    if probe.failure == "no_way":
        return (
            f"there is no route to {peer} at {address}: {probe.reason}",
            "Connect both PCs to one network; run on the first: ip route",
        )
    return (
        f"the connection to {peer} at {address} broke: {probe.reason}",
        "Check cable and switch; security software on either PC may end connections",
    )


def open_firewall(group: CheckedGroup, node: str, peer: str) -> str:
    """Return the command that lets `node` through the firewall of `peer`."""
    source = group.endpoints[node].address
    facts = group.nodes.get(peer)
    if facts is not None and facts.facts.wsl is not None:
        return f"On Windows of {peer}, let {source} through the Hyper-V firewall: docs/nodes.md"
    kind = facts.examination.network.firewall if facts is not None else None
    if kind == "firewalld":
        rule = f'rule family="ipv4" source address="{source}" accept'
        command = posix_command(
            "sudo", "firewall-cmd", "--permanent", f"--add-rich-rule={rule}", "--reload"
        )
        return f"On {peer}: {command}"
    command = posix_command("sudo", "ufw", "allow", "proto", "tcp", "from", source)
    return f"On {peer}: {command}"


def _speed_of(group: CheckedGroup, name: str) -> int | None:
    node = group.nodes.get(name)
    device = find_device(node, group.endpoints[name].interface or "") if node else None
    return device.speed_mbit if device else None


def _names(pair: Pair) -> tuple[str, str]:
    return pair[0].name, pair[1].name


def _row(
    node: str, peer: str, status: Status, message: str, fix: str, probe: LinkProbe
) -> CheckRow:
    return CheckRow(
        check="tcp",
        node=node,
        peer=peer,
        status=status,
        message=message,
        fix=fix,
        evidence=probe.reason or _show_resent(probe),
        round_trip_s=probe.round_trip_s,
        bytes_per_s=probe.bytes_per_s,
    )


def _show_resent(probe: LinkProbe) -> str:
    share = probe.resent_share
    return "" if share is None else f"{share:.1%} of the packets were sent again"


def _untried(node: str, peer: str, error: RacklessError) -> CheckRow:
    hint = error.hint if isinstance(error, UserError) else "Please report it, with the log"
    fix = hint or f"rackless nodes show {node}"
    return CheckRow(check="tcp", node=node, peer=peer, status="fail", message=str(error), fix=fix)
