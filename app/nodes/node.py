"""Names and addresses of nodes.

A node is reached over SSH, is the PC that the master runs on, or is a WSL distro of this PC. Each
kind of address is one frozen dataclass; all other code only opens the connection for it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from agents.contract.node import NodeFacts
from app.errors import UsageError
from app.events import TransportKind

DEFAULT_SSH_PORT = 22
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_HOST = re.compile(r"[\w.-]{1,253}")
_USER = re.compile(r"[^\s:/\x00-\x1f\x7f]{1,128}")
# Device names cannot be folders on Windows; `all` and `master` have a meaning in run files.
_RESERVED = frozenset(
    {"all", "master", "con", "prn", "aux", "nul"}
    | {f"{device}{digit}" for device in ("com", "lpt") for digit in range(1, 10)}
)
_FORM = "Write it as USER@HOST or USER@HOST:PORT, such as anna@192.168.1.20 or anna@[fe80::7]:2222"


@dataclass(frozen=True, kw_only=True, slots=True)
class SshAddress:
    host: str
    """Host name or address, without brackets, in lower case."""
    port: int = DEFAULT_SSH_PORT
    user: str
    key: Path | None = None
    """Private key file; None: the SSH agent's keys, then the default files in ~/.ssh."""

    def __post_init__(self) -> None:
        if not 1 <= self.port <= 65535:
            raise UsageError(f"the SSH port is {self.port}; it must be from 1 to 65535", _FORM)

    @property
    def location(self) -> str:
        """`host:port`, with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.user}@{self.location}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalAddress:
    """The PC that the master runs on."""

    def __str__(self) -> str:
        return "this PC"


@dataclass(frozen=True, kw_only=True, slots=True)
class WslAddress:
    distro: str
    """Name of the WSL distro on this PC, such as `Ubuntu-24.04`."""

    def __post_init__(self) -> None:
        # wsl.exe would take a leading dash for an option.
        if not self.distro.strip() or self.distro.startswith("-"):
            raise UsageError(
                f"{self.distro!r} is not the name of a WSL distro",
                "List the names with: wsl --list",
            )

    def __str__(self) -> str:
        return self.distro


NodeAddress = SshAddress | LocalAddress | WslAddress


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeIdentity:
    """What a node is, wherever it is reached; over SSH together with its host key."""

    machine_id: str
    """Hash of the system's id."""
    agent_home: str
    """Folder of the agent there: two users of one PC are two nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    name: str
    """Name of 1 to 63 letters, digits, dots, dashes and underscores; also a folder name."""
    address: NodeAddress
    identity: NodeIdentity | None = None
    """None: not known, as of a node that was added by an earlier version."""

    def __post_init__(self) -> None:
        check_node_name(self.name)


def check_node_name(name: str) -> None:
    """Validate the name of a node.

    Raises:
        UsageError: it is empty, too long, reserved, or has other characters.
    """
    if not _NAME.fullmatch(name) or name.endswith("."):
        raise UsageError(
            f"{name!r} cannot be the name of a node",
            "Use 1 to 63 letters, digits, dashes, dots or underscores, beginning with a letter "
            "or digit, such as pc-2",
        )
    # Windows reserves con.txt as well as con.
    if name.partition(".")[0].lower() in _RESERVED:
        raise UsageError(f"the name {name!r} is reserved", "Choose another name, such as pc-2")


def parse_ssh_address(text: str, key: Path | None = None) -> SshAddress:
    """Parse `USER@HOST[:PORT]`; an IPv6 address needs brackets when a port follows.

    Raises:
        UsageError: the text has another form; the message says what is missing.
    """
    user, at, place = text.strip().rpartition("@")
    if not at or not user:
        raise UsageError(f"{text!r} does not say which user logs in", _FORM)
    if ":" in user:  # not quoted: what follows may be a password
        name = user.partition(":")[0]
        raise UsageError(
            f"the address of {name} at {place} has more than a user name before the @",
            "Nodes let in a key, never a password: write USER@HOST[:PORT], and --key FILE.",
        )
    if not _USER.fullmatch(user):
        raise UsageError(f"{user!r} in {text!r} is not a user name", _FORM)
    host, port = _split_port(place, text)
    return SshAddress(host=host.lower(), port=port, user=user, key=key)


def transport_of(address: NodeAddress) -> TransportKind:
    match address:
        case SshAddress():
            return "ssh"
        case LocalAddress():
            return "local"
        case WslAddress():
            return "wsl"


def address_to_json(address: NodeAddress) -> dict[str, Any]:
    """Return the address as JSON values, for storage."""
    match address:
        case SshAddress():
            key = None if address.key is None else str(address.key)
            place = {"host": address.host, "port": address.port, "user": address.user}
            return {"transport": "ssh", **place, "key": key}
        case LocalAddress():
            return {"transport": "local"}
        case WslAddress():
            return {"transport": "wsl", "distro": address.distro}


def address_from_json(stored: Mapping[str, Any]) -> NodeAddress:
    """Return the address that `address_to_json` stored.

    Raises:
        ValueError: the transport is none of the three, or a part of the address is missing.
    """
    try:
        match stored.get("transport"):
            case "ssh":
                key = stored.get("key")
                return SshAddress(
                    host=str(stored["host"]),
                    port=int(stored["port"]),
                    user=str(stored["user"]),
                    key=None if key is None else Path(key),
                )
            case "local":
                return LocalAddress()
            case "wsl":
                return WslAddress(distro=str(stored["distro"]))
    except KeyError as error:
        raise ValueError(f"the stored address has no {error}: {dict(stored)!r}") from error
    raise ValueError(f"the stored address has no known transport: {dict(stored)!r}")


def with_identity(node: Node, facts: NodeFacts) -> Node:
    """Return the node with what its facts say of its identity."""
    if not facts.machine_id or not facts.agent_home:
        return node
    found = NodeIdentity(machine_id=facts.machine_id, agent_home=facts.agent_home)
    return replace(node, identity=found)


def identity_to_json(identity: NodeIdentity | None) -> dict[str, Any]:
    """Return the identity as JSON values, for storage; empty: it is not known."""
    return {} if identity is None else asdict(identity)


def node_from_json(name: str, address: Mapping[str, Any], identity: Mapping[str, Any]) -> Node:
    """Return a stored node.

    Raises:
        ValueError: the address is none.
    """
    known = {key: str(identity[key]) for key in ("machine_id", "agent_home") if key in identity}
    return Node(
        name=name,
        address=address_from_json(address),
        identity=NodeIdentity(**known) if len(known) == 2 else None,
    )


def _split_port(place: str, text: str) -> tuple[str, int]:
    if place.startswith("["):
        host, bracket, rest = place[1:].partition("]")
        if not bracket or not _is_ipv6(host) or (rest and not rest.startswith(":")):
            raise UsageError(f"{place!r} in {text!r} is not an IPv6 address in brackets", _FORM)
        return host, _read_port(rest[1:], text) if rest else DEFAULT_SSH_PORT
    # An IPv6 address without brackets: its colons leave no room for a port.
    if place.count(":") > 1:
        if not _is_ipv6(place):
            raise UsageError(f"{place!r} in {text!r} is not a host", _FORM)
        return place, DEFAULT_SSH_PORT
    host, colon, port = place.partition(":")
    if not _HOST.fullmatch(host) or host.startswith("-"):
        raise UsageError(f"{host!r} in {text!r} is not a host name or address", _FORM)
    return host, _read_port(port, text) if colon else DEFAULT_SSH_PORT


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def _read_port(digits: str, text: str) -> int:
    # isdigit accepts digits of other scripts, and int refuses thousands of digits by an error of
    # its own, hence the two guards.
    if not (digits.isascii() and digits.isdigit()) or not 1 <= int(digits[:9]) <= 65535:
        raise UsageError(f"the port {digits!r} in {text!r} is not a number from 1 to 65535", _FORM)
    return int(digits)
