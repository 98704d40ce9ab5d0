"""The check on real loopback nodes, and what it makes of collectives that fail."""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
from pathlib import Path

import pytest

from agents.contract.node import AllReduceResult
from app.errors import AgentBug, UserError
from app.nodes.fleet import Fleet
from app.nodes.node import Node
from app.nodes.transport.loopback import LoopbackNode
from app.provisioning.check import check_nodes
from app.provisioning.check_row import CheckRow
from app.provisioning.checks.reduce import ReduceOutcome, judge_reduce
from app.provisioning.environment import EnvironmentLock, parse_lock, setup_environment
from app.provisioning.wheels import WheelPlaces
from tests.fakes.fleet import Seen, fleet_at
from tests.fakes.packages import lock_line
from tests.fakes.ssh import address_of, connect, loopback_node, tools_without

NAMES = ("a", "b", "c")


PLACES = WheelPlaces(store=Path("/no/such/folder"), locks=Path("/no/such/folder"))


def summed(ended_s: float = 1.0, sum_ok: bool = True) -> ReduceOutcome:
    result = AllReduceResult(seconds=0.01, num_values=100, sum_ok=sum_ok)
    return ReduceOutcome(ended_s=ended_s, result=result)


def failed(message: str, ended_s: float = 1.0) -> ReduceOutcome:
    return ReduceOutcome(ended_s=ended_s, error=UserError(message, "do this"))


def blamed(rows: tuple[CheckRow, ...]) -> list[str]:
    return [row.node for row in rows if "timed out waiting" not in row.message]


def test_all_well() -> None:
    rows = judge_reduce(NAMES, {name: summed() for name in NAMES})
    assert [row.status for row in rows] == ["pass"] * 3
    assert "100 numbers over 3 nodes" in rows[0].message


def test_the_rank_that_never_came_is_named_by_its_node() -> None:
    absent = failed("a: Rank 1 did not come to the all-reduce at 10.0.0.1 port 9 within 60 s.")
    rows = judge_reduce(NAMES, {"a": absent, "c": absent})
    assert blamed(rows) == ["b"]
    assert rows[0].message == "timed out waiting for b"
    assert rows[1].message == "did not answer during the all-reduce"
    assert all(row.status == "fail" and row.fix for row in rows)


def test_two_that_never_came() -> None:
    absent = failed("a: Rank 1, 2 did not come to the all-reduce")
    assert blamed(judge_reduce(NAMES, {"a": absent})) == ["b", "c"]


def test_the_first_to_fail_is_the_cause_of_the_others() -> None:
    outcomes = {
        "a": failed("connection reset by peer", 5.0),
        "b": failed("No module named torch", 2.0),
        "c": failed("connection reset by peer", 5.1),
    }
    rows = judge_reduce(NAMES, outcomes)
    assert blamed(rows) == ["b"]
    assert rows[1].message == "No module named torch"
    assert rows[1].fix == "do this"


def test_a_wrong_sum_and_total_silence() -> None:
    rows = judge_reduce(NAMES, {"a": summed(), "b": summed(sum_ok=False), "c": summed()})
    assert blamed(rows) == ["b"]
    assert [row.status for row in judge_reduce(NAMES, {})] == ["fail"] * 3
    bug = ReduceOutcome(ended_s=1.0, error=AgentBug("our fault"))
    assert judge_reduce(("a",), {"a": bug})[0].message == "our fault"


def lock_of(*names: str) -> EnvironmentLock:
    versions = {name: importlib.metadata.version(name).partition("+")[0] for name in names}
    return parse_lock("\n".join(lock_line(*package) for package in versions.items()))


async def add(fleet: Fleet, server: LoopbackNode, name: str, master: Path) -> None:
    await (await connect(server, master)).close()
    fleet.add(Node(name=name, address=address_of(server)))


def of(rows: tuple[CheckRow, ...], check: str) -> list[CheckRow]:
    return [row for row in rows if row.check == check]


