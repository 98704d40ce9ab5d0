"""The lock file, and setting up a node's environment from one."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agents.contract.environments import (
    DeviceTrial,
    EnvironmentTools,
    EnvironmentTrial,
    WheelQuery,
    WheelReport,
    WheelTarget,
    WheelTrouble,
)
from agents.contract.node import EnvironmentReport, GpuFacts, NodeFacts
from agents.contract.requests.environment import (
    EnvironmentBuild,
    EnvironmentQuery,
    FetchWheels,
    FindBuildTools,
    LookForWheels,
    TryEnvironment,
)
from agents.contract.requests.node import ReadFacts
from app.errors import NodeUnreachable, UnshippedLock, UserError
from app.provisioning.environment import (
    EnvironmentLock,
    find_environment,
    parse_lock,
    read_lock,
    read_train_lock,
    setup_environment,
)
from app.provisioning.torch_build import TorchBuild
from app.provisioning.torch_locks import NoTorchLock, made_lock
from app.provisioning.wheels import WheelPlaces
from tests.fakes.packages import NO_HASH, lock_line
from tests.fakes.requests import FakeAgent, answers
from tests.fakes.ssh import nodes

A = lock_line("a", "1")


def test_a_node_compares_versions_that_are_the_same_for_all_builds_of_torch() -> None:
    locks = [read_train_lock(build) for build in TorchBuild if build.is_shipped]
    assert len({lock.sha256 for lock in locks}) == 1
    assert len({lock.text for lock in locks}) == len(locks) >= 2
    assert read_train_lock().requirements["torch"] == "2.13.0"
    assert read_train_lock() == read_lock("train")


def test_comments_and_order_make_no_other_lock() -> None:
    first = parse_lock(f"{A}\n{lock_line('b', '2')}\n")
    assert parse_lock(f"# why\n{lock_line('b', '2')}  # this\n\n{A}").sha256 == first.sha256
    assert parse_lock(f"{A}\n{lock_line('b', '3')}").sha256 != first.sha256


def test_what_a_marker_limits_is_installed_but_not_compared() -> None:
    lock = parse_lock(f"{A}\nb==2 ; python_version < '3.12' \\\n  --hash=sha256:{NO_HASH}")
    assert lock.requirements == {"a": "1"}
    assert f"b==2 ; python_version < '3.12' --hash=sha256:{NO_HASH}\n" in lock.text


def make_facts(*drivers: str, capability: str = "8.9") -> NodeFacts:
    gpus = (
        GpuFacts(uuid=driver, index=index, name="RTX 4070", driver=driver, capability=capability)
        for index, driver in enumerate(drivers)
    )
    return NodeFacts(
        hostname="pc",
        os="Debian 12",
        kernel="6.1",
        python="3.11.2",
        architecture="x86_64",
        gpus=tuple(gpus),
    )


class FakeNode(FakeAgent):
    """Has some interpreters; builds one when asked."""

    name = "pc"

    def __init__(self, fitting: set[str], remembered: str | None = None) -> None:
        self.fitting = fitting
        self.remembered = remembered
        self.looked_at: list[str | None] = []
        self.built: EnvironmentBuild | None = None
        self.facts_now = make_facts()
        self.has_torch_index = True
        self.problem = ""
        self.asked: list[WheelQuery] = []

    @answers(ReadFacts)
    async def facts(self, request: ReadFacts, progress: object) -> NodeFacts:
        return self.facts_now

    @answers(EnvironmentQuery)
    async def environment_find(
        self, query: EnvironmentQuery, progress: object
    ) -> EnvironmentReport:
        self.looked_at.append(query.python)
        python = query.python or self.remembered
        if python == "/gone":
            raise UserError("There is no interpreter at /gone on this node.")
        if python == "/cut":
            raise NodeUnreachable("lost")
        if python in self.fitting:
            return EnvironmentReport(python=python, fits=True, lock_sha256=query.lock_sha256)
        return EnvironmentReport(python=python, missing=("torch",), different=("numpy 1 not 2",))

    @answers(EnvironmentBuild)
    async def environment_build(
        self, build: EnvironmentBuild, progress: object
    ) -> EnvironmentReport:
        self.built = build
        return EnvironmentReport(
            python="/built", fits=True, lock_sha256=build.lock_sha256, built_with="uv 0.13.9"
        )

    @answers(FindBuildTools)
    async def environment_tools(
        self, request: FindBuildTools, progress: object
    ) -> EnvironmentTools:
        target = WheelTarget(python="3.12.3", machine="x86_64", glibc="2.39")
        return EnvironmentTools(target=target, python="/usr/bin/python3", uv="/usr/bin/uv")

    @answers(LookForWheels)
    async def look_for_wheels(self, request: LookForWheels, progress: object) -> WheelReport:
        return self.report(None)

    @answers(FetchWheels)
    async def fetch_wheels(self, request: FetchWheels, progress: object) -> WheelReport:
        self.asked.append(request.query)
        is_there = self.has_torch_index or request.query.index_url is None
        return self.report(None if is_there else "missing", is_complete=is_there)

    def report(self, trouble: WheelTrouble | None, is_complete: bool = False) -> WheelReport:
        return WheelReport(
            path="wheels/x",
            num_packages=2,
            num_present=0,
            is_complete=is_complete,
            trouble=trouble,
            message="finds no package torch",
        )

    @answers(TryEnvironment)
    async def try_environment(self, request: TryEnvironment, progress: object) -> EnvironmentReport:
        card = DeviceTrial(
            device="cuda:0", name="RTX", problem=self.problem, is_failed=bool(self.problem)
        )
        trial = EnvironmentTrial(import_s=1.0, torch="2.13.0", devices=(card,))
        return EnvironmentReport(python="/tried", fits=True, trial=trial)


LOCK: EnvironmentLock = parse_lock(f"{lock_line('scipy', '2.13.0')}\n{lock_line('numpy', '2')}\n")


PLACES = WheelPlaces(store=Path("/no/such/folder"), locks=Path("/no/such/folder"))


def set_up(node: FakeNode, python: str | None = None, *candidates: str) -> EnvironmentReport:
    work = setup_environment(node, PLACES, python, lock=LOCK, candidates=candidates)  # type: ignore[arg-type]
    return asyncio.run(work)


def test_a_named_interpreter_is_adopted_or_refused_with_the_reasons() -> None:
    assert set_up(FakeNode({"/good"}), "/good").python == "/good"
    with pytest.raises(UserError, match=r"/bad on pc .*numpy 1 not 2; torch is missing") as caught:
        set_up(FakeNode({"/good"}), "/bad")
    assert "rackless nodes setup pc" in caught.value.hint


def test_what_fits_already_is_kept_and_nothing_is_downloaded() -> None:
    node = FakeNode({"/good"}, remembered="/good")
    assert set_up(node, None, "/other").python == "/good"
    assert node.looked_at == [None]
    assert node.built is None


@pytest.mark.parametrize("remembered", [None, "/gone", "/bad"])
def test_candidates_come_before_a_build(remembered: str | None) -> None:
    node = FakeNode({"/good"}, remembered)
    assert set_up(node, None, "/gone", "/bad", "/good").python == "/good"
    assert node.built is None
    assert set_up(node, None, "/gone").python == "/built"
    assert node.built is not None
    assert node.built.requirements == LOCK.requirements
    assert node.built.lock_text == LOCK.text


@pytest.mark.parametrize(("drivers", "build"), [([], "cpu"), (["580.95.05"], "cu130")])
def test_a_build_brings_the_torch_that_suits_the_nodes_gpus(drivers: list[str], build: str) -> None:
    node = FakeNode(set())
    node.facts_now = make_facts(*drivers)
    report = asyncio.run(setup_environment(node, PLACES, candidates=()))  # type: ignore[arg-type]
    assert report.python == "/tried"
    (query,) = node.asked
    assert query.lock_text == read_train_lock(TorchBuild(build)).text
    assert query.index_url == TorchBuild(build).index_url
    assert node.built is not None
    assert node.built.requirements == read_train_lock().requirements
    assert node.built.lock_text == query.lock_text


def test_where_pytorchs_index_is_not_reached_a_cpu_gets_the_build_of_pypi() -> None:
    node = FakeNode(set())
    node.has_torch_index = False
    said: list[str] = []
    asyncio.run(setup_environment(node, PLACES, progress=said.append, candidates=()))  # type: ignore[arg-type]
    assert [query.index_url for query in node.asked] == [TorchBuild.CPU.index_url, None]
    assert node.built is not None
    assert node.built.lock_text == read_train_lock().text
    assert any("Taking the build of PyPI instead" in line for line in said)


MADE = lock_line("torch", "2.13.0+cu126") + "\n"


def old_driver_node(places: WheelPlaces) -> FakeNode:
    """Return a node that needs the build for CUDA 12.6, whose lock is not made yet."""
    made_lock(places.locks, TorchBuild.CUDA_12).unlink(missing_ok=True)
    node = FakeNode(set())
    node.facts_now = make_facts("560.35.03")
    return node


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelPlaces:
    """Return places of a PC that reaches no index."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return WheelPlaces(store=tmp_path / "wheels", locks=tmp_path)


