"""Add a PC: what is asked, what is wrong with an answer, and the address it makes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from app.errors import UsageError
from app.nodes.node import LocalAddress, NodeAddress, check_node_name, parse_ssh_address


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    way: Literal["ssh", "local"] = "ssh"
    target: str = ""
    """`user@host`, with `:port` behind it where it is not 22."""
    key: str = ""
    """Private key file; empty: the SSH agent's keys, then the default files."""
    name: str = ""
    """Empty: the suggested one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Review:
    name: str
    """The name that the node would get."""
    address: NodeAddress | None
    """None while a problem stands. The key file is put in by the caller, who may name paths."""
    problems: dict[str, str]
    """Field -> what is wrong with it."""


def review(answers: Answers, taken: Sequence[str]) -> Review:
    """Check the answers; `taken` are the names in use."""
    problems: dict[str, str] = {}
    address: NodeAddress | None = LocalAddress()
    host = "this-pc"
    if answers.way == "ssh":
        try:
            ssh = parse_ssh_address(answers.target)
            address, host = ssh, ssh.host
        except UsageError as error:
            address, host = None, "node"
            problems["target"] = f"{error.message[:1].upper()}{error.message[1:]}. {error.hint}."
    name = answers.name.strip() or suggest_name(host, taken)
    problem = _name_problem(name, taken)
    if problem:
        problems["name"] = problem
    return Review(name=name, address=None if problems else address, problems=problems)


def suggest_name(host: str, taken: Sequence[str]) -> str:
    """Return a free name: the first part of a host name, `node-1` for a bare address."""
    is_literal = re.fullmatch(r"[0-9.]+|.*:.*", host) is not None
    first = "" if is_literal else re.sub(r"[^a-z0-9-]", "", host.split(".")[0].lower()).strip("-")
    if first and first != "node" and first not in taken:
        return first
    first, number = first or "node", 1
    while f"{first}-{number}" in taken:
        number += 1
    return f"{first}-{number}"


def _name_problem(name: str, taken: Sequence[str]) -> str:
    if name in taken:
        return f"There is a node called {name} already."
    try:
        check_node_name(name)
    except UsageError as error:
        return f"{error.message[:1].upper()}{error.message[1:]}. {error.hint}."
    return ""
