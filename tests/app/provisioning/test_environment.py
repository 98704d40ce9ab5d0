"""The lock file, and setting up a node's environment from one."""

from __future__ import annotations

import asyncio
import importlib.metadata
import re
import sys
from pathlib import Path

import pytest
import tomllib

from agents.contract.node import EnvironmentBuild, EnvironmentQuery, EnvironmentReport
from app.errors import NodeUnreachable, UserError
from app.provisioning.environment import (
    EnvironmentLock,
    find_environment,
    parse_lock,
    read_lock,
    read_train_lock,
    setup_environment,
)
from tests.fakes.ssh import nodes

ROOT = Path(__file__).resolve().parents[3]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_lock_agrees_with_the_constraints_of_the_set_up() -> None:
    constraints = parse_lock((ROOT / "installers" / "constraints.txt").read_text())
    known = {normal(name): version for name, version in constraints.requirements.items()}
    lock = read_train_lock().requirements
    assert {name: known.get(normal(name)) for name in lock} == lock
    assert lock["torch"] == "2.13.0"


@pytest.mark.parametrize("name", ["gguf", "gptqmodel"])
def test_packages_beside_the_environment_are_the_versions_that_tests_run_with(name: str) -> None:
    constraints = parse_lock((ROOT / "installers" / "constraints.txt").read_text())
    known = {normal(package): version for package, version in constraints.requirements.items()}
    lock = {normal(package): version for package, version in read_lock(name).requirements.items()}
    assert lock
    assert {package: known.get(package, version) for package, version in lock.items()} == lock
    train = {normal(package) for package in read_train_lock().requirements}
    assert not train & set(lock), "they never hide what trains"


def test_the_lock_has_all_that_training_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {
        normal(re.split(r"[<>=!~ \[;]", requirement)[0])
        for requirement in project["optional-dependencies"]["train"]
    }
    lock = {normal(name) for name in read_train_lock().requirements}
    assert wanted <= lock
    for name in sorted(lock):
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # such as bitsandbytes, which not every test environment has
        plain = {normal(re.split(r"[<>=!~ \[;(]", need)[0]) for need in needs if ";" not in need}
        assert plain <= lock, f"{name} needs {plain - lock}"


def test_comments_and_order_make_no_other_lock() -> None:
    first = parse_lock("b==2\na==1\n")
    assert parse_lock("# why\na==1  # this\n\nb==2").sha256 == first.sha256
    assert parse_lock("a==1\nb==3").sha256 != first.sha256


@pytest.mark.parametrize("line", ["torch", "torch>=2", "-r other.txt", "a==1 b==2", "a==1\na==2"])
def test_a_line_that_pins_nothing_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="lock"):
        parse_lock(line)


class FakeNode:
    """Has some interpreters; builds one when asked."""

    name = "pc"

    def __init__(self, fitting: set[str], remembered: str | None = None) -> None:
        self.fitting = fitting
        self.remembered = remembered
        self.looked_at: list[str | None] = []
        self.built: EnvironmentBuild | None = None

    async def environment_find(self, query: EnvironmentQuery) -> EnvironmentReport:
        self.looked_at.append(query.python)
        python = query.python or self.remembered
        if python == "/gone":
            raise UserError("There is no interpreter at /gone on this node.")
        if python == "/cut":
            raise NodeUnreachable("lost")
        if python in self.fitting:
            return EnvironmentReport(python=python, fits=True, lock_sha256=query.lock_sha256)
        return EnvironmentReport(python=python, missing=("torch",), different=("numpy 1 not 2",))

    async def environment_build(
        self, build: EnvironmentBuild, progress: object = None
    ) -> EnvironmentReport:
        self.built = build
        return EnvironmentReport(python="/built", fits=True, lock_sha256=build.lock_sha256)


LOCK: EnvironmentLock = parse_lock("torch==2.13.0\nnumpy==2\n")


def set_up(node: FakeNode, python: str | None = None, *candidates: str) -> EnvironmentReport:
    return asyncio.run(
        setup_environment(node, python, lock=LOCK, candidates=candidates)  # type: ignore[arg-type]
    )


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


def test_a_lost_node_is_not_taken_for_one_without_environment() -> None:
    with pytest.raises(NodeUnreachable):
        set_up(FakeNode(set(), remembered="/cut"))


async def test_a_real_node_adopts_this_interpreter_and_remembers_it(tmp_path: Path) -> None:
    lock = parse_lock(f"asyncssh=={importlib.metadata.version('asyncssh')}\n")
    other = parse_lock("asyncssh==0.1\n")
    async with nodes(tmp_path, 1) as (pc,):
        assert not (await find_environment(pc, lock)).fits
        report = await setup_environment(pc, lock=lock)
        assert report.fits
        assert report.python == sys.executable
        assert (await find_environment(pc, lock)).python == sys.executable
        misfit = await find_environment(pc, other)
        assert not misfit.fits
        assert "asyncssh" in misfit.different[0]
        with pytest.raises(UserError, match="no interpreter"):
            await setup_environment(pc, "/no/such/python", lock=lock)
