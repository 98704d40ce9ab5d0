"""Wake a node: send the magic packet from every PC in its network until the node answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence

from agents.contract.requests.examination import WakeOther
from agents.contract.wake import WakeTarget, send_magic_packet
from app.errors import NodeUnreachable, UserError
from app.nodes.client import NodeClient
from app.nodes.discovery.neighbours import own_addresses
from app.nodes.node import Node
from app.progress import OnMessage
from app.shell_words import posix_command

WAKE_TIMEOUT_S = 180.0
"""Maximum time from the first packet to an answer, in seconds; the PC may have to boot."""
REPEAT_S = 5.0
"""Pause between two packets and between two attempts to connect, in seconds."""


async def wake_node(
    node: Node,
    helpers: Sequence[NodeClient],
    answers: Callable[[], Awaitable[bool]],
    progress: OnMessage,
    timeout_s: float = WAKE_TIMEOUT_S,
) -> None:
    """Send magic packets until the node answers.

    Args:
        node: node to wake.
        helpers: nodes of the same network, which also send packets.
        answers: tries to reach the node; returns True if it answers.
        progress: gets a sentence before each attempt.
        timeout_s: maximum duration.

    Raises:
        UserError: its hardware address is not known.
        NodeUnreachable: it does not answer; the hint names possible causes.
    """
    target = node.wake
    if target is None:
        raise UserError(
            f"the hardware address of {node.name} is not known, so it cannot be woken",
            "It is learned when the node answers over a wired network: start it by hand once, then "
            f"run: rackless nodes show {node.name}",
            where=node.name,
        )
    end_s = time.monotonic() + timeout_s
    while True:
        num_sent = await _send(target, helpers)
        if not num_sent:
            raise NodeUnreachable(
                f"no packet could be sent to the network of {node.name} ({target.broadcast})",
                "Check that this PC is in a network: ip addr",
            )
        left_s = end_s - time.monotonic()
        progress(f"Waking {node.name} ({target.mac}); waiting for it for {max(0, left_s):.0f} s")
        began_s = time.monotonic()
        if await answers():
            return
        if time.monotonic() >= end_s:
            raise _still_silent(node, target, timeout_s)
        await asyncio.sleep(max(0.0, REPEAT_S - (time.monotonic() - began_s)))


async def _send(target: WakeTarget, helpers: Sequence[NodeClient]) -> int:
    """Send one packet from each PC; return the number of packets sent."""
    sources = await asyncio.to_thread(own_addresses)
    num_sent = await asyncio.to_thread(send_magic_packet, target, tuple(sources))

    async def ask(helper: NodeClient) -> int:
        with contextlib.suppress(UserError):  # the helper may be off by now as well
            return (await helper.ask(WakeOther(target=target))).value
        return 0

    return num_sent + sum(await asyncio.gather(*(ask(helper) for helper in helpers)))


def _still_silent(node: Node, target: WakeTarget, timeout_s: float) -> NodeUnreachable:
    setting = posix_command("sudo", "ethtool", "-s", target.device, "wol", "g")
    if target.is_on is False:
        reason = (
            f"Wake-on-LAN was off there when it last answered. Start it by hand and run: {setting}"
        )
    elif target.is_on is None:
        reason = (
            f"Whether Wake-on-LAN is on there is not known. Start it by hand and run: {setting}"
        )
    else:
        reason = "Its network card was set to wake it"
    return NodeUnreachable(
        f"{node.name} does not answer {timeout_s:.0f} s after it was sent packets to wake it",
        f"{reason}. In its BIOS, Wake on LAN (or: power on by PCIe) has to be on and ErP off; over "
        "Wi-Fi it cannot be woken, nor after its power was cut. If it has another address now: "
        f"rackless nodes find {node.name}",
    )


def share_network(target: WakeTarget, other: WakeTarget | None) -> bool:
    """Return True if another node is in the network of the node to wake."""
    return other is not None and other.broadcast == target.broadcast and other.mac != target.mac
