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
from agents.contract.wake import WakeTarget
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
_FORM = (
    "Write it as USER@HOST or USER@HOST:PORT, such as anna@192.168.1.20 or anna@[fe80::7]:2222, or "
    "as a name of ~/.ssh/config"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SshAddress:
    host: str
    """Host name or address, without brackets, in lower case."""
    port: int = DEFAULT_SSH_PORT
    user: str
    key: Path | None = None
    """Private key file, the only one used; None: the SSH agent's keys, then `identity_files`."""
    identity_files: tuple[Path, ...] = ()
    """Private key files that ~/.ssh/config names; empty: the default files in ~/.ssh."""
    only_identity_files: bool = False
    """True if the SSH agent may only offer the keys of these files."""
    agent: str | None = None
    """Socket of the SSH agent; None: the one of the environment; `none`: no agent."""
    jumps: tuple[SshAddress, ...] = ()
    """Hosts to log in to on the route, the first one first; they have no jumps themselves."""
    proxy_command: str | None = None
    """Command whose stdio leads to the first host; the user has agreed to it."""
    alias: str = ""
    """Name in ~/.ssh/config by which the host was requested; empty if it is the host itself."""

    def __post_init__(self) -> None:
        if not 1 <= self.port <= 65535:
            raise UsageError(f"the SSH port is {self.port}; it must be from 1 to 65535", _FORM)

    @property
    def location(self) -> str:
        """`host:port`, with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def label(self) -> str:
        """Location for messages, with the name in ~/.ssh/config where it has one."""
        return f"{self.alias} ({self.location})" if self.alias else self.location

    @property
    def known_as(self) -> str:
        """Name under which its host key is stored: always with brackets and port."""
        # With the jump hosts' names: many networks use the same private addresses.
        return "@".join(f"[{hop.host}]:{hop.port}" for hop in (self, *reversed(self.jumps)))

    @property
    def hops(self) -> tuple[SshAddress, ...]:
        """Addresses to log in to one after the other, this one last, each with its own jumps."""
        return (
            *(replace(hop, jumps=self.jumps[:place]) for place, hop in enumerate(self.jumps)),
            self,
        )

    def __str__(self) -> str:
        """`user@host:port`, which `--ssh` takes, too."""
        return f"{self.user}@{self.location}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SshTarget:
    """A PC as the user typed it: an address, or a name in ~/.ssh/config."""

    host: str
    """Name as typed."""
    user: str | None = None
    """None: ~/.ssh/config may name one, else it is the user of this PC."""
    port: int | None = None
    """None: ~/.ssh/config may name one, else it is 22."""


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
    """Identity of a node at any address; over SSH in addition to its host key."""

    machine_id: str
    """Hash of the system's id."""
    agent_home: str
    """Folder of the agent there; it distinguishes two users of one PC."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    name: str
    """Name of 1 to 63 letters, digits, dots, dashes and underscores; also a folder name."""
    address: NodeAddress
    identity: NodeIdentity | None = None
    """None if unknown, as for a node that an earlier version added."""
    wake: WakeTarget | None = None
    """Network card that a packet can wake; None if unknown or missing."""

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


def with_key_of(address: SshAddress, host: SshAddress) -> SshAddress:
    """Return the address with the key of `host`, which may be one of its jump hosts."""
    if host.known_as == address.known_as:
        return replace(address, key=host.key)
    jumps = tuple(
        replace(jump, key=host.key) if hop.known_as == host.known_as else jump
        for jump, hop in zip(address.jumps, address.hops, strict=False)
    )
    return replace(address, jumps=jumps)


def parse_ssh_target(text: str) -> SshTarget:
    """Parse `[USER@]HOST[:PORT]`; an IPv6 address needs brackets when a port follows.

    Raises:
        UsageError: the text has another form; the message says what is missing.
    """
    user, at, place = text.strip().rpartition("@")
    if ":" in user:  # not quoted: a password may follow
        name = user.partition(":")[0]
        raise UsageError(
            f"the address of {name} at {place} has more than a user name before the @",
            "Write USER@HOST[:PORT] without a password: Rackless asks for it if one is needed.",
        )
    if not place or (at and not user):
        raise UsageError(f"{text!r} names no PC to log in to", _FORM)
    if at and not _USER.fullmatch(user):
        raise UsageError(f"{user!r} in {text!r} is not a user name", _FORM)
    host, port = _split_port(place, text)
    return SshTarget(host=host, port=port, user=user if at else None)


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
            return {"transport": "ssh", **_ssh_to_json(address)}
        case LocalAddress():
            return {"transport": "local"}
        case WslAddress():
            return {"transport": "wsl", "distro": address.distro}


def address_from_json(stored: Mapping[str, Any]) -> NodeAddress:
    """Return the address that `address_to_json` stored.

    Raises:
        ValueError: the transport is unknown, or a part of the address is missing.
    """
    try:
        match stored.get("transport"):
            case "ssh":
                return _ssh_from_json(stored)
            case "local":
                return LocalAddress()
            case "wsl":
                return WslAddress(distro=str(stored["distro"]))
    except KeyError as error:
        raise ValueError(f"the stored address has no {error}: {dict(stored)!r}") from error
    raise ValueError(f"the stored address has no known transport: {dict(stored)!r}")


def _ssh_to_json(address: SshAddress) -> dict[str, Any]:
    key = None if address.key is None else str(address.key)
    stored: dict[str, Any] = {"host": address.host, "port": address.port, "user": address.user}
    # Fields that most addresses lack are left out.
    more: dict[str, Any] = {
        "identity_files": [str(path) for path in address.identity_files],
        "only_identity_files": address.only_identity_files,
        "agent": address.agent,
        "jumps": [_ssh_to_json(hop) for hop in address.jumps],
        "proxy_command": address.proxy_command,
        "alias": address.alias,
    }
    return {**stored, "key": key, **{name: value for name, value in more.items() if value}}


def _ssh_from_json(stored: Mapping[str, Any]) -> SshAddress:
    key = stored.get("key")
    return SshAddress(
        host=str(stored["host"]),
        port=int(stored["port"]),
        user=str(stored["user"]),
        key=None if key is None else Path(key),
        identity_files=tuple(Path(path) for path in stored.get("identity_files", ())),
        only_identity_files=bool(stored.get("only_identity_files", False)),
        agent=stored.get("agent"),
        jumps=tuple(_ssh_from_json(hop) for hop in stored.get("jumps", ())),
        proxy_command=stored.get("proxy_command"),
        alias=str(stored.get("alias", "")),
    )


def with_identity(node: Node, facts: NodeFacts) -> Node:
    """Return the node with the identity and the wake target from its facts."""
    node = replace(node, wake=find_wake_target(facts) or node.wake)
    if not facts.machine_id or not facts.agent_home:
        return node
    found = NodeIdentity(machine_id=facts.machine_id, agent_home=facts.agent_home)
    return replace(node, identity=found)


def find_wake_target(facts: NodeFacts) -> WakeTarget | None:
    """Return the network card by which a node can be woken, or None if there is no such card.

    It is the card with the address that the master uses, else the only one that can be woken.
    """
    # In NAT mode WSL has a virtual card; Windows holds the real one.
    if facts.wsl is not None and facts.wsl != "mirrored":
        return None
    cards = [
        one for one in facts.interfaces if one.mac and one.broadcast and ":" not in one.address
    ]
    chosen = [one for one in cards if one.address == facts.address] or cards
    if len({one.mac for one in chosen}) != 1:
        return None
    one = chosen[0]
    try:
        return WakeTarget(
            mac=one.mac or "", broadcast=one.broadcast or "", device=one.name, is_on=one.wakes
        )
    except ValueError:  # a node's facts are not trusted
        return None


def identity_to_json(node: Node) -> dict[str, Any]:
    """Return identity and wake target as JSON values, for storage; empty if both are unknown."""
    identity = {} if node.identity is None else asdict(node.identity)
    return {**identity, **({} if node.wake is None else {"wake": asdict(node.wake)})}


def node_from_json(name: str, address: Mapping[str, Any], identity: Mapping[str, Any]) -> Node:
    """Return a stored node.

    Raises:
        ValueError: the address is invalid.
    """
    known = {key: str(identity[key]) for key in ("machine_id", "agent_home") if key in identity}
    return Node(
        name=name,
        address=address_from_json(address),
        identity=NodeIdentity(**known) if len(known) == 2 else None,
        wake=_wake_from_json(identity.get("wake")),
    )


def _wake_from_json(stored: Any) -> WakeTarget | None:
    if not isinstance(stored, Mapping):
        return None
    try:
        return WakeTarget(**stored)
    except (TypeError, ValueError):  # from another version, or edited: the next facts replace it
        return None


def _split_port(place: str, text: str) -> tuple[str, int | None]:
    if place.startswith("["):
        host, bracket, rest = place[1:].partition("]")
        if not bracket or not _is_ipv6(host) or (rest and not rest.startswith(":")):
            raise UsageError(f"{place!r} in {text!r} is not an IPv6 address in brackets", _FORM)
        return host, _read_port(rest[1:], text) if rest else None
    # An IPv6 address without brackets: its colons leave no room for a port.
    if place.count(":") > 1:
        if not _is_ipv6(place):
            raise UsageError(f"{place!r} in {text!r} is not a host", _FORM)
        return place, None
    host, colon, port = place.partition(":")
    if not _HOST.fullmatch(host) or host.startswith("-"):
        raise UsageError(f"{host!r} in {text!r} is not a host name or address", _FORM)
    return host, _read_port(port, text) if colon else None


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