def test_a_lock_that_this_pc_made_is_used_without_a_question(places: WheelPlaces) -> None:
    node = old_driver_node(places)
    node.fitting = {"/masters/own"}  # which has the build for current drivers
    with pytest.raises(UnshippedLock):
        asyncio.run(setup_environment(node, places, candidates=("/masters/own",)))  # type: ignore[arg-type]
    assert node.asked == []
    made_lock(places.locks, TorchBuild.CUDA_12).write_text(MADE)
    asyncio.run(setup_environment(node, places, candidates=()))  # type: ignore[arg-type]
    (query,) = node.asked
    assert query.lock_text == read_train_lock(TorchBuild.CUDA_12, MADE).text
    assert query.index_url == "https://download.pytorch.org/whl/cu126"
    assert node.built is not None
    assert node.built.lock_sha256 == read_train_lock().sha256


@pytest.mark.parametrize("problem", ["", "no kernel image is available"])
def test_an_adopted_interpreter_is_kept_where_old_gpus_can_train_with_it(
    places: WheelPlaces, problem: str
) -> None:
    node = old_driver_node(places)
    made_lock(places.locks, TorchBuild.CUDA_12).write_text(MADE)
    node.fitting, node.remembered, node.problem = {"/own"}, "/own", problem
    work = setup_environment(node, places)  # type: ignore[arg-type]
    if not problem:
        assert asyncio.run(work).python == "/own"
        assert node.built is None
        return
    with pytest.raises(UserError, match="the environment of pc is built, but RTX cannot train"):
        asyncio.run(work)  # the fake fails in every environment
    assert node.built is not None


