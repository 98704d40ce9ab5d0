"""Repairs of a real node over its own SSH server: previewed, applied, listed and undone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agents.contract.repair import FileEdit, RepairStep
from app.core.action import sentences
from app.core.core import Core
from app.core.new_nodes import AddNode
from app.core.repairs import ApplyRepair, ReadChanges, RetestRow, ShowRepair, UndoChanges
from app.errors import UserError
from app.provisioning.check_row import make_row
from app.provisioning.repairs import Repair
from tests.fakes.ssh import address_of, loopback_node


def made_for(folder: Path, *more: RepairStep) -> Repair:
    edit = FileEdit(path=str(folder / "hosts"), swap=(("old", "new \u00e4"),))
    steps = (RepairStep(says="Edit hosts", as_root=False, edit=edit), *more)
    return Repair(id="hosts", title="Correct hosts", explanation="It helps.", steps=steps)


async def test_a_repair_is_applied_listed_and_undone(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("one\nold\n", encoding="utf-8")
    bad = RepairStep(says="Fail", as_root=False, run=("sh", "-c", "echo 'b\x1b[31mad'; exit 4"))
    repair = made_for(tmp_path, bad)
    async with loopback_node(tmp_path) as server, Core.open(tmp_path / "master") as core:
        await core.do(
            AddNode(name="pc", address=address_of(server), accept_host_key=server.fingerprint)
        )
        shown = await core.do(ShowRepair(node="pc", repair=repair))
        assert (shown.steps[0].before, shown.steps[0].after) == ("one\nold\n", "one\nnew \u00e4\n")
        said: list[str] = []
        change = await core.do(
            ApplyRepair(node="pc", repair=repair, shown=shown), sentences(said.append)
        )
        assert "\x1b" not in "".join(said)
        assert said[0] == "Edit hosts ..."
        assert "exit code 4" in change.problem
        assert hosts.read_text(encoding="utf-8") == "one\nnew \u00e4\n"
        assert (await core.do(ReadChanges(node="pc"))).changes == (change,)
        assert "@" in change.by
        (undone,) = await core.do(UndoChanges(node="pc", numbers=(change.number,)))
        assert undone.undone_s is not None
        assert hosts.read_text(encoding="utf-8") == "one\nold\n"
        with pytest.raises(UserError, match="pc: There is no change 9"):
            await core.do(UndoChanges(node="pc", numbers=(9,)))
        # A row that no check gives any more stands for something that is well.
        (row,) = await core.do(RetestRow(row=make_row("hosts", "pc", "warn", "bad")))
        assert row.status == "pass"
        reach = make_row("reach", "pc", "fail", "it was off")
        assert [one.status for one in await core.do(RetestRow(row=reach))] == ["pass"]


async def test_a_repair_goes_on_when_nobody_listens_any_more(tmp_path: Path) -> None:
    slow = RepairStep(
        says="Take long",
        as_root=False,
        run=("sh", "-c", f"echo on; sleep 1; touch {tmp_path}/made"),
    )
    repair = Repair(id="slow", title="Slow", explanation="", steps=(slow,))
    async with loopback_node(tmp_path) as server, Core.open(tmp_path / "master") as core:
        await core.do(
            AddNode(name="pc", address=address_of(server), accept_host_key=server.fingerprint)
        )
        shown = await core.do(ShowRepair(node="pc", repair=repair))
        begun = asyncio.Event()

        def listen(said: str) -> None:
            if said == "on":
                begun.set()

        work = asyncio.create_task(
            core.do(ApplyRepair(node="pc", repair=repair, shown=shown), sentences(listen))
        )
        await begun.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        (change,) = (await core.do(ReadChanges(node="pc"))).changes
        assert change.ended_s is None
        while change.ended_s is None:
            await asyncio.sleep(0.1)
            (change,) = (await core.do(ReadChanges(node="pc"))).changes
        assert change.problem == ""
        assert (tmp_path / "made").exists()
