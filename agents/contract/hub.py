"""Locations of the Hugging Face hub's cache and token on this PC.

https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agents.contract.model_files import MAX_INDEX_BYTES, choose_files
from agents.contract.names import MAX_FILE_BYTES, check_inside, check_number

_HUB_ID = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]{0,95}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")
# A branch, a tag or a commit; no step of it may lead out of a folder.
_REVISION = re.compile(
    r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}(?:/[A-Za-z0-9_][A-Za-z0-9._-]{0,99}){0,5}"
)
# A commit, or the hash of a file: SHA-1 of git, or SHA-256.
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
# Weights, configs and tokenizers: what training reads, and no program opens as code or a pickle.
_COPIED = (".safetensors", ".json", ".model", ".txt", ".jinja", ".tiktoken")


def hub_cache(environ: Mapping[str, str]) -> Path:
    """Return the folder of huggingface_hub's downloads.

    >>> str(hub_cache({"HF_HOME": "/data/hf"}))
    '/data/hf/hub'
    """
    if environ.get("HF_HUB_CACHE"):
        return Path(environ["HF_HUB_CACHE"]).expanduser()
    return hub_home(environ) / "hub"


def find_snapshot(model: str, environ: Mapping[str, str]) -> Path | None:
    """Return the folder of the newest snapshot of a hub id, or None if there is no snapshot."""
    cached = hub_cache(environ) / f"models--{model.replace('/', '--')}"
    try:
        revision = (cached / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    # Only the last part: the content of a file must not lead out of the cache.
    return cached / "snapshots" / Path(revision).name


@dataclass(frozen=True, kw_only=True, slots=True)
class HubFile:
    """File of a snapshot."""

    path: str
    """Relative path in the snapshot."""
    blob: str
    """Name of its content in the cache: the hash that the hub gave."""
    size_bytes: int

    def check_foreign(self) -> None:
        check_inside(self.path)
        if not is_copied(self.path):
            raise ValueError(f"{self.path[:80]!a} is not a file that nodes copy from each other")
        check_number("size_bytes", self.size_bytes, 0, MAX_FILE_BYTES)
        if not _BLOB.fullmatch(self.blob):
            raise ValueError(f"{self.blob[:80]!a} is not the name of a blob")


@dataclass(frozen=True, kw_only=True, slots=True)
class HubSnapshot:
    """Files of one revision of a model in a cache."""

    revision: str
    files: tuple[HubFile, ...]

    def check_foreign(self) -> None:
        if not _BLOB.fullmatch(self.revision):
            raise ValueError(f"{self.revision[:80]!a} is not a revision")

    def vouches_for(self, other: HubSnapshot) -> bool:
        """Return whether every file of `other` is a file of this snapshot, by path and hash."""
        known = {file.path: file for file in self.files}
        return all(known.get(file.path) == file for file in other.files)


def is_copied(path: str) -> bool:
    """Return whether nodes copy a file of a snapshot: never code, a pickle or a notebook.

    >>> [is_copied(path) for path in ("model.safetensors", "modeling.py", "a.bin", ".x.json")]
    [True, False, False, False]
    """
    return path.endswith(_COPIED) and not any(part[:1] == "." for part in path.split("/"))


def check_hub_id(model: str) -> None:
    """Check a hub id, which becomes part of a path.

    Raises:
        ValueError: it is not a hub id.
    """
    if not _HUB_ID.fullmatch(model):
        raise ValueError(f"{model[:80]!a} is not the id of a model on the hub")


def check_data_id(data: str) -> None:
    """Check the hub id of a data set, `org/name` or `org/name:part`.

    Raises:
        ValueError: it is not one.
    """
    name, colon, part = data.partition(":")
    if not _HUB_ID.fullmatch(name) or (colon and not _PART.fullmatch(part)):
        raise ValueError(f"{data[:80]!a} is not the id of a data set on the hub")


def check_revision(revision: str) -> None:
    """Check a branch, tag or commit, which becomes part of a path; empty: the newest.

    >>> for name in ("", "main", "refs/pr/1", "v1.0"):
    ...     check_revision(name)

    Raises:
        ValueError: it is not one.
    """
    if revision and not _REVISION.fullmatch(revision):
        raise ValueError(f"{revision[:80]!a} is not a branch, a tag or a commit")


def read_snapshot(model: str, environ: Mapping[str, str]) -> HubSnapshot | None:
    """Return the newest complete snapshot of a model, or None.

    A snapshot is incomplete if a file of its index is missing, or if a download was interrupted.
    """
    folder = find_snapshot(model, environ)
    if folder is None or not _BLOB.fullmatch(folder.name):
        return None
    blobs = folder.parent.parent / "blobs"
    try:
        if is_broken_off(blobs) or not (folder / "config.json").is_file():
            return None
        files = []
        for path in sorted(folder.rglob("*")):
            relative = path.relative_to(folder).as_posix()
            if not path.is_symlink() or not is_copied(relative):
                # A folder, or a copy in a cache without links (Windows), which is not offered.
                continue
            blob = path.resolve(strict=True)
            # A link elsewhere could make a node read out any file of the user.
            if blob.parent != blobs.resolve() or not _BLOB.fullmatch(blob.name):
                return None
            files.append(HubFile(path=relative, blob=blob.name, size_bytes=blob.stat().st_size))
        read = partial(_read_small, folder)
        used = choose_files((file.path for file in files), read)
    except (OSError, ValueError):
        return None
    if not used.is_whole:
        return None
    chosen = tuple(file for file in files if file.path in used.names)
    return HubSnapshot(revision=folder.name, files=chosen)


def is_broken_off(blobs: Path) -> bool:
    """Return whether a download has begun a file that is still missing."""
    # HASH.incomplete or HASH.RANDOM.incomplete; a killed download leaves it behind.
    begun = {half.name.partition(".")[0] for half in blobs.glob("*.incomplete")}
    return not all((blobs / blob).is_file() for blob in begun)


def _read_small(folder: Path, name: str) -> bytes:
    """Return the content of a file of a snapshot.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large.
    """
    with (folder / name).open("rb") as file:
        data = file.read(MAX_INDEX_BYTES + 1)
    if len(data) > MAX_INDEX_BYTES:
        raise ValueError(f"{name} has more than {MAX_INDEX_BYTES} bytes")
    return data


def hub_home(environ: Mapping[str, str]) -> Path:
    """Return the home folder of the hub's tools.

    >>> str(hub_home({"HOME": "/home/anna"}))
    '/home/anna/.cache/huggingface'
    """
    if environ.get("HF_HOME"):
        return Path(environ["HF_HOME"]).expanduser()
    home = Path(environ.get("HOME") or str(Path.home()))
    # In the order of huggingface_hub, so that both find the same folder.
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else home / ".cache") / "huggingface"


def token_path(environ: Mapping[str, str]) -> Path:
    """Return the token file of huggingface_hub.

    >>> str(token_path({"HF_HOME": "/data/hf"}))
    '/data/hf/token'
    """
    named = environ.get("HF_TOKEN_PATH")
    return Path(named).expanduser() if named else hub_home(environ) / "token"


def read_token(environ: Mapping[str, str]) -> str:
    """Return the token that the hub's tools would use; empty: no token."""
    # The environment wins over the file, as in huggingface_hub.
    return environ.get("HF_TOKEN", "").strip() or read_file(token_path(environ))


def digest_of(token: str) -> str:
    """Return the SHA-256 of a token, in hex."""
    return hashlib.sha256(token.encode("utf-8")).hexdigest()


def read_file(path: Path) -> str:
    """Return the text of a token file; empty: no token."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""