def test_without_a_lock_it_is_the_newest_build_and_the_reason_is_not_lost(
    places: WheelPlaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # no uv either
    node, said = old_driver_node(places), list[str]()

    async def work() -> EnvironmentReport:
        return await setup_environment(
            node,  # type: ignore[arg-type]
            places,
            progress=said.append,
            candidates=(),
            accept_index=True,
        )

    asyncio.run(work())
    assert [query.lock_text for query in node.asked] == [read_train_lock().text]
    assert any(
        "this PC cannot lock: that takes uv, and this PC finds no package" in line for line in said
    )
    node.problem = "the driver is too old"
    with pytest.raises(NoTorchLock, match="GPUs of pc need the build cu126") as caught:
        asyncio.run(work())
    assert "from another PC" in caught.value.hint


def test_an_environment_that_is_there_is_kept_where_no_better_one_can_be_locked(
    places: WheelPlaces,
) -> None:
    node = old_driver_node(places)
    trial = EnvironmentTrial(import_s=1.0, torch="2.13.0+cu130", devices=())
    there = EnvironmentReport(python="/old", fits=True, built_with="uv 1", trial=trial)

    async def find(*asked: object) -> EnvironmentReport:
        return there

    node.environment_find = find  # type: ignore[method-assign]
    work = setup_environment(node, places, accept_index=True)  # type: ignore[arg-type]
    assert asyncio.run(work) == there
    assert node.built is None


def test_a_node_takes_the_build_of_its_cluster_once_that_is_agreed_to(places: WheelPlaces) -> None:
    old_card = make_facts("580.95.05", capability="6.1")
    node = old_driver_node(places)
    node.facts_now = make_facts("580.95.05")

    def built(accept_index: bool) -> str:
        work = setup_environment(
            node,  # type: ignore[arg-type]
            places,
            candidates=(),
            others=[old_card],
            accept_index=accept_index,
        )
        asyncio.run(work)
        return node.asked[-1].lock_text

    assert built(accept_index=False) == read_train_lock().text
    made_lock(places.locks, TorchBuild.CUDA_12).write_text(MADE)
    assert built(accept_index=False) == read_train_lock(TorchBuild.CUDA_12, MADE).text


def test_a_card_that_no_build_serves_is_named_before_the_download(places: WheelPlaces) -> None:
    node, said = old_driver_node(places), list[str]()
    node.facts_now = make_facts("560.35.03", capability="12.0")
    asyncio.run(setup_environment(node, places, progress=said.append, candidates=()))  # type: ignore[arg-type]
    assert "no build of torch serves RTX 4070 with driver 560.35.03" in said[0]
    assert node.asked[0].lock_text == read_train_lock().text


def test_a_device_that_cannot_train_is_an_error_that_names_it() -> None:
    node = FakeNode(set())
    node.problem = "no kernel image is available"
    with pytest.raises(UserError, match="pc is built, but RTX cannot train with it: no kernel"):
        asyncio.run(setup_environment(node, PLACES, candidates=()))  # type: ignore[arg-type]


def test_an_environment_is_built_again_for_other_gpus_and_tried_again_after_a_failure() -> None:
    trial = EnvironmentTrial(import_s=1.0, torch="2.13.0+cpu", devices=())

    class Adopted(FakeNode):
        @answers(EnvironmentQuery)
        async def environment_find(self, *asked: object) -> EnvironmentReport:
            return EnvironmentReport(python="/old", fits=True, built_with="uv 1", trial=trial)

    node = Adopted(set())
    assert asyncio.run(setup_environment(node, PLACES)).python == "/old"  # type: ignore[arg-type]
    node.facts_now = make_facts("580.95.05")
    assert asyncio.run(setup_environment(node, PLACES)).python == "/tried"  # type: ignore[arg-type]
    assert node.built is not None
    failed = DeviceTrial(device="cuda:0", name="RTX", problem="no kernel", is_failed=True)
    trial = replace(trial, torch="2.13.0+cu130", devices=(failed,))
    node = Adopted(set())
    assert asyncio.run(setup_environment(node, PLACES)).python == "/tried"  # type: ignore[arg-type]
    assert node.built is None


def test_a_lost_node_is_not_taken_for_one_without_environment() -> None:
    with pytest.raises(NodeUnreachable):
        set_up(FakeNode(set(), remembered="/cut"))


async def test_a_real_node_adopts_this_interpreter_and_remembers_it(tmp_path: Path) -> None:
    lock = parse_lock(lock_line("asyncssh", importlib.metadata.version("asyncssh")))
    other = parse_lock(lock_line("asyncssh", "0.1"))
    async with nodes(tmp_path, 1) as (pc,):
        assert not (await find_environment(pc, lock)).fits
        report = await setup_environment(pc, PLACES, lock=lock)
        assert report.fits
        assert report.python == sys.executable
        assert (await find_environment(pc, lock)).python == sys.executable
        misfit = await find_environment(pc, other)
        assert not misfit.fits
        assert "asyncssh" in misfit.different[0]
        with pytest.raises(UserError, match="no interpreter"):
            await setup_environment(pc, PLACES, "/no/such/python", lock=lock)
