"""Accounts of a list let our key in with their passwords: once each, also of shared jump hosts."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from app.core.action import Report
from app.core.new_nodes import AddNode, AddNodeList, ResolveHost
from app.core.state import CoreState
from app.flows.node_list import NodeOutcome, parse_node_list
from app.nodes.node import SshAddress
from app.nodes.ssh_hosts import SshHost
from tests.fakes.password_pc import PASSWORD, LoginCore, files_with, log_in, pc_with
from tests.fakes.ssh import environment, make_key


class Nodes(LoginCore):
    """Nodes by the target of a line."""

    def __init__(self, home: Path, addresses: Mapping[str, SshAddress]) -> None:
        super().__init__(home)
        self.addresses = addresses
        self.accepted: dict[str, str] = {}

    async def add_list(self, passwords: Mapping[str, str]) -> tuple[NodeOutcome, ...]:
        """Add all of them at once, as often as there are fingerprints to confirm."""
        lines = parse_node_list("\n".join(self.addresses), ())
        while True:
            add = AddNodeList(lines=lines, accepted=self.accepted, passwords=passwords)
            outcomes = await self.do(add)
            new = {o.host: o.fingerprint for o in outcomes if o.state == "confirm"}
            if not new:
                return outcomes
            self.accepted |= new
            passwords = {}


async def resolve(self: ResolveHost, core: CoreState, report: Report) -> SshHost:
    return SshHost(address=cast(Nodes, core).addresses[self.target], notes=())


async def test_pcs_behind_one_host_are_let_in_with_one_password_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AddNode, "perform", log_in)
    monkeypatch.setattr(ResolveHost, "perform", resolve)
    (tmp_path / "user").mkdir()
    locked = make_key(tmp_path / "user" / ".ssh", "id_ed25519", passphrase="secret")
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(environment(HOME=str(tmp_path / "user"), SSH_AUTH_SOCK=""))
        # The assertion of `pc_with`: none of them was sent more passwords than these.
        pcs = {"gate": 2, "a": 1, "b": 1}
        found = {
            name: (await stack.enter_async_context(pc_with(tmp_path / name, most=most)))[0]
            for name, most in pcs.items()
        }
        gate = found.pop("gate")
        behind = {name: replace(one, jumps=(gate,)) for name, one in found.items()}
        nodes = Nodes(tmp_path / "master", behind)
        refused = await nodes.add_list({})
        assert [o.account for o in refused] == [str(gate)] * 2
        wrong = await nodes.add_list({str(gate): "wrong"})
        assert ["does not accept this password" in o.message for o in wrong] == [True, True]
        # Through the gate, which both need; their own accounts still refuse.
        through = await nodes.add_list({str(gate): PASSWORD})
        assert [(o.state, o.account) for o in through] == [
            ("failed", str(one)) for one in found.values()
        ]
        added = await nodes.add_list(dict.fromkeys(map(str, found.values()), PASSWORD))
        assert [o.state for o in added] == ["added", "added"], added
        lines = [
            (tmp_path / name / "pc/.ssh/authorized_keys").read_text().splitlines() for name in pcs
        ]
        assert [len(one) for one in lines] == [1, 1, 1]
    assert locked.read_text().startswith("-----BEGIN")
    assert not files_with(tmp_path, PASSWORD)
