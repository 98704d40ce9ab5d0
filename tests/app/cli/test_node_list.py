"""`rackless nodes add --from`: fingerprints and passwords of a list, as they are asked for."""

from __future__ import annotations

import asyncio
import getpass
import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.cli import node_list
from app.cli.kit import output
from app.cli.kit.output import Output
from app.cli.main import build_parser
from tests.fakes.core import PASSWORD, FakeCore


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


Add = Callable[..., tuple[int, str, list[str]]]


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Add:
    """Add three PCs that want passwords, and one that does not, with what a person types."""
    path = tmp_path / "pcs"
    path.write_text("big anna@10.0.0.2\nlab bob@10.0.0.3\nold bob@10.0.0.4\nfree me@10.0.0.5\n")

    def run(*typed: str, as_json: bool = False) -> tuple[int, str, list[str]]:
        core = FakeCore(locked_hosts={"10.0.0.2", "10.0.0.3", "10.0.0.4"})
        coming, asked = list(typed), list[str]()

        def type_next(question: str, stream: object) -> str:
            asked.append(question)
            return coming.pop(0)

        monkeypatch.setattr(getpass, "getpass", type_next)
        monkeypatch.setattr(node_list, "confirm", lambda question: True)
        terminal = SimpleNamespace(stdin=Terminal(), stderr=Terminal())
        monkeypatch.setattr(output, "sys", terminal)
        args = build_parser().parse_args(["nodes", "add", "--from", str(path)])
        out = Output(as_json, said := io.StringIO(), said)
        code = asyncio.run(args.handler.__closure__[0].cell_contents(core, args, out))
        assert coming == []
        return code, said.getvalue(), asked

    return run


ONE_FOR_ALL = "One password for all 3 accounts (empty: ask for each): "


def test_one_password_opens_all(add: Add) -> None:
    code, text, asked = add(PASSWORD)
    assert (code, asked) == (0, [ONE_FOR_ALL])
    assert "4 PCs are added." in text
    assert "kept nowhere, Rackless adds your key to ~/.ssh/authorized_keys" in text
    assert PASSWORD not in text


def test_each_account_is_asked_for_and_one_can_be_skipped(add: Add) -> None:
    code, text, asked = add("", PASSWORD, "wrong", "", "")
    each = [f"Password of {one} (empty: skip it): " for one in ("bob@10.0.0.3", "bob@10.0.0.4")]
    assert asked == [ONE_FOR_ALL, f"Password of anna@10.0.0.2{each[0][24:]}", *each, each[0]]
    assert code == 1
    assert "bob@10.0.0.3 does not accept this password" in text
    assert "2 PCs are added, 2 want a password." in text
    assert "rackless nodes add old --ssh bob@10.0.0.4" in text


def test_nobody_is_asked_where_a_program_reads(add: Add) -> None:
    code, _, asked = add(as_json=True)
    assert (code, asked) == (1, [])
