"""The lock of a build that does not ship: made once, after a yes, and then like any other."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.contract.environments import WheelQuery, WheelTarget
from agents.shared.files.python_child import SAFE_FOLDER, python_environ
from agents.shared.packages.lock import read_lock_text
from app.errors import UnshippedLock, UserError
from app.nodes.client import NodeClient
from app.provisioning.environment import read_train_lock
from app.provisioning.torch_build import TorchBuild
from app.provisioning.torch_locks import NoTorchLock, has_lock, made_lock, provide_lock
from app.provisioning.wheels import WheelPlaces, bring_wheels
from tests.fakes.package_site import PackageSite, package_site
from tests.fakes.packages import flip_a_bit, lock_line
from tests.fakes.ssh import nodes
from tests.fakes.torch_index import BUILD, put_torch

ROOT = Path(__file__).resolve().parents[3]


def closed_index() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}/simple"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uv_wheel: Path) -> Iterator[PackageSite]:
    """Return PyTorch's index; pip is set up with another one, which has uv alone."""
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with package_site(tmp_path / "site") as made, package_site(tmp_path / "pypi") as empty:
        shutil.copy(uv_wheel, empty.folder)
        monkeypatch.setenv("PIP_INDEX_URL", empty.url)
        monkeypatch.setattr(TorchBuild, "index_url", made.url)
        put_torch(made.folder)
        yield made


def places(folder: Path) -> WheelPlaces:
    return WheelPlaces(store=folder.parent / f"{folder.name}-wheels", locks=folder)


def provide(folder: Path, *, accept_index: bool = True, said: list[str] | None = None) -> str:
    say = [].append if said is None else said.append
    work = provide_lock(
        TorchBuild.CUDA_12, "pc", places(folder), accept_index=accept_index, say=say
    )
    return asyncio.run(work)


def test_nothing_is_asked_before_a_yes_and_nothing_again_after_it(
    tmp_path: Path, site: PackageSite
) -> None:
    folder = tmp_path / "home" / "environments"
    with pytest.raises(UnshippedLock, match=f"GPUs of pc need the build cu126 .*{site.url}"):
        provide(folder, accept_index=False)
    assert (site.num_requests, folder.exists()) == (0, False)

    text = provide(folder)
    file = made_lock(folder, TorchBuild.CUDA_12)
    assert file.read_text() == text
    assert file.stat().st_mode & 0o777 == 0o600
    assert "with the hashes that 127.0.0.1 named on that day" in text
    lock = read_train_lock(TorchBuild.CUDA_12, text)
    assert lock.sha256 == read_train_lock().sha256, "nodes with any build are compatible"
    assert lock.text.startswith("cuda-bindings==12.9.9 --hash=sha256:")
    assert f"torch=={BUILD} --hash" in lock.text

    served = site.num_requests
    assert provide(folder, accept_index=False) == text
    assert site.num_requests == served


async def test_two_set_ups_at_once_make_one_lock(tmp_path: Path, site: PackageSite) -> None:
    twice = [
        provide_lock(
            TorchBuild.CUDA_12, name, places(tmp_path), accept_index=True, say=lambda text: None
        )
        for name in ("a", "b")
    ]
    first, second = await asyncio.gather(*twice)
    assert first == second
    assert len(site.pages) == len(set(site.pages))


@pytest.mark.parametrize(
    "text",
    [
        "torch==2.1.0+cu126 --hash=sha256:" + 64 * "0",
        "torch==",
        lock_line("torch", BUILD) + "\n" + lock_line("numpy", "2.0"),  # train.lock brings it
    ],
)
def test_a_lock_that_does_not_fit_this_version_is_made_again(
    tmp_path: Path, site: PackageSite, text: str
) -> None:
    file = made_lock(tmp_path, TorchBuild.CUDA_12)
    file.write_text(text)
    assert not has_lock(TorchBuild.CUDA_12, tmp_path)
    assert f"torch=={BUILD}" in provide(tmp_path)
    assert has_lock(TorchBuild.CUDA_12, tmp_path)


