"""Repairs from the command line: asked for, applied, refused, listed and undone."""

from __future__ import annotations

import asyncio
import getpass
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from app.cli import repairs
from app.cli.kit import output
from app.cli.kit.output import Output
from app.cli.main import build_parser
from app.core.nodes import CheckNodes
from app.errors import AdminRefused, UnshippedLock, UsageError
from app.provisioning.check_row import make_row
from app.provisioning.repairs import Repair, install_driver
from app.provisioning.system_repairs import synchronise_clock
from tests.fakes.core import NOW_S, FakeCore, make_node

BAD = make_row("clock", "alpha", "warn", "42 s behind", "set it", synchronise_clock())
WELL = make_row("clock", "alpha", "pass", "within 0.1 s")
BROKEN = make_row("environment", "alpha", "fail", "there is none yet", "set it up")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def core() -> FakeCore:
    node = make_node("alpha")
    assert node.facts is not None
    started = replace(node, facts=replace(node.facts, started_s=NOW_S - 60))
    core = FakeCore(node_map={"alpha": started})
    core.repairs.admin = "passwordless"
    return core


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Passwords that a person types, the next one first; a terminal answers yes to questions."""
    words: list[str] = []
    monkeypatch.setattr(getpass, "getpass", lambda prompt, stream: words.pop(0))
    monkeypatch.setattr(repairs, "confirm", lambda question: True)
    # pytest puts its own streams back before the test begins.
    terminal = SimpleNamespace(stdin=Terminal(), stderr=Terminal())
    monkeypatch.setattr(output, "sys", terminal)
    return words


def run(
    core: FakeCore, *words: str, checks: Sequence[Any] = (), as_json: bool = False
) -> tuple[int, str]:
    """Run a command; each of its checks finds the next ones of `checks`."""
    coming = list(checks)

    async def check(*args: Any, **options: Any) -> Any:
        return coming.pop(0)

    core.answers[CheckNodes] = check
    args = build_parser().parse_args(words)
    out, text = Output(as_json, said := io.StringIO()), said.getvalue
    # Past `with_core`, which would open a real one.
    handler = args.handler.__closure__[0].cell_contents
    return asyncio.run(handler(core, args, out)), text()


def test_a_repair_is_applied_and_its_row_shown_again(core: FakeCore) -> None:
    code, text = run(core, "check", "--fix", "--yes", checks=[(BAD,)])
    assert code == 0
    assert "    sudo timedatectl set-ntp true" in text
    assert "An administrator's rights are needed.\nIt can be undone." in text
    assert "pass: alpha, clock: nothing is wrong any more" in text
    assert [one.repair for one in core.repairs.log["alpha"]] == ["time-sync"]


def test_nothing_is_applied_without_a_yes(core: FakeCore) -> None:
    code, text = run(core, "check", "--fix", checks=[(BAD,)])
    assert code == 0
    assert "Not applied" in text
    assert core.repairs.log == {}


def test_json_asks_nobody(core: FakeCore) -> None:
    for words in (("check", "--fix"), ("nodes", "prepare", "alpha")):
        with pytest.raises(UsageError, match="with --json need --yes"):
            run(core, *words, checks=[(BAD,)], as_json=True)
    _, text = run(core, "check", "--fix", "--yes", checks=[(BAD,)], as_json=True)
    found = json.loads(text)
    assert found["rows"][0]["status"] == "pass"
    assert found["changes"][0]["change"]["steps"][0]["state"] == "done"
    _, text = run(core, "check", checks=[(BAD,)], as_json=True)
    assert json.loads(text)[0]["repair"]["steps"][0]["run"] == ["timedatectl", "set-ntp", "true"]


def test_a_password_is_asked_once_and_again_if_it_is_wrong(
    core: FakeCore, typed: list[str]
) -> None:
    core.repairs.admin = "password"
    typed += ["no", "open sesame"]
    other = Repair(id="b", title="B", explanation="", steps=synchronise_clock().steps)
    rows = (BAD, make_row("b", "alpha", "warn", "bad", repair=other))
    code, text = run(core, "check", "--fix", checks=[rows])
    assert code == 0
    assert core.repairs.heard == ["no", "open sesame", "open sesame"]
    assert "sesame" not in text
    typed += ["no", "no", "no"]
    code, text = run(core, "check", "--fix", checks=[(BAD,)])
    assert code == 1
    assert "did not take the password" in text


def test_nobody_is_asked_for_a_password_without_a_terminal(core: FakeCore) -> None:
    core.repairs.admin = "password"
    code, text = run(core, "check", "--fix", "--yes", checks=[(BAD,)])
    assert code == 1
    assert "sudo on alpha wants a password" in text
    core.repairs.admin = "none"
    code, text = run(core, "check", "--fix", "--yes", checks=[(BAD,)])
    assert "Ask an administrator of that PC to do this: sudo timedatectl set-ntp true" in text
    assert core.repairs.log == {}


def test_a_failed_repair_says_how_to_undo_what_was_done(core: FakeCore) -> None:
    core.repairs.problem = "The step failed."
    code, text = run(core, "check", "--fix", "--yes", checks=[(BAD,)])
    assert code == 1
    assert "The step failed.\nWhat was done before can be undone: rackless nodes undo alpha" in text


def test_a_driver_is_installed_once_until_the_pc_is_restarted(core: FakeCore) -> None:
    row = make_row("gpu", "alpha", "fail", "no driver", "install it", install_driver())
    code, text = run(core, "check", "--fix", "--yes", checks=[(row,)])
    assert code == 1
    assert "Restart alpha, then check again" in text
    assert len(core.repairs.log["alpha"]) == 1
    code, text = run(core, "check", "--fix", "--yes", checks=[(row,)])
    assert "Restart alpha, then check again" in text
    assert len(core.repairs.log["alpha"]) == 1


def test_a_script_for_windows_is_shown(core: FakeCore) -> None:
    script = Repair(id="w", title="W", explanation="", where="windows", script="Set-It -On\n")
    row = make_row("wsl", "alpha", "fail", "nat", "change it", script)
    code, text = run(core, "check", "--fix", "--yes", checks=[(row,)])
    assert code == 1
    assert "in PowerShell on its Windows, as administrator:\nSet-It -On" in text


def test_prepare_repairs_sets_up_and_checks_again(core: FakeCore) -> None:
    words = ("nodes", "prepare", "alpha", "--yes")
    code, text = run(core, *words, checks=[(BAD, BROKEN), (WELL,)])
    assert (code, text.splitlines()[-1]) == (0, "alpha is ready to train")
    assert [call[0] for call in core.calls] == ["nodes.setup"]
    assert len(core.repairs.log["alpha"]) == 1
    code, text = run(core, *words, checks=[(WELL,)])
    assert (code, text) == (0, "alpha is ready to train; nothing to do\n")
    assert len(core.repairs.log["alpha"]) == 1
    code, text = run(core, *words, checks=[(BROKEN,), (BROKEN,)])
    assert code == 1
    assert "alpha is not ready: 1 problem left" in text


@pytest.mark.parametrize(
    ("words", "answer", "is_done"),
    [
        (("nodes", "setup", "alpha"), True, True),
        (("nodes", "setup", "alpha"), False, False),
        (("nodes", "setup", "alpha"), None, False),  # there is no terminal
        (("nodes", "setup", "alpha", "--json"), True, False),
        (("nodes", "prepare", "alpha"), True, True),
    ],
)
def test_hashes_of_an_index_are_taken_after_a_yes_only(
    core: FakeCore,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    answer: bool | None,
    is_done: bool,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(repairs, "can_ask", lambda: answer is not None)
    monkeypatch.setattr(repairs, "confirm", lambda question: asked.append(question) or answer)
    core.failure = UnshippedLock("alpha", "cu126", "https://index.example/cu126")
    first, again = ("nodes.setup", "alpha"), ("nodes.setup", "alpha", True)
    as_json = "--json" in words
    checks = [(BROKEN,), (WELL,)]
    if is_done:
        assert run(core, *words, checks=checks)[0] == 0
        assert core.calls == [first, again]
    else:
        with pytest.raises(UnshippedLock, match=r"would be those that https://index.example/cu126"):
            run(core, *words, checks=checks, as_json=as_json)
        assert core.calls == [first]
    assert bool(asked) is (answer is not None and not as_json)


@pytest.mark.parametrize(
    "words", [("setup", "alpha", "--accept-index"), ("prepare", "alpha", "--yes")]
)
def test_hashes_of_an_index_are_agreed_to_beforehand(
    core: FakeCore, words: tuple[str, ...]
) -> None:
    assert run(core, "nodes", *words, checks=[(BROKEN,), (WELL,)])[0] == 0
    assert core.calls == [("nodes.setup", "alpha", True)]


def test_changes_are_listed_and_undone(core: FakeCore, typed: list[str]) -> None:
    assert run(core, "nodes", "changes", "alpha")[1] == (
        "Rackless has repaired nothing on alpha yet\n"
    )
    run(core, "check", "--fix", "--yes", checks=[(BAD,)])
    _, text = run(core, "nodes", "changes", "alpha")
    assert "1: Synchronise the clock" in text
    assert "by anna@desk: in force" in text
    core.repairs.admin = "password"
    typed += ["open sesame"]
    code, text = run(core, "nodes", "undo", "alpha", "--change", "1")
    assert code == 0
    assert text.endswith("1 of 1 change undone\n")
    assert run(core, "nodes", "undo", "alpha", "--all") == (0, "There is nothing left to undo\n")


def test_what_cannot_be_undone_is_said(core: FakeCore) -> None:
    row = make_row("gpu", "alpha", "fail", "no driver", "install it", install_driver())
    run(core, "check", "--fix", "--yes", checks=[(row,)])
    core.repairs.admin = "password"  # which nobody is asked for: nothing is taken back
    code, text = run(core, "nodes", "undo", "alpha")
    assert code == 1
    assert "cannot be taken back" in text
    assert run(core, "nodes", "undo", "alpha", "--all") == (0, "There is nothing left to undo\n")
    assert run(core, "nodes", "undo", "alpha", as_json=True) == (0, "[]\n")


def test_a_refused_password_ends_undo(core: FakeCore, typed: list[str]) -> None:
    run(core, "check", "--fix", "--yes", checks=[(BAD,)])
    core.repairs.admin = "password"
    typed += ["no"] * 3
    with pytest.raises(AdminRefused):
        run(core, "nodes", "undo", "alpha")
