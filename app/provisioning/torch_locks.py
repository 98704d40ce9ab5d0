"""The locks of the builds of torch: those that ship, and those that this PC makes at first need.

A build that only PyTorch's own index has may have no lock in this version of Rackless. Then this PC
makes one, after a person has agreed: the files are those that the index names on that day. From
then on it is a lock like any other, for all nodes, and a file that changes later is refused.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agents.shared.packages.lock import read_lock_text
from agents.shared.packages.package_index import IndexUnreachable, PackageIndex, read_index_settings
from app.errors import UnshippedLock, UserError
from app.filelock import locked
from app.nodes.files.local_files import in_stoppable_thread
from app.paths import private_folder, replace_text
from app.progress import OnMessage
from app.provisioning.lock_text import NoWheel, lock_text
from app.provisioning.torch_build import BESIDE_TORCH, DRIVERS, TorchBuild, shipped_text
from app.provisioning.torch_resolver import Unresolvable, resolve_build


class NoTorchLock(UserError):
    """The lock of a build cannot be made now; the build for current drivers can be had still."""


class _Stopped(Exception):
    """The person has cancelled."""


def made_lock(folder: Path, build: TorchBuild) -> Path:
    """Return the file of a lock that this PC makes."""
    return folder / f"{build.lock}.lock"


def read_made_lock(file: Path) -> str | None:
    """Return a lock that this PC has made; None: there is none that fits this version."""
    try:
        text = file.read_text("utf-8")
        packages = read_lock_text(text).packages
        # As it is installed: no package may come from two locks.
        read_lock_text(text + "".join(map(shipped_text, BESIDE_TORCH)))
    except (OSError, ValueError):
        return None
    versions = [one.version.partition("+")[0] for one in packages if one.name == "torch"]
    return text if versions == [_torch_version()] else None


def has_lock(build: TorchBuild, folder: Path) -> bool:
    """Return whether a build has a lock: a shipped one, or one that this PC has made."""
    return build.is_shipped or read_made_lock(made_lock(folder, build)) is not None


async def provide_lock(
    build: TorchBuild, node: str, folder: Path, *, accept_index: bool, say: OnMessage
) -> str:
    """Return the lock of a build for a node: the shipped one, or one of this PC, made if need be.

    Args:
        build: to lock.
        node: that it is for, to name in errors.
        folder: of this PC's own locks.
        accept_index: whether a person agrees to hashes that PyTorch's index names.
        say: gets sentences.

    Raises:
        UnshippedLock: nobody has agreed yet.
        NoTorchLock: no index can be reached, or none has the build.
        UserError: the folder cannot be written.
    """
    if build.is_shipped:
        return shipped_text(build.lock)
    file = made_lock(folder, build)
    text = await asyncio.to_thread(read_made_lock, file)
    if text is not None:
        say(f"the files of torch {build.value} are locked by {file}")
        return text
    if not accept_index:
        raise UnshippedLock(node, build.value, str(build.index_url))
    try:
        return await _in_thread(build, file, say)
    except (IndexUnreachable, Unresolvable) as error:
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
            f"{file} cannot be written: {error.strerror or error}",
            "Free some space on that disk, or correct the permissions of that folder",
            where=str(file),
        ) from error


async def _in_thread(build: TorchBuild, file: Path, say: OnMessage) -> str:
    """Make a lock in a thread, which ends before this does, also when this is cancelled."""
    loop, stopped = asyncio.get_running_loop(), threading.Event()

    def tell(text: str) -> None:
        loop.call_soon_threadsafe(say, text)

    making = partial(make_lock, build, file, tell, stopped.is_set)
    return await in_stoppable_thread(making, stopped.set)


def make_lock(build: TorchBuild, file: Path, say: OnMessage, is_stopped: Callable[[], bool]) -> str:
    """Make the lock of a build, write it and return its text; another process may do so meanwhile.

    Raises:
        IndexUnreachable: an index does not answer.
        Unresolvable: none has the build, or something that it needs.
        OSError: the file cannot be written; nothing is left of it.
    """
    private_folder(file.parent)
    with locked(file.with_name(f".{file.name}.making")):
        text = read_made_lock(file)
        if text is None:
            say(f"asking the package indexes which files torch {build.value} has")
            text = _resolve(build, is_stopped)
            replace_text(file, text)
            say(f"the files of torch {build.value} are locked from now on by {file}")
        return text


def _resolve(build: TorchBuild, is_stopped: Callable[[], bool]) -> str:
    def check_stopped() -> None:
        if is_stopped():
            raise _Stopped

    index = PackageIndex(read_index_settings(os.environ, Path.home(), build.index_url))
    given = {k: v for name in BESIDE_TORCH for k, v in _versions(shipped_text(name)).items()}
    packages = resolve_build(
        f"torch=={_torch_version()}+{build.value}",
        index,
        given,
        _versions(shipped_text(TorchBuild.CUDA_13.lock)),
        check_stopped,
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
        raise Unresolvable(str(error)) from error


def _torch_version() -> str:
    return _versions(shipped_text(TorchBuild.CUDA_13.lock))["torch"]


def _versions(text: str) -> dict[str, str]:
    return {one.name: one.version for one in read_lock_text(text).packages}


def _source_of(packages: list[dict[str, Any]]) -> str:
    """Return the host that names torch's own files."""
    (torch,) = (one for one in packages if one["name"] == "torch")
    return urlsplit(str(torch["wheels"][0]["url"])).hostname or "a folder of this PC"
