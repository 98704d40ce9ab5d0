"""Offer the script for the Windows of one node, with the addresses and the key of this cluster.

The node may be registered already, or be a PC that cannot be reached before its script has run.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from agents.shared.files.folder_files import read_regular
from agents.shared.files.full_disk import name_disk_error
from app.errors import UserError
from app.nodes.endpoints import is_loopback
from app.nodes.node import LocalAddress, Node, SshAddress, WslAddress, check_node_name
from app.nodes.own_address import ANYWHERE, own_address_toward
from app.provisioning.windows.facts import DEFAULT_SSH_PORT, Start, WindowsWanted
from app.provisioning.windows.plan import Step, steps_for
from app.provisioning.windows.script import script_name, write_script

DEFAULT_DISTRO = "Ubuntu-24.04"
KEY_NAMES = ("id_ed25519.pub", "id_ecdsa.pub", "id_rsa.pub")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptOptions:
    """Options that the user may choose for the script; None for the default."""

    distro: str | None = None
    ssh_port: int | None = None
    memory_gib: int | None = None
    start: Start = "boot"
    public_key: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowsScript:
    """The script for the Windows of a node, ready to be saved."""

    node: str
    file_name: str
    text: str
    steps: tuple[Step, ...]
    notes: tuple[str, ...]
    """Hints for the user before running it."""


def offer_script(nodes: Mapping[str, Node], name: str, options: ScriptOptions) -> WindowsScript:
    """Return the script for the PC that is, or will become, the node `name`.

    Args:
        nodes: all registered nodes.
        name: name of the node.
        options: options that the user chose.

    Raises:
        UserError: the name or an option cannot be used; the message names it.
    """
    check_node_name(name)
    node = nodes.get(name)
    address = node.address if node is not None else None
    distro = options.distro
    if distro is None:
        distro = address.distro if isinstance(address, WslAddress) else DEFAULT_DISTRO
    port = options.ssh_port
    if port is None:
        port = _known_port(address)
    others = [one.address for key, one in nodes.items() if key != name]
    hosts = [one.host for one in others if isinstance(one, SshAddress)]
    peers, unknown = _resolve(hosts)
    own = address.host if isinstance(address, SshAddress) else None
    masters = _own_addresses([own] if own else peers)
    key, note = _read_key(options.public_key)
    is_peer = any(isinstance(one, LocalAddress) for one in others)
    try:
        wanted = WindowsWanted(
            node=name,
            distro=distro,
            peers=(*peers, *(masters if is_peer else ())),
            masters=masters,
            ssh_port=port,
            public_key=key,
            memory_gib=options.memory_gib,
            start=options.start,
            has_ssh_agent=isinstance(address, WslAddress),
        )
    except ValueError as error:
        raise UserError(f"No script for {name}: {error}", "Choose another value") from error
    return WindowsScript(
        node=name,
        file_name=script_name(name),
        text=write_script(wanted),
        steps=steps_for(wanted),
        notes=(*note, *(f"{host} has no address now; its node cannot get in" for host in unknown)),
    )


def save_script(script: WindowsScript, file: Path) -> Path:
    """Write a script and return its absolute path.

    Raises:
        UserError: it cannot be written.
    """
    try:
        # Bytes: its line ends are those of Windows on every system.
        file.write_bytes(script.text.encode("ascii"))
    except OSError as error:
        raise UserError(
            f"{file} cannot be written: {name_disk_error(error)}", "Choose another place"
        ) from error
    return file.absolute()


def _known_port(address: object) -> int:
    """Return the SSH port of a node, or the default if the node uses Windows' own port 22."""
    if isinstance(address, SshAddress) and address.port >= 1024:
        return address.port
    return DEFAULT_SSH_PORT


def _resolve(hosts: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the addresses of hosts, and the hosts that cannot be resolved."""
    found: dict[str, None] = {}
    unknown = []
    for host in hosts:
        try:
            answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            unknown.append(host)
            continue
        for answer in answers:
            # A link-local IPv6 address may carry its device after a percent sign.
            address = str(answer[4][0]).split("%")[0]
            if not ipaddress.ip_address(address).is_loopback:
                found[address] = None
    return tuple(found), tuple(unknown)


def _own_addresses(targets: Iterable[str]) -> tuple[str, ...]:
    """Return the address of this PC on the route to the first reachable target, or to the
    internet.
    """
    for target in (*targets, ANYWHERE):
        found = own_address_toward(target)
        if found is not None and not is_loopback(found):
            return (found,)
    return ()


def _read_key(named: Path | None) -> tuple[str, tuple[str, ...]]:
    """Return the public key that may log in, and a note if there is no key."""
    if named is not None:
        return _key_in(named.expanduser()), ()
    for name in KEY_NAMES:
        file = Path("~/.ssh", name).expanduser()
        if file.is_file():
            return _key_in(file), ()
    text = (
        "This PC has no SSH key, so the script adds none. Make one (ssh-keygen -t ed25519) and "
        "save the script again, or add a key on the node by hand"
    )
    return "", (text,)


def _key_in(file: Path) -> str:
    try:
        lines = read_regular(file).decode("utf-8").strip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The public key {file} cannot be read: {error}", "Name a .pub file") from (
            error
        )
    if len(lines) != 1 or "PRIVATE KEY" in lines[0]:
        raise UserError(f"{file} is no public key", "Name the file that ends in .pub")
    kind, _, rest = lines[0].partition(" ")
    # Without the comment, which may have any characters.
    return f"{kind} {rest.split(' ')[0]}"
