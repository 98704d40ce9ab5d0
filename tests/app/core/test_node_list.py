"""A list of PCs is added against real SSH servers, from the core and from the command line."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from app.cli.main import run
from app.core.core import Core
from app.core.new_nodes import AddNodeList
from app.core.nodes import ListNodes, RemoveNode
from app.flows.node_list import parse_node_list
from tests.fakes.ssh import environment, loopback_node, make_key


async def test_every_line_ends_in_an_outcome_and_fingerprints_come_back(tmp_path: Path) -> None:
    make_key(tmp_path)
    with environment(HOME=str(tmp_path / "user"), SSH_AUTH_SOCK=""):
        folder = tmp_path / "user" / ".ssh"
        folder.mkdir(parents=True)
        (folder / "config").write_text("Host lab\n ProxyCommand false\n")
        key = tmp_path / "key"
        async with (
            loopback_node(tmp_path, "one") as one,
            loopback_node(tmp_path, "two") as two,
            Core.open(tmp_path / "master") as core,
        ):
            text = (
                f"a {one.user}@127.0.0.1:{one.port}\nb {two.user}@127.0.0.1:{two.port}\n"
                f"twin {one.user}@localhost:{one.port}\ngone {one.user}@127.0.0.1:1\na x@y"
            )
            lines = parse_node_list(text, ())
            first = await core.do(AddNodeList(lines=lines, key=key))
            assert [o.state for o in first] == ["confirm"] * 3 + ["failed"] * 2
            assert [o.fingerprint for o in first[:2]] == [one.fingerprint, two.fingerprint]
            assert (await core.do(ListNodes())) == ()
            shown = {o.host: o.fingerprint for o in first[:3]}
            second = await core.do(AddNodeList(lines=lines[:2], accepted=shown, key=key))
            assert [o.state for o in second] == ["added", "added"]
            twin = await core.do(AddNodeList(lines=lines[2:3], accepted=shown, key=key))
            assert "is the PC of a" in twin[0].message
            assert {node.name for node in await core.do(ListNodes())} == {"a", "b"}
            lab = parse_node_list("lab", ())
            for may_run, said in ((False, "runs a program"), (True, "gave no SSH connection")):
                (outcome,) = await core.do(AddNodeList(lines=lab, run_programs=may_run))
                assert said in outcome.message
            await core.do(RemoveNode(name="b"))
            other = make_key(tmp_path, "other")
            (refused,) = await core.do(AddNodeList(lines=lines[1:2], accepted=shown, key=other))
            assert (refused.state, refused.account) == ("failed", lines[1].target), refused


def test_the_command_shows_what_became_of_each_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RACKLESS_HOME", str(tmp_path / "master"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("gone anna@127.0.0.1:1\nall bob@pc\n"))
    assert run(["nodes", "add", "--from", "-", "--json"]) == 1
    gone, reserved = json.loads(capsys.readouterr().out)
    assert (gone["line"]["name"], gone["state"]) == ("gone", "failed")
    assert "nothing listens on port 1" in gone["message"]
    assert "reserved" in reserved["message"]
