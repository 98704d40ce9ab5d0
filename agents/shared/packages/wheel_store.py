"""Store of wheels: one folder for each lock and kind of interpreter, filled once.

`STORE/NAME` holds every wheel of a lock for one target, so that pip or uv can install from it
without a network, and one transfer copies it to another PC. NAME is a hash of lock and target. An
incomplete set is in `.partial-NAME`, as a transfer would leave it, and is continued. A file gets
its name only after its SHA-256 was found in the lock, and is never downloaded again: other sets
take it by a hard link.

`pip download --require-hashes` could fetch for another Python, too, but restarts a file after a
kill, stores files only after the last one, reports a silent index like a missing package, and is
unavailable on nodes without pip and in the bundle.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TypeVar

from agents.contract.environments import WheelTarget, WheelTrouble
from agents.shared.files.full_disk import removing_half
from agents.shared.packages.lock import Lock, LockedPackage
from agents.shared.packages.package_index import (
    IndexedFile,
    IndexUnreachable,
    PackageIndex,
    hash_file,
    hash_rest,
    hide_login,
)
from agents.shared.packages.wheel_fit import marker_holds, rank_wheel, read_wheel_name
from agents.shared.packages.wheel_progress import WheelProgress

Result = TypeVar("Result")
STORE = "wheels"
"""Folder of the store below the home of an agent or of the master."""
AT_ONCE = 6
"""Number of concurrent downloads."""
_MAX_WHEEL_BYTES = 16 << 30
HALVES = ".half"
"""Folder of the store with incomplete downloads."""
PARTIAL = ".partial-"


class WheelProblem(Exception):
    """Raised when wheels cannot be fetched; the subject of its sentence is the PC.

    `kind` is `unreachable` (no index answers, but another PC may reach one), `missing` (no index
    has the file), `wrong` (a file is not the locked one) or `stopped`.
    """

    def __init__(self, kind: WheelTrouble, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.kind: WheelTrouble = kind
        self.message = message
        self.hint = hint


@dataclass(frozen=True, kw_only=True, slots=True)
class WheelSet:
    """Wheels of a lock for a target, in a store: all, some or none."""

    store: Path
    lock: Lock
    target: WheelTarget

    @property
    def name(self) -> str:
        text = f"{self.lock.text}\n{self.target.key}\n"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def folder(self) -> Path:
        return self.store / self.name

    @property
    def partial(self) -> Path:
        """Folder of a set that is incomplete."""
        return self.store / f"{PARTIAL}{self.name}"

    @property
    def packages(self) -> tuple[LockedPackage, ...]:
        """Packages that the target needs."""
        return tuple(p for p in self.lock.packages if marker_holds(p.marker, self.target))

    def present(self) -> dict[str, Path]:
        """Return the present wheels by the names of their packages."""
        place = self.folder if self.folder.is_dir() else self.partial
        return _fitting(_list(place), self.packages, self.target)

    def find(self, name: str) -> Path | None:
        """Return the wheel of a package if it is present and its hash is in the lock."""
        wheel = self.present().get(name)
        (package,) = (package for package in self.lock.packages if package.name == name)
        return wheel if wheel is not None and hash_file(wheel) in package.hashes else None

    @property
    def is_complete(self) -> bool:
        return self.folder.is_dir() and len(self.present()) == len(self.packages)

    @property
    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.present().values())


def fetch(
    wheels: WheelSet,
    index: PackageIndex,
    say: Callable[[str], None],
    is_stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Complete a set, from other sets of its store, then from package indexes.

    The caller must ensure that no other program writes the set at the same time.

    Args:
        wheels: set to complete.
        index: indexes to query for wheels that the store lacks.
        say: receives sentences about the progress, about one a second.
        is_stopped: ends the work when it returns True; downloads stay for the next time.

    Raises:
        WheelProblem: the set is incomplete, since no index answers, has a file, or has the locked
            file.
        OSError: the disk is full or cannot be written.
    """
    wheels.store.mkdir(mode=0o700, exist_ok=True)
    place = wheels.folder if wheels.folder.is_dir() else wheels.partial
    place.mkdir(mode=0o700, exist_ok=True)
    _take_from_others(wheels, place)
    known = wheels.present()
    lacking = [package for package in wheels.packages if package.name not in known]
    if lacking:
        _Fetch(wheels, place, index, say, is_stopped).run(lacking, len(known))
    # The rename marks the set as complete.
    if place == wheels.partial:
        place.rename(wheels.folder)
    _sync_folder(wheels.store)


