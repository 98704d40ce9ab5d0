"""Download files of the hub into its cache: resumed after an interruption, and verified by hash.

The hub's own tools begin an interrupted file again. So files are downloaded here with their
functions into `HASH.incomplete`, verified, and renamed; the tools then find them in the cache.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from agents.contract.hub import hub_cache
from agents.contract.names import MAX_FILE_BYTES, check_inside
from agents.errors import ExpectedError
from agents.shared.files.hub_cache import has_content

LOOK_S = 1.0
"""Time between two checks of a download's progress, in seconds."""
MAX_AT_ONCE = 4
"""Maximum number of files that are downloaded at the same time."""
MAX_FILES = 100_000
"""Maximum number of files of a repository."""
# A file on the hub is named by SHA-256 if it is large (LFS), else by git's SHA-1.
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Files of one revision of a repository on the hub."""

    name: str
    kind: Literal["model", "dataset"]
    asked: str | None
    """Branch, tag or commit that the user asked for; None: the main branch."""
    revision: str
    """Its commit."""
    blobs: Mapping[str, tuple[str, int]]
    """Name in the hub's cache, which is its hash, and size in bytes, by name of the file."""

    @property
    def cached(self) -> Path:
        """Folder of the repository in the hub's cache."""
        return hub_cache(os.environ) / f"{self.kind}s--{self.name.replace('/', '--')}"

    @property
    def snapshot(self) -> Path:
        """Folder in which the files have their names."""
        return self.cached / "snapshots" / self.revision

    def list_lacking(self) -> dict[str, tuple[str, int]]:
        """Return the files that the cache lacks."""
        return {
            name: (blob, size)
            for name, (blob, size) in self.blobs.items()
            if not (self.cached / "blobs" / blob).is_file()
            # Without links, the hub's tools keep the files here.
            and not (self.snapshot / name).is_file()
        }


def list_wanted(
    name: str,
    kind: Literal["model", "dataset"],
    asked: str | None,
    choose: Callable[[list[str], str], list[str]],
    timeout_s: float,
) -> Wanted:
    """Ask the hub for the files of a repository.

    Args:
        name: hub id.
        kind: kind of the repository.
        asked: branch, tag or commit; None: the main branch.
        choose: returns the files to download, from all names and the commit.
        timeout_s: maximum wait for the hub, in seconds.

    Raises:
        ExpectedError: its answer cannot be used.
    """
    from huggingface_hub import HfApi

    info = HfApi().repo_info(
        name, repo_type=kind, revision=asked, files_metadata=True, timeout=timeout_s
    )
    found = {file.rfilename: file for file in info.siblings or ()}
    blobs = {}
    try:
        if len(found) > MAX_FILES:
            raise ValueError(f"{len(found)} files")
        for path in choose(list(found), info.sha or ""):
            file = found[path]
            blob = (file.lfs.sha256 if file.lfs else file.blob_id) or ""
            blobs[path] = (_require_blob_name(blob), _require_size(file.size))
            check_inside(path)  # it becomes a path in the cache
        _require_blob_name(info.sha or "")
    except ValueError as error:
        raise ExpectedError(
            f"The hub's list of the files of {name} cannot be used: {error}.",
            "Choose another revision, or another copy of it on the hub",
        ) from error
    return Wanted(name=name, kind=kind, asked=asked, revision=info.sha or "", blobs=blobs)


def _require_blob_name(blob: str) -> str:
    if not _BLOB.fullmatch(blob):
        raise ValueError(f"{blob[:80]!a} is not a hash")
    return blob


def _require_size(size_bytes: int | None) -> int:
    if size_bytes is None or not 0 <= size_bytes <= MAX_FILE_BYTES:
        raise ValueError(f"{size_bytes} is not the size of a file")
    return size_bytes


def fetch_files(wanted: Wanted, report: Report = lambda text: None) -> Path:
    """Download what the cache lacks; return the folder of the snapshot.

    Raises:
        ExpectedError: the disk is full, or a file is not the one that the hub lists.
    """
    lacking = wanted.list_lacking()
    blobs = wanted.cached / "blobs"
    begun_bytes = sum(_size_of(_half(blobs, blob)) for blob, _ in lacking.values())
    lacking_bytes = max(sum(size for _, size in lacking.values()) - begun_bytes, 0)
    _require_room(wanted.name, blobs, lacking_bytes)
    if lacking:
        blobs.mkdir(parents=True, exist_ok=True)
    with _watched(wanted.name, blobs, lacking_bytes, report):
        # Equal files of a repository are one blob.
        by_blob = {blob: (name, size) for name, (blob, size) in lacking.items()}
        pool = ThreadPoolExecutor(MAX_AT_ONCE)
        try:
            for _ in pool.map(partial(_fetch_blob, wanted), by_blob.items()):
                pass
        finally:
            pool.shutdown(cancel_futures=True)
    return _link_snapshot(wanted)


