"""`rackless watch`, over a core in memory."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from app.cli import watch
from app.cli.kit.output import Output
from app.errors import StoreLost, UserError
from app.events import NodeChanged, RunChanged, RunEvent, RunEventArrived, StoreFailed
from tests.fakes.core import FakeCore, make_node, make_run


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to handle")
@pytest.mark.parametrize("as_json", [True, False])
def test_changes_are_printed_until_a_service_manager_ends_it(
    capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    node, run = make_node("alpha"), make_run("r-1", "run", "running")
    core = FakeCore(node_map={"alpha": node}, run_map={"r-1": run})

    async def scenario() -> int:
        watching = asyncio.create_task(
            watch._watch(core, argparse.Namespace(), Output(as_json))  # type: ignore[arg-type]
        )
        while not core.calls:  # noqa: ASYNC110 - the fake signals nothing
            await asyncio.sleep(0)
        for changed in (run, replace(run, step=5), replace(run, state="interrupted")):
            core.events.publish(RunChanged(changed))
        core.events.publish(NodeChanged(replace(node, state="unreachable", problem="no route")))
        text = "resumed automatically on beta"
        core.events.publish(
            RunEventArrived(
                RunEvent(run_id="r-1", time_s=1.0, severity="info", kind="recovery", text=text)
            )
        )
        os.kill(os.getpid(), signal.SIGTERM)
        return await asyncio.wait_for(watching, 5)

    assert asyncio.run(scenario()) == 0
    assert core.calls == [("nodes.connect", ())], "all nodes, which begins the watch of all runs"
    out, err = capsys.readouterr()
    if as_json:
        lines = [json.loads(line) for line in out.splitlines()]
        assert [line["kind"] for line in lines] == ["run", "run", "node", "event"]
        assert (lines[1]["state"], lines[3]["event"]) == ("interrupted", "recovery")
        assert err == ""
    else:
        assert out.splitlines() == [
            "r-1  running",
            "r-1  interrupted",
            "alpha  unreachable: no route",
            "r-1  resumed automatically on beta",
        ]
        assert err.startswith("watching 1 node and 1 active run;")


def test_a_lost_store_ends_it_with_the_reason_so_that_its_service_restarts_it() -> None:
    core = FakeCore(node_map={"alpha": make_node("alpha")})

    async def scenario() -> int:
        watching = asyncio.create_task(
            watch._watch(core, argparse.Namespace(), Output(False))  # type: ignore[arg-type]
        )
        while not core.calls:  # noqa: ASYNC110 - the fake signals nothing
            await asyncio.sleep(0)
        core.events.publish(StoreFailed("the database was replaced", "Start it again."))
        return await asyncio.wait_for(watching, 5)

    with pytest.raises(StoreLost, match="was replaced") as error:
        asyncio.run(scenario())
    assert error.value.exit_code == 1


def test_a_home_that_is_gone_is_named_and_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RACKLESS_HOME", str(tmp_path / "gone"))
    args = argparse.Namespace(install=False, uninstall=False, status=False)
    with pytest.raises(UserError, match="is not there"):
        watch._run(args, Output(False))
    assert not (tmp_path / "gone").exists()


def test_a_home_without_nodes_has_nothing_to_watch() -> None:
    with pytest.raises(UserError, match="no nodes yet"):
        asyncio.run(watch._watch(FakeCore(), argparse.Namespace(), Output(False)))  # type: ignore[arg-type]
