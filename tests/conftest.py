"""What every test gets: folders of its own, no window system, and a sweep for leftovers at the end.

The environment is set here, before any test module is imported, because Qt and torch read theirs on
import. The files may be divided over several processes (pytest-xdist), each with its own folders;
what is marked `alone` is for a second run, which is not divided. Marks: `gpu` is skipped without an
NVIDIA GPU; `netns` without root, iproute2 or sshd, save where CI=true: there a missing tool is a
failure.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.namespaces import Cluster
from tests.draws import BASE_SEED, seed_global_generators
from tests.fakes.uv import fetch_uv, unpack_uv

MARKER = "RACKLESS_TEST_SESSION"
"""Every process that a test starts inherits this, however deep, except through a real sshd."""

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
os.environ.update(
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    PYTHON_KEYRING_BACKEND="keyring.backends.null.Keyring",  # never the user's own
    **{MARKER: uuid.uuid4().hex},
)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Keep the user's own Rackless out of reach of every test, and give hypothesis its seed."""
    if config.getoption("hypothesis_seed") is None:
        config.option.hypothesis_seed = str(BASE_SEED)
    home = tempfile.mkdtemp(prefix="rackless-tests-")
    os.environ["RACKLESS_TEST_HOME"] = home
    os.environ["RACKLESS_HOME"] = f"{home}/master"
    os.environ["RACKLESS_AGENT_HOME"] = f"{home}/agent"


def pytest_unconfigure(config: pytest.Config) -> None:
    del config
    shutil.rmtree(os.environ.pop("RACKLESS_TEST_HOME"), ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Seed the test's draws; run a coroutine function on an event loop of its own."""
    seed_global_generators(pyfuncitem.nodeid)
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    names = inspect.signature(test).parameters
    asyncio.run(test(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> None:
    """Seed a fixture's draws by its own name: a module's would else follow from the first test."""
    seed_global_generators(f"{request.node.nodeid}/{fixturedef.argname}")


def why_no_namespaces() -> str:
    """Return why network namespaces with sshd cannot be made here; empty: they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    absent = [
        tool for tool in ("ip", "tc", "sshd", "ssh-keygen") if not shutil.which(tool, path=path)
    ]
    return f"not installed: {', '.join(absent)}" if absent else ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not Path("/proc/driver/nvidia").exists():
        pytest.skip("no NVIDIA GPU here")
    if item.get_closest_marker("netns") and (reason := why_no_namespaces()):
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason}; continuous integration must have it")
        pytest.skip(reason)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with slow tests first, so that none is left for one worker alone at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude what was imported so far from garbage collection, as `agents.program` does it.

    A full collection, which tests of the window and of memory make often, would go through all
    700,000 objects of torch, Transformers and Qt each time.
    """
    del session
    gc.collect()
    gc.freeze()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three nodes and a master in network namespaces; for tests marked `netns`."""
    with Cluster(tmp_path / "cluster") as made:
        yield made


def marked_processes() -> Iterator[tuple[int, str]]:
    """Yield pid and command line of every other process that this test session started."""
    needle = f"{MARKER}={os.environ[MARKER]}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                command = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                yield int(entry.name), command.strip()
        except OSError:
            continue  # it ended, or is not ours to read


LEFT = "left"
"""Under this name a worker tells the controller which training processes its tests left."""
_left_by_workers: list[str] = []


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take in what a worker of pytest-xdist found at its end."""
    del error
    _left_by_workers.extend(getattr(node, "workeroutput", {}).get(LEFT, ()))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """End what tests left running, and fail the session when a training process was among it."""
    left = dict(marked_processes())
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    ranks = [f"{pid}: {command}" for pid, command in left.items() if "agents.trainer" in command]
    told = getattr(session.config, "workeroutput", None)  # only in a worker of pytest-xdist
    if told is not None:
        told[LEFT] = ranks
        return
    ranks += _left_by_workers
    if ranks:
        print("\nTests left training processes behind:", *ranks, sep="\n  ")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def uv_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the locked wheel of uv, fetched as a node fetches it."""
    return fetch_uv(tmp_path_factory.mktemp("uv"))


@pytest.fixture(scope="session")
def uv(uv_wheel: Path) -> str:
    """Return the path of a uv that runs."""
    return unpack_uv(uv_wheel)
