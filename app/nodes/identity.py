"""Recognise a PC by its host key and machine id, regardless of its current address.

Addresses of a home network change hands (DHCP). Only a host key proves a PC's identity; the machine
id distinguishes cloned disks, which share their keys, and the agent's folder distinguishes two
users of one PC. PCs that were set up from one image may share both. Then they are two if both
answer at once with unlike boot ids or network cards.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from agents.contract.node import NodeFacts
from app.errors import HostKeyChanged, HostKeyUnknown, PcCloned, UserError
from app.events import NodeSnapshot
from app.nodes.node import Node, NodeIdentity, SshAddress
from app.shell_words import command_here

NEW_MACHINE_ID = (
    "sudo rm -f /etc/machine-id /var/lib/dbus/machine-id && sudo systemd-machine-id-setup"
)
NEW_HOST_KEYS = "sudo rm -f /etc/ssh/ssh_host_* && sudo ssh-keygen -A"
"""Commands that give a cloned PC an identity of its own; it has to be restarted afterwards."""
SEARCHED_AFTER_S = 60.0
"""Silence after which a node is searched for, in seconds."""
FIRST_PAUSE_S = 300.0
MAX_PAUSE_S = 3600.0
"""Least and greatest pause between two searches for a node, in seconds."""


def find_twins(node: Node, others: Iterable[Node], home: Path) -> tuple[Node, ...]:
    """Return the other nodes with the machine id and, if both are known, the host key of `node`.

    Each is the same PC or a clone; with the same folder of the agent, it is also the same user.
    """
    # This PC itself has no host key here; images of one container share their machine id.
    own = fingerprint_at(node, home)
    return tuple(
        other
        for other in others
        if node.identity is not None
        and other.identity is not None
        and other.identity.machine_id == node.identity.machine_id
        and len({own, fingerprint_at(other, home)} - {None}) < 2
    )


def tell_apart(one: NodeFacts, other: NodeFacts) -> str:
    """Return what proves that two nodes that answer at once are two PCs, or "" without a proof."""
    if one.boot_id and other.boot_id and one.boot_id != other.boot_id:
        return "boot ids"
    # One PC lists all its cards at any of its addresses, so sets with a common card are no proof.
    if one.macs and other.macs and not set(one.macs) & set(other.macs):
        return "network cards"
    return ""


def refuse_clone(node: Node, twin: Node, unlike: str) -> PcCloned:
    """Return the error for a PC that cannot be told from another one once either is off.

    Args:
        node: node to add, or to move to the address of another PC.
        twin: registered node with the same machine id.
        unlike: what proves that they are two, from `tell_apart`.
    """
    where = node.address.host if isinstance(node.address, SshAddress) else str(node.address)
    return PcCloned(
        f"{node.address} and {twin.name} at {twin.address} are two PCs that were cloned from one "
        f"disk: both answer now, and their {unlike} differ, but not their machine id and host key",
        f"Give this one its own: on {where}, run: {NEW_MACHINE_ID} && {NEW_HOST_KEYS}; then "
        "restart that PC and add it again",
        where=node.name,
    )


def refuse_twin(node: Node, twin: Node) -> UserError:
    """Return the error for a node that is already registered under another name."""
    hint = f"Use {twin.name}: one PC is one node."
    if isinstance(node.address, SshAddress) and isinstance(twin.address, SshAddress):
        command = command_here("rackless", "nodes", "set-address", twin.name, "--ssh", node.address)
        hint = (
            f"If its address has changed: {command}. Else use {twin.name}: one PC is one node. If "
            "these are two PCs, set up from one disk image, switch both on and try again."
        )
    return UserError(
        f"{node.address} is the PC of {twin.name}, which was added as {twin.address}: host key and "
        "machine id are the same",
        hint,
        where=node.name,
    )


def explain_key(error: UserError, node: Node, nodes: Iterable[Node], home: Path) -> UserError:
    """Return the error with the name of the node that the host key belongs to, if it is known.

    Args:
        error: error of the connection; one of another kind is returned unchanged.
        node: node to reach.
        nodes: all registered nodes.
        home: folder of the master.
    """
    if not isinstance(error, (HostKeyChanged, HostKeyUnknown)):
        return error
    shown = error.shown if isinstance(error, HostKeyChanged) else error.fingerprint
    owner = next(
        (n for n in nodes if n.name != node.name and fingerprint_at(n, home) == shown), None
    )
    if isinstance(error, HostKeyUnknown):
        if owner is not None:
            said = f"{error.message} It is the confirmed key of {owner.name}."
            error.reword(said, error.hint)
        return error
    find = f"rackless nodes find {node.name}"
    if owner is not None:
        error.reword(
            f"{error.host} answers with the host key of {owner.name}, not of {node.name}: that PC "
            "has this address now.",
            f"Nothing is wrong with either PC. Find the new address: {find}",
        )
    else:
        hint = f"If another PC has this address now, find the new one: {find}. {error.hint}"
        error.reword(error.message, hint)
    return error


def require_same(node: Node, found: NodeIdentity | None) -> None:
    """Check that what answers at a new address is the PC that `node` was.

    Raises:
        UserError: its machine id is another one.
    """
    known = node.identity
    if known is not None and found is not None and known.machine_id != found.machine_id:
        raise UserError(
            f"{node.address} is another PC than {node.name} was: its machine id differs",
            "Add it under a name of its own: rackless nodes add NAME --ssh USER@HOST. If it was "
            f"reinstalled, remove {node.name} first.",
            where=node.name,
        )


def require_card(old: Node, node: Node, facts: NodeFacts) -> None:
    """Check that the PC at a new address has the network card by which a node was reached.

    Raises:
        UserError: it has other cards, so it may be a clone of a node that is off.
    """
    if old.wake is not None and facts.macs and old.wake.mac not in facts.macs:
        command = command_here("rackless", "nodes", "set-address", old.name, "--ssh", node.address)
        raise UserError(
            f"{node.address} has the host key and machine id of {old.name}, but not its network "
            f"card {old.wake.mac}: it may be another PC, cloned from one disk",
            f"If it is {old.name}: {command}",
            where=old.name,
        )


def fingerprint_at(node: Node, home: Path) -> str | None:
    """Return the fingerprint of the node's confirmed host key, or None if it has none here."""
    if not isinstance(node.address, SshAddress):
        return None
    from app.nodes.transport.host_keys import HostKeys, fingerprint_of

    key = HostKeys(home).find(node.address)
    return None if key is None else fingerprint_of(key)


class SilentNodes:
    """Schedule of searches for nodes whose address may have changed, since they are silent."""

    def __init__(self) -> None:
        self._due: dict[str, tuple[float, float]] = {}
        """Time of the next search, and the pause after it, in seconds, by name."""

    def due(self, snapshots: Iterable[NodeSnapshot], now_s: float) -> tuple[str, ...]:
        """Return the nodes to search for now; each search doubles the pause to the next."""
        found = []
        for node in snapshots:
            if node.transport != "ssh" or node.state not in ("unreachable", "refused"):
                self._due.pop(node.name, None)
                continue
            due_s, pause_s = self._due.setdefault(
                node.name, (now_s + SEARCHED_AFTER_S, FIRST_PAUSE_S)
            )
            if now_s >= due_s:
                self._due[node.name] = (now_s + pause_s, min(2 * pause_s, MAX_PAUSE_S))
                found.append(node.name)
        return tuple(found)
