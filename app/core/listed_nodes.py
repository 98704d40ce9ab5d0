"""Add the PCs of a list, and let accounts on the way accept our key with their passwords."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from app.errors import HostKeyUnknown, LoginRefused, RunsPrograms, UserError, describe_error
from app.flows.node_list import NodeLine, NodeOutcome
from app.nodes.key_copy import with_key_of
from app.nodes.node import SshAddress

if TYPE_CHECKING:
    from app.events import NodeSnapshot
    from app.nodes.key_copy import CopiedKey
    from app.nodes.ssh_hosts import SshHost


class Adder(Protocol):
    """What `core.nodes` does with one PC; errors are those of `CoreNodes`."""

    async def resolve(self, target: str, key: Path | None, agreed: tuple[str, ...]) -> SshHost: ...
    async def add(
        self, name: str, address: SshAddress, accept_host_key: str | None
    ) -> NodeSnapshot: ...
    async def copy_key(
        self, address: SshAddress, password: str, accept_host_key: str | None
    ) -> CopiedKey: ...


class ListedNodes:
    """Adds lines of one list, which may share jump hosts; the passwords end with it."""

    def __init__(
        self,
        nodes: Adder,
        accepted: Mapping[str, str],
        passwords: Mapping[str, str],
        hosts: dict[str, SshAddress],
        *,
        key: Path | None,
        run_programs: bool,
    ) -> None:
        """`hosts`: those that our key was copied to, by account, with the key that they need; gets
        new ones. The other arguments are those of `CoreNodes.add_list`.
        """
        self._nodes = nodes
        self._accepted = accepted
        self._passwords = passwords
        self._hosts = hosts
        self._key = key
        self._run_programs = run_programs
        self._copying = asyncio.Lock()
        self._refused: dict[str, LoginRefused] = {}
        """Accounts that did not take their password."""

    async def add(self, line: NodeLine) -> NodeOutcome:
        """Add one PC and return what became of it."""
        if line.problem:
            return NodeOutcome(line=line, state="failed", message=line.problem)
        try:
            node = await self._add(line.name, await self._resolve(line.target))
        except HostKeyUnknown as error:
            return NodeOutcome(
                line=line,
                state="confirm",
                message=f"{error.host} shows {error.fingerprint}",
                host=error.host,
                fingerprint=error.fingerprint,
            )
        except UserError as error:
            account = error.account if isinstance(error, LoginRefused) else ""
            said = describe_error(error)
            return NodeOutcome(line=line, state="failed", message=said, account=account)
        return NodeOutcome(line=line, state="added", message=node.address)

    async def _resolve(self, target: str) -> SshAddress:
        """Return the address of a target, with all programs of ~/.ssh/config or with none."""
        agreed: tuple[str, ...] = ()
        while True:
            try:
                return (await self._nodes.resolve(target, self._key, agreed)).address
            except RunsPrograms as error:
                if not self._run_programs:
                    raise
                agreed = (*agreed, error.command)

    async def _add(self, name: str, address: SshAddress) -> NodeSnapshot:
        for host in self._hosts.values():
            address = with_key_of(address, host)
        accepted: str | None = None
        passed = set[str]()
        while True:
            try:
                return await self._nodes.add(name, address, accepted)
            except HostKeyUnknown as error:
                if error.host in passed or self._accepted.get(error.host) != error.fingerprint:
                    raise
                passed.add(error.host)
                accepted = error.fingerprint
            except LoginRefused as error:
                account = error.account
                if account in passed or account not in self._passwords:
                    raise
                passed.add(account)
                address = await self._let_in(address, account, accepted)
                # It is stored by now, and says nothing about the next host on the way.
                accepted = None

    async def _let_in(self, address: SshAddress, account: str, accepted: str | None) -> SshAddress:
        """Let an account on the way accept our key; return the address with the key it needs.

        One at a time: PCs share jump hosts, where a password is tried once, and all of them may get
        the one key that is made here.
        """
        async with self._copying:
            if account in self._refused:
                raise self._refused[account]
            if account in self._hosts:
                return with_key_of(address, self._hosts[account])
            try:
                copied = await self._nodes.copy_key(address, self._passwords[account], accepted)
            except LoginRefused as error:
                self._refused[account] = error
                raise
            self._hosts[account] = copied.host
            return copied.address
