"""The locks of the builds of torch: shipped ones, and those that this PC makes when first needed.

A build that only PyTorch's own index has may have no lock in this version of Rackless. Then this PC
makes one with the user's consent, from the files that the index lists on that day. From then on it
is a lock like any other, for all nodes, and a file that changes later is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from packaging.utils import canonicalize_name

from agents.contract.environments import this_target
from agents.shared.files.full_disk import advise_room, name_disk_error
from agents.shared.packages.lock import read_lock_text
from agents.shared.packages.package_index import IndexSettings, read_index_settings
from agents.shared.packages.wheel_store import WheelProblem, WheelSet, unpack_program
from app.errors import UnshippedLock, UserError
from app.filelock import locked
from app.nodes.files.local_files import in_stoppable_thread
from app.paths import private_folder, replace_text
from app.progress import OnMessage
from app.provisioning import resolver
from app.provisioning.lock_text import NoWheel, lock_text
from app.provisioning.torch_build import BESIDE_TORCH, DRIVERS, TorchBuild, shipped_text
from app.provisioning.wheels import WheelPlaces, fill

_PROGRAM = "uv.exe" if os.name == "nt" else "uv"


class NoTorchLock(UserError):
    """The lock of a build cannot be made now; the build for current drivers is still available."""


def made_lock(folder: Path, build: TorchBuild) -> Path:
    """Return the file for the lock of a build that this PC makes."""
    return folder / f"{build.lock}.lock"


def read_made_lock(file: Path) -> str | None:
    """Return a lock that this PC has made, or None if it is missing or does not fit this
    version.
    """
    try:
        text = file.read_text("utf-8")
        packages = read_lock_text(text).packages
        # Read as installed, together with the shipped locks: no package may come from two locks.
        read_lock_text(text + "".join(map(shipped_text, BESIDE_TORCH)))
    except (OSError, ValueError):
        return None
    versions = [one.version.partition("+")[0] for one in packages if one.name == "torch"]
    return text if versions == [_torch_version()] else None


def has_lock(build: TorchBuild, folder: Path) -> bool:
    """Return True if a build has a lock: a shipped one, or one that this PC has made."""
    return build.is_shipped or read_made_lock(made_lock(folder, build)) is not None


async def provide_lock(
    build: TorchBuild, node: str, places: WheelPlaces, *, accept_index: bool, say: OnMessage
) -> str:
    """Return the lock of a build for a node: the shipped one, or this PC's, made if necessary.

    Args:
        build: build to lock.
        node: name of the node, for errors.
        places: this PC's own locks and wheels.
        accept_index: True if the user accepts hashes from PyTorch's index.
        say: callback with sentences.

    Raises:
        UnshippedLock: the user has not accepted yet.
        NoTorchLock: no index can be reached, or none has the build.
        UserError: the folder cannot be written.
    """
    if build.is_shipped:
        return shipped_text(build.lock)
    file = made_lock(places.locks, build)
    text = await asyncio.to_thread(read_made_lock, file)
    if text is not None:
        say(f"the files of torch {build.value} are locked by {file}")
        return text
    if not accept_index:
        raise UnshippedLock(node, build.value, str(build.index_url))
    try:
        return await _in_thread(build, places, say)
    except (resolver.Unreachable, resolver.Unresolvable) as error:
        raise NoTorchLock(
            f"the GPUs of {node} need the build {build.value} of torch, whose files this PC cannot "
            f"lock: {error}",
            f"Connect this PC to the internet and run rackless nodes setup {node} again; or copy "
            f"{file} from another PC with this version of Rackless that has it; or update the "
            f"driver to {DRIVERS[TorchBuild.CUDA_13]} where the cards allow it",
            where=node,
            topic="unshipped-lock",
        ) from error
    except OSError as error:
        raise UserError(
            f"{file} cannot be written: {name_disk_error(error)}",
            f"{advise_room(error)}, or correct the permissions of that folder",
            where=str(file),
        ) from error


async def _in_thread(build: TorchBuild, places: WheelPlaces, say: OnMessage) -> str:
    """Make a lock in a thread; when cancelled, wait for the thread to end."""
    loop, stopped = asyncio.get_running_loop(), threading.Event()

    def report(text: str) -> None:
        loop.call_soon_threadsafe(say, text)

    making = partial(make_lock, build, places, report, stopped.is_set)
    return await in_stoppable_thread(making, stopped.set)


def make_lock(
    build: TorchBuild, places: WheelPlaces, say: OnMessage, is_stopped: Callable[[], bool]
) -> str:
    """Make the lock of a build, write it and return its text; another process may make it first.

    Raises:
        Unreachable: an index does not answer.
        Unresolvable: no index has the build or one of its packages, or uv is missing.
        OSError: the file cannot be written; no part of it stays.
    """
    file = made_lock(places.locks, build)
    private_folder(file.parent)
    # Another process of this PC may be making the same lock; its result is then read.
    with locked(file.with_name(f".{file.name}.making"), limit_s=None):
        text = read_made_lock(file)
        if text is None:
            say(f"asking the package indexes which files torch {build.value} has")
            text = _resolve(build, places.store, say, is_stopped)
            replace_text(file, text)
            say(f"the files of torch {build.value} are locked from now on by {file}")
        return text


def _resolve(build: TorchBuild, store: Path, say: OnMessage, is_stopped: Callable[[], bool]) -> str:
    settings = read_index_settings(os.environ, Path.home(), build.index_url)
    given = {k: v for name in BESIDE_TORCH for k, v in _versions(shipped_text(name)).items()}
    with _uv(store, settings, say, is_stopped) as uv:
        packages = resolver.resolve_build(
            uv,
            f"torch=={_torch_version()}+{build.value}",
            settings,
            given,
            _versions(shipped_text(TorchBuild.CUDA_13.lock)),
            is_stopped,
        )
    about = (
        f"PyTorch's build {build.value}, for older NVIDIA drivers and cards.",
        "",
        f"Made by Rackless on {time.strftime('%Y-%m-%d', time.gmtime())}, with the hashes that "
        f"{_source_of(packages)} named on that day.",
        "A file that changes later is refused. Delete this one to have it made again.",
    )
    try:
        return lock_text(about, packages)
    except NoWheel as error:
        raise resolver.Unresolvable(str(error)) from error


@contextlib.contextmanager
def _uv(
    store: Path, settings: IndexSettings, say: OnMessage, is_stopped: Callable[[], bool]
) -> Iterator[str]:
    """Yield the locked uv, unpacked for the block; else the installed one."""
    wheels = WheelSet(
        store=store,
        lock=read_lock_text(shipped_text("uv")),
        target=this_target(platform.python_version()),
    )
    folder = store / f".uv-{wheels.name}"
    try:
        fill(wheels, settings, say, is_stopped)
        wheel = wheels.find("uv")
        if wheel is None:
            raise resolver.Unresolvable(
                f"{wheels.folder} holds a changed file of uv: delete that folder"
            )
        uv = str(unpack_program(wheel, _PROGRAM, folder))
    except WheelProblem as problem:
        if problem.kind == "stopped":
            raise resolver.Stopped from problem
        installed = shutil.which("uv")
        if installed is None:
            raise resolver.Unresolvable(
                f"that takes uv, and this PC {problem.message}"
            ) from problem
        # Absolute: PATH may have relative folders, and uv is started in another one.
        uv = os.path.abspath(installed)
    try:
        yield uv
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _torch_version() -> str:
    return _versions(shipped_text(TorchBuild.CUDA_13.lock))["torch"]


def _versions(text: str) -> dict[str, str]:
    return {canonicalize_name(one.name): one.version for one in read_lock_text(text).packages}


def _source_of(packages: list[dict[str, Any]]) -> str:
    """Return the host that has torch's own files."""
    (torch,) = (one for one in packages if one["name"] == "torch")
    return urlsplit(str(torch["wheels"][0]["url"])).hostname or "a folder of this PC"