def test_without_internet_it_is_said_what_where_and_what_next(
    tmp_path: Path, site: PackageSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchBuild, "index_url", closed_index())
    with pytest.raises(NoTorchLock, match=r"pc need .* cannot lock: 127\.0\.0\.1: ") as caught:
        provide(tmp_path)
    assert f"copy {made_lock(tmp_path, TorchBuild.CUDA_12)} from another PC" in caught.value.hint
    assert not has_lock(TorchBuild.CUDA_12, tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(NoTorchLock, match=r"cannot lock: .* torch==2\.13\.0\+cu126"):
        provide(tmp_path)


def test_where_no_index_has_uv_an_installed_one_is_taken(
    tmp_path: Path, site: PackageSite, monkeypatch: pytest.MonkeyPatch, uv: str
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", site.url)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NoTorchLock, match=r"that takes uv, and this PC finds no package uv=="):
        provide(tmp_path)
    monkeypatch.setenv("PATH", str(Path(uv).parent))
    assert f"torch=={BUILD}" in provide(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, site: PackageSite) -> None:
    (tmp_path / "environments").write_text("a file")
    with pytest.raises(UserError, match=r"torch-cu126\.lock cannot be written") as caught:
        provide(tmp_path / "environments")
    assert not isinstance(caught.value, NoTorchLock)


async def test_a_set_up_that_is_cancelled_leaves_no_lock(tmp_path: Path, site: PackageSite) -> None:
    has_begun, may_end = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hold() -> bool:
        loop.call_soon_threadsafe(has_begun.set)
        return may_end.wait(60)

    site.before_page = hold
    here = places(tmp_path)
    work = provide_lock(TorchBuild.CUDA_12, "pc", here, accept_index=True, say=lambda t: None)
    task = asyncio.create_task(work)
    await has_begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    may_end.set()
    assert site.pages == ["torch"]
    assert not has_lock(TorchBuild.CUDA_12, tmp_path)


def test_one_that_is_killed_is_made_by_the_next(tmp_path: Path, site: PackageSite) -> None:
    is_over = False
    site.break_after, site.may_break = 0, lambda: is_over
    code = (
        "import sys; from pathlib import Path;"
        "from app.provisioning.torch_locks import make_lock, TorchBuild;"
        "from app.provisioning.wheels import WheelPlaces;"
        "TorchBuild.index_url = sys.argv[2];"
        "places = WheelPlaces(locks=Path(sys.argv[1]), store=Path(sys.argv[3]));"
        "make_lock(TorchBuild.CUDA_12, places, print, lambda: False)"
    )
    file = made_lock(tmp_path / "locks", TorchBuild.CUDA_12)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(file.parent), site.url, str(tmp_path / "wheels")],
        env=python_environ(os.environ, str(ROOT)),
        cwd=SAFE_FOLDER,
        stdout=subprocess.DEVNULL,
    )
    deadline_s = time.monotonic() + 60
    while not site.files:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    is_over, site.break_after = True, None
    assert not file.exists()
    assert f"torch=={BUILD}" in provide(file.parent)


async def test_nodes_fetch_what_it_names_once_and_refuse_what_changed_since(
    tmp_path: Path, site: PackageSite
) -> None:
    text = await provide_lock(
        TorchBuild.CUDA_12, "pc", places(tmp_path), accept_index=True, say=lambda text: None
    )

    async def bring(python: str, client: NodeClient, *peers: NodeClient) -> None:
        target = WheelTarget(python=python, machine="x86_64", glibc="2.39")
        lock = read_lock_text(text).text
        query = WheelQuery(lock_text=lock, target=target, index_url=site.url)
        places = WheelPlaces(store=tmp_path / "wheels", locks=tmp_path, peers=peers)
        await bring_wheels(client, query, places, lambda text: None)

    async with nodes(tmp_path, 2) as (first, second):
        site.files.clear()
        await bring("3.12.3", first)
        fetched = [file for file in site.files if file.startswith("torch")]
        assert fetched == [f"torch-{BUILD}-cp312-cp312-manylinux_2_28_x86_64.whl"]
        served = site.num_requests
        await bring("3.12.3", second, first)
        assert site.num_requests == served
        (other,) = site.folder.glob("torch-*cp313*")
        flip_a_bit(other)
        with pytest.raises(UserError, match=r"is offered torch==2\.13\.0\+cu126 from .* sha256"):
            await bring("3.13.1", first)