def test_three_nodes_one_without_python_and_one_without_environment(tmp_path: Path) -> None:
    """A dead node and one that is not set up are rows; the others are checked all the same."""
    lock = lock_of("torch", "numpy")
    path = tools_without(tmp_path / "bin", "python3")

    async def run() -> tuple[CheckRow, ...]:
        async with (
            loopback_node(tmp_path, "a") as a,
            loopback_node(tmp_path, "b") as b,
            loopback_node(tmp_path, "c", "--path", path) as c,
            fleet_at(tmp_path / "m", Seen()) as fleet,
        ):
            for name, server in zip(NAMES, (a, b, c), strict=True):
                await add(fleet, server, name, tmp_path / "m")
            await setup_environment(fleet.client("a"), PLACES, sys.executable, lock=lock)
            return await check_nodes(fleet, NAMES, lock=lock)

    rows = asyncio.run(run())
    assert [row.status for row in of(rows, "reach")] == ["pass", "pass", "fail"]
    dead = of(rows, "reach")[2]
    assert "There is no python3" in dead.message
    assert "apt-get install python3" in dead.fix
    assert [row.status for row in of(rows, "environment")] == ["pass", "fail"]
    assert [row.status for row in of(rows, "clock")] == ["pass", "pass"]
    ways = {(row.node, row.peer): row.status for row in of(rows, "tcp")}
    assert ways == {(x, y): "pass" for x in "ab" for y in "ab"}
    reduced = {row.node: row for row in of(rows, "all-reduce")}
    assert reduced["a"].status == "pass"
    assert reduced["b"].status == "unknown"
    assert "rackless nodes setup b" in reduced["b"].fix
    assert all(row.fix for row in rows if row.status != "pass")


def test_a_real_all_reduce_over_two_nodes_and_one_that_hangs(tmp_path: Path) -> None:
    """The second time one node's interpreter sleeps instead: it is named before the deadline of
    the whole check, and the other is told whom it waited for."""
    lock = lock_of("torch", "numpy")
    sleepy = tmp_path / "python"
    sleepy.write_text(
        f'#!/bin/sh\ncase "$*" in *allreduce*) exec sleep 1000;; esac\nexec {sys.executable} "$@"\n'
    )
    sleepy.chmod(0o755)

    async def run() -> list[tuple[CheckRow, ...]]:
        async with (
            loopback_node(tmp_path, "a") as a,
            loopback_node(tmp_path, "b") as b,
            fleet_at(tmp_path / "m", Seen()) as fleet,
        ):
            for name, server in zip("ab", (a, b), strict=True):
                await add(fleet, server, name, tmp_path / "m")
                await setup_environment(fleet.client(name), PLACES, sys.executable, lock=lock)
            well = await check_nodes(fleet, "ab", lock=lock)
            await setup_environment(fleet.client("b"), PLACES, str(sleepy), lock=lock)
            return [well, await check_nodes(fleet, "ab", lock=lock, reduce_timeout_s=3.0)]

    well, ill = asyncio.run(run())
    assert [row.status for row in of(well, "all-reduce")] == ["pass", "pass"]
    rows = {row.node: row for row in of(ill, "all-reduce")}
    assert rows["a"].message == "timed out waiting for b"
    assert rows["b"].message == "did not answer during the all-reduce"


def test_a_node_that_is_off_gives_a_row(tmp_path: Path) -> None:
    async def run() -> tuple[CheckRow, ...]:
        async with loopback_node(tmp_path, "a") as a:
            pass
        async with fleet_at(tmp_path / "m", Seen()) as fleet:
            fleet.add(Node(name="a", address=address_of(a)))
            with pytest.raises(UserError, match="no node called 'x'"):
                await check_nodes(fleet, ("x",), lock=lock_of("numpy"))
            return await check_nodes(fleet, ("a",), lock=lock_of("numpy"))

    (row,) = asyncio.run(run())
    assert (row.check, row.status) == ("reach", "fail")
    assert "nothing listens" in row.message