def unpack_program(wheel: Path, name: str, folder: Path) -> Path:
    """Unpack a program of a wheel into `folder`, replacing it, and return its path.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    half = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        half.mkdir(mode=0o700, parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as packed:
            ending = f".data/scripts/{name}"
            (entry,) = (path for path in packed.namelist() if path.endswith(ending))
            (half / name).write_bytes(packed.read(entry))
        # A zip stores the mode in a field that zipfile does not apply.
        (half / name).chmod(0o700)
        shutil.rmtree(folder, ignore_errors=True)
        half.rename(folder)
    finally:
        shutil.rmtree(half, ignore_errors=True)
    return folder / name


def _list(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from sorted(folder.iterdir())


def _fitting(
    files: Iterable[Path], packages: Iterable[LockedPackage], target: WheelTarget
) -> dict[str, Path]:
    wanted = {package.key: package.name for package in packages}
    found: dict[str, Path] = {}
    for file in files:
        wheel = read_wheel_name(file.name)
        if wheel is None:
            continue
        name, version, tags = wheel
        if (name, version) in wanted and rank_wheel(tags, target) is not None:
            found.setdefault(wanted[name, version], file)
    return found


def _take_from_others(wheels: WheelSet, place: Path) -> None:
    """Link wheels of other sets after comparing their hashes with the lock."""
    others = [path for path in _list(wheels.store) if path.is_dir() and path.name != HALVES]
    for other in others:
        known = wheels.present()
        lacking = [package for package in wheels.packages if package.name not in known]
        found = _fitting(_list(other), lacking, wheels.target) if lacking else {}
        for package in lacking:
            file = found.get(package.name)
            if file is not None and hash_file(file) in package.hashes:
                _link(file, place / file.name)


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:  # a file system without hard links
        with removing_half(target.with_name(f".{target.name}.half")) as half:
            shutil.copyfile(file, half)
            half.rename(target)


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # cannot open a folder
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _unreachable(error: IndexUnreachable) -> WheelProblem:
    return WheelProblem(
        "unreachable",
        f"cannot reach the package index ({error})",
        "Check its internet connection, or set a mirror: pip config set global.index-url URL",
    )


def _missing(package: LockedPackage) -> WheelProblem:
    return WheelProblem(
        "missing",
        f"finds no package {package.name}=={package.version} for this Python or this kind of PC, "
        "ready-built as the lock wants it",
        "Install a Python that the packages support: 3.11 to 3.14, 64 bit",
    )


def _wrong(package: LockedPackage, file: IndexedFile, got: str) -> WheelProblem:
    few = len(package.hashes) == 1
    wanted = package.hashes[0] if few else f"one of the lock's {len(package.hashes)}"
    return WheelProblem(
        "wrong",
        f"is offered {package.name}=={package.version} from {hide_login(file.url)}, which is not "
        f"the file that the lock names. Expected sha256 {wanted}, got {got}. It was not installed",
        "Try again, in case the download was damaged. If it is the same again, the package index "
        "or a proxy serves another file than the one that was checked: see there with "
        "`pip config list`, and do not install it by hand",
    )


class _Fetch:
    """Downloads of one set."""

    def __init__(
        self,
        wheels: WheelSet,
        place: Path,
        index: PackageIndex,
        say: Callable[[str], None],
        is_stopped: Callable[[], bool],
    ) -> None:
        self._wheels = wheels
        self._place = place
        self._index = index
        self._say = say
        self._is_stopped = is_stopped
        self._halves = wheels.store / HALVES
        self._has_failed = False

    def run(self, lacking: list[LockedPackage], num_known: int) -> None:
        self._say(f"looking for {len(lacking)} packages in the package index")
        # One alone first, so that a silent index costs one timeout, not one per package.
        first = self._find(lacking[0])
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="fetch") as pool:
            found = [first, *self._all(pool.submit(self._find, package) for package in lacking[1:])]
            self._halves.mkdir(mode=0o700, exist_ok=True)
            sizes = [file.size_bytes for _, file in found]
            progress = WheelProgress(
                self._say,
                "fetching",
                num_total=num_known + len(found),
                num_done=num_known,
                total_bytes=None if None in sizes else sum(size or 0 for size in sizes),
            )
            # The largest first, or it would end last with the other downloads idle.
            found.sort(key=lambda pair: -(pair[1].size_bytes or 0))
            self._all(pool.submit(self._download, *pair, progress) for pair in found)

    def _all(self, begun: Iterable[Future[Result]]) -> list[Result]:
        """Return all results; after the first failure, end the other downloads and raise it."""
        futures = list(begun)
        done, others = wait(futures, return_when=FIRST_EXCEPTION)
        self._has_failed = any(future.exception() is not None for future in done)
        for future in others:
            future.cancel()
        wait(others)
        for future in done:
            future.result()
        return [future.result() for future in futures]

    def _find(self, package: LockedPackage) -> tuple[LockedPackage, IndexedFile]:
        """Choose the file of a package, from the first index that has a locked one.

        Raises:
            WheelProblem: no index has it, or a possible one does not answer.
        """
        self._check_stopped()
        found: list[tuple[tuple[bool, int], IndexedFile]] = []
        others: list[IndexedFile] = []
        try:
            for files in self._index.files_of(package.name):
                for file in files:
                    wheel = read_wheel_name(file.name)
                    if wheel is None or wheel[:2] != package.key:
                        continue
                    rank = rank_wheel(wheel[2], self._wheels.target)
                    if rank is None:
                        continue
                    # Old indexes give no hash; such a file is verified after the download.
                    if file.sha256 is None or file.sha256 in package.hashes:
                        found.append(((file.sha256 is None, rank), file))
                    else:
                        others.append(file)
                if found:
                    break
        except IndexUnreachable as error:
            raise _unreachable(error) from error
        if found:
            return package, self._measure(min(found, key=lambda pair: pair[0])[1])
        if others:
            raise _wrong(package, others[0], others[0].sha256 or "another")
        raise _missing(package)

    def _measure(self, file: IndexedFile) -> IndexedFile:
        if file.size_bytes is not None:
            return file
        return replace(file, size_bytes=self._index.size_of(file.url))

    def _download(self, package: LockedPackage, file: IndexedFile, progress: WheelProgress) -> None:
        half = self._halves / f"{file.sha256 or package.hashes[0]}-{file.name}"
        with half.open("ab+") as out:
            progress.begin_file(file.name, out.seek(0, os.SEEK_END))
            self._fill(out, file, progress)
            out.seek(0)
            got = hash_rest(out)
            os.fsync(out.fileno())
        # A wrong file would be taken for a partial download next time.
        if got not in package.hashes:
            half.unlink()
            raise _wrong(package, file, got)
        half.rename(self._place / file.name)
        progress.end_file()

    def _fill(self, out: IO[bytes], file: IndexedFile, progress: WheelProgress) -> None:
        """Append the missing part of a file; retry once if the connection breaks."""
        try:
            self._append(out, file, progress)
        except IndexUnreachable:
            try:
                self._append(out, file, progress)
            except IndexUnreachable as error:
                raise _unreachable(error) from error

    def _append(self, out: IO[bytes], file: IndexedFile, progress: WheelProgress) -> None:
        start, size = out.seek(0, os.SEEK_END), file.size_bytes
        if start and start == size:
            return
        with self._index.opened(file.url, start) as (blocks, offset):
            # The server may send the whole file again instead of the rest.
            out.truncate(offset)
            done = offset
            for block in blocks:
                self._check_stopped()
                out.write(block)
                done += len(block)
                progress.reach(file.name, done)
                if done > min(size or _MAX_WHEEL_BYTES, _MAX_WHEEL_BYTES):
                    break  # its hash will be wrong in any case
        out.flush()
        if size is not None and done < size:
            raise IndexUnreachable(file.url, "the connection ended early")

    def _check_stopped(self) -> None:
        if self._has_failed or self._is_stopped():
            raise WheelProblem("stopped", "was stopped while it fetched packages")
