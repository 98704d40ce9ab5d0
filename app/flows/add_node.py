"""Add a node: read `user@host:port` as people type it, and say what is wrong. No Qt, no I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class SshTarget:
    user: str
    host: str
    port: int = 22


def read_target(text: str) -> SshTarget:
    """Read `user@host`, `user@host:2222` or `user@[fe80::1]:2222`.

    Raises:
        ValueError: a part is missing or wrong; the message says which.
    """
    user, at, rest = text.strip().partition("@")
    if not at or not user or not rest:
        raise ValueError("Write user@host, such as anna@192.168.1.20.")
    if any(letter.isspace() for letter in text.strip()):
        raise ValueError("There is a blank in the address.")
    host, port = _split_port(rest)
    if not host:
        raise ValueError("The name or address of the PC is missing behind the @.")
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"'{port}' is not a port; ports go from 1 to 65535.")
    return SshTarget(user=user, host=host, port=int(port))


def _split_port(rest: str) -> tuple[str, str]:
    if rest.startswith("["):
        host, _, tail = rest[1:].partition("]")
        return host, tail.removeprefix(":") or "22"
    if rest.count(":") > 1:  # an IPv6 address without brackets has no port
        return rest, "22"
    host, colon, port = rest.partition(":")
    return host, port if colon else "22"


def check_name(text: str, taken: tuple[str, ...]) -> str:
    """Return what is wrong with a node's name; empty: nothing."""
    name = text.strip()
    if not name:
        return "Give the PC a short name."
    if not _NAME.fullmatch(name):
        return "Use letters, digits, dots and dashes only, and begin with a letter or digit."
    if name in taken:
        return f"There is a node called {name} already."
    return ""


def suggest_name(host: str, taken: tuple[str, ...]) -> str:
    """Return a free name made of the host's first part; numbers stand alone for addresses."""
    literal = re.fullmatch(r"[0-9.]+|[0-9a-f:]+", host, re.IGNORECASE)
    first = "node" if literal else re.sub(r"[^a-z0-9-]", "", host.split(".")[0].lower())
    first = first.strip("-") or "node"
    if first not in taken and first != "node":
        return first
    number = 1
    while f"{first}-{number}" in taken:
        number += 1
    return f"{first}-{number}"
