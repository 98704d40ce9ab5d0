"""Recognise a PC by its host key and machine id, regardless of its current address.

Addresses of a home network change hands (DHCP). Only a host key proves a PC's identity; the machine
id distinguishes cloned disks, which share their keys, and the agent's folder distinguishes two
users of one PC.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from app.errors import HostKeyChanged, HostKeyUnknown, UserError
from app.events import NodeSnapshot
from app.nodes.node import Node, NodeIdentity, SshAddress
from app.shell_words import command_here

SEARCHED_AFTER_S = 60.0
"""Silence after which a node is searched for, in seconds."""
FIRST_PAUSE_S = 300.0
MAX_PAUSE_S = 3600.0
"""Least and greatest pause between two searches for a node, in seconds."""


def find_twin(node: Node, others: Iterable[Node], home: Path) -> Node | None:
    """Return another node that is the same PC and user as `node`, or None."""
    for other in others:
        if other.identity is None or other.identity != node.identity:
            continue
        keys = {key for key in (fingerprint_at(node, home), fingerprint_at(other, home)) if key}
        # This PC itself has no host key here; images of one container share their machine id.
        if len(keys) < 2:
            return other
    return None


def refuse_twin(node: Node, twin: Node) -> UserError:
    """Return the error for a node that is already registered under another name."""
    hint = f"Use {twin.name}: one PC is one node."
    if isinstance(node.address, SshAddress) and isinstance(twin.address, SshAddress):
        command = command_here("rackless", "nodes", "set-address", twin.name, "--ssh", node.address)
        hint = f"If its address has changed: {command}. Else use {twin.name}: one PC is one node."
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
