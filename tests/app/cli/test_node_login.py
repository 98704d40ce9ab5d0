"""Logging in to a new PC from the terminal: what is asked for, and in which order."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from app.cli import node_login
from app.cli.kit.output import Output
from app.cli.main import build_parser
from app.core.new_nodes import AddNode
from tests.fakes.password_pc import PASSWORD, LoginCore, log_in, pc_with
from tests.fakes.ssh import environment


async def test_a_pc_behind_a_host_that_wants_a_password_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are confirmed and get our key; the first one's host key is not the second's."""
    asked: list[str] = []

    def answer(question: str) -> str:
        asked.append(question)
        return PASSWORD

    monkeypatch.setattr(node_login, "confirm", answer)
    monkeypatch.setattr(node_login, "ask_password", answer)
    (tmp_path / "user").mkdir()
    core = LoginCore(tmp_path / "master")
    monkeypatch.setattr(AddNode, "perform", log_in)
    args = build_parser().parse_args(["nodes", "add", "big", "--ssh", "big"])
    with environment(HOME=str(tmp_path / "user"), SSH_AUTH_SOCK=""):
        async with (
            pc_with(tmp_path / "gate") as (gate, shown),
            pc_with(tmp_path / "big") as (big, fingerprint),
        ):
            node = await node_login.act_asking(
                core,  # type: ignore[arg-type]
                AddNode(name="big", address=replace(big, jumps=(gate,))),
                args,
                Output(False, said := io.StringIO(), said),
            )
    assert node.name == "big"
    wanted = (shown, f"Password of {gate}", fingerprint, f"Password of {big}")
    assert all(part in question for part, question in zip(wanted, asked, strict=True)), asked