def _link_snapshot(wanted: Wanted) -> Path:
    """Give the files their names in the snapshot, as the hub's own tools do; return its folder."""
    wanted.snapshot.mkdir(parents=True, exist_ok=True)
    for name, (blob, _) in wanted.blobs.items():
        place, source = wanted.snapshot / name, wanted.cached / "blobs" / blob
        if place.exists():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)  # a link that leads nowhere
        try:
            place.symlink_to(os.path.relpath(source, place.parent))
        except OSError:  # Windows allows links to administrators and developers only
            os.link(source, place)
    ref = wanted.cached / "refs" / (wanted.asked or "main")
    if wanted.asked != wanted.revision:
        ref.parent.mkdir(parents=True, exist_ok=True)
        half = ref.with_name(f".{ref.name}.{os.getpid()}")
        half.write_text(wanted.revision, "ascii")
        os.replace(half, ref)
    return wanted.snapshot


def _fetch_blob(wanted: Wanted, one: tuple[str, tuple[str, int]]) -> None:
    """Download one file into the cache, from where an earlier download ended.

    Raises:
        ExpectedError: it is not the file that the hub lists.
    """
    from huggingface_hub import constants, hf_hub_download, hf_hub_url
    from huggingface_hub.file_download import get_hf_file_metadata, http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    blob, (name, size_bytes) = one
    blobs, half = wanted.cached / "blobs", _half(wanted.cached / "blobs", blob)
    if size_bytes > constants.MAX_HTTP_DOWNLOAD_SIZE:
        # Larger files are sent in another way (Xet), which begins them again.
        place = hf_hub_download(wanted.name, name, repo_type=wanted.kind, revision=wanted.revision)
        if not has_content(Path(place), blob):
            Path(place).resolve().unlink()
            raise _differs(wanted, name)
        return
    # Compressed files could not be resumed.
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    address = hf_hub_url(wanted.name, name, repo_type=wanted.kind, revision=wanted.revision)
    found = get_hf_file_metadata(address, headers=headers)
    if found.etag != blob or found.size not in (None, size_bytes):
        raise _differs(wanted, name)
    # The token is for the hub alone; large files come from other hosts.
    if urlsplit(found.location)[:2] != urlsplit(address)[:2]:
        headers.pop("authorization", None)
    # The lock of the hub's own tools, for the case that they download the same file.
    locks = hub_cache(os.environ) / ".locks" / wanted.cached.name
    locks.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(locks / f"{blob}.lock"):
        if (blobs / blob).is_file():
            return
        if _size_of(half) > size_bytes:
            half.unlink()
        with _BoundedFile(half, size_bytes) as file:
            http_get(
                found.location,
                file,
                resume_size=_size_of(half),
                headers=headers,
                expected_size=size_bytes,
                displayed_filename=name,
            )
        if not has_content(half, blob):
            # A wrong beginning would be kept at every further try.
            half.unlink()
            raise _differs(wanted, name)
        os.replace(half, blobs / blob)


class _BoundedFile(io.FileIO):
    """Appends to a file, and takes no more bytes than it may have."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        super().__init__(path, "ab")
        self._most_bytes = most_bytes

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self.tell() + len(data) > self._most_bytes:
            raise OSError("the server sends more bytes than the file has")
        written = 0
        while written < len(data):  # a nearly full disk takes only a part
            written += super().write(data[written:])
        return written


def _half(blobs: Path, blob: str) -> Path:
    return blobs / f"{blob}.incomplete"


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _differs(wanted: Wanted, name: str) -> ExpectedError:
    return ExpectedError(
        f"{name} of {wanted.name} arrives with other content than the hub lists.",
        "Download it again; if that does not help, a proxy or a mirror alters files",
    )


def _require_room(name: str, blobs: Path, lacking_bytes: int) -> None:
    """Check that the disk has space for a download.

    Raises:
        ExpectedError: it has not; the message names the folder and both sizes.
    """
    place = next(folder for folder in (blobs, *blobs.parents) if folder.exists())
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < lacking_bytes:
        raise ExpectedError(
            f"The disk of {hub_cache(os.environ)} has {_gib(free_bytes)} free, and {name} needs "
            f"{_gib(lacking_bytes)}.",
            "Free some space there, or set HF_HOME to a folder of a larger disk",
            topic="disk-full",
        )


@contextlib.contextmanager
def _watched(name: str, blobs: Path, lacking_bytes: int, report: Report) -> Iterator[None]:
    """Report the progress of a download inside the block, by the size of its files."""
    ended = threading.Event()
    begun_bytes = _held_bytes(blobs)

    def watch() -> None:
        reported = -1
        while lacking_bytes and not ended.wait(LOOK_S):
            done = min(max(_held_bytes(blobs) - begun_bytes, 0), lacking_bytes)
            percent = 100 * done // lacking_bytes
            # At most one line per percent.
            if percent != reported:
                reported = percent
                report(f"downloading {name}: {percent} % of {_gib(lacking_bytes)}")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _held_bytes(blobs: Path) -> int:
    total = 0
    with contextlib.suppress(FileNotFoundError):
        for blob in blobs.iterdir():
            with contextlib.suppress(FileNotFoundError):  # renamed in the meantime
                total += blob.stat().st_size
    return total


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
