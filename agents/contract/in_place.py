"""Ask a node whether it can read files of a run where they lie, instead of getting a copy.

The node compares names, sizes and hashes with those of the master; where the files are is only a
guess until then. It never says what else is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agents.contract.names import check_inside, check_text
from agents.contract.run import FileEntry
from agents.contract.shares import Mount, Share, find_places, find_share, list_shares

MODEL_SUFFIXES = frozenset({".safetensors", ".json", ".model", ".txt", ".jinja", ".tiktoken"})
"""Suffixes of the files of a model that count; weights in pickles do not."""
MAX_PATHS = 4
MAX_QUERIES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceQuery:
    """Files of the master that a node may have as well."""

    is_model: bool
    """Whether the whole folder of a model is used; else it is data."""
    paths: tuple[str, ...]
    """Absolute paths of the folder on the master: as named, and with links followed."""
    share: Share | None
    """Folder of a server that this is; None: it is on a disk of the master."""
    files: tuple[FileEntry, ...]
    member: str | None = None
    """File of the folder that is used; None: the whole folder."""

    def check_foreign(self) -> None:
        if len(self.paths) > MAX_PATHS:
            raise ValueError(f"paths has {len(self.paths)} items; at most {MAX_PATHS} fit")
        for path in self.paths:
            check_text("paths", path)
            if not path.startswith("/") or "\0" in path:
                raise ValueError(f"paths has {path[:80]!a}, which is not absolute")
        if self.member is not None:
            check_inside(self.member)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceAnswer:
    """Where a node can use the files; one answer for each query, in their order."""

    path: str | None = None
    """File or folder there; None: nowhere."""
    share: str = ""
    """Name of the share that it is on, such as `nas:/models/tiny`; the folder itself, if that is on
    a disk of the node, as on the server."""
    problem: str = ""
    """Why files that looked like them are not used, as the end of a sentence."""

    def check_foreign(self) -> None:
        for name in ("path", "share", "problem"):
            check_text(name, getattr(self, name) or "")
        if self.path is not None and not self.path.startswith("/"):
            raise ValueError(f"path is {self.path[:80]!a}, which is not absolute")


def may_have(queries: Sequence[PlaceQuery], mounts: Sequence[Mount]) -> bool:
    """Return whether any of the files can be shared with a node that has these mounts."""
    is_shared = any(query.share is not None for query in queries)
    return is_shared or next(list_shares(mounts), None) is not None


def guess_folders(
    query: PlaceQuery, mounts: Sequence[Mount], resolve: Callable[[str], str]
) -> tuple[str, ...]:
    """Return folders of a node that may be the one of the query, the likeliest first.

    These are the same path, where the same folder of the server is mounted, where one that the
    master itself serves is mounted, and on the server itself the folder that it serves. A path that
    neither PC knows as shared is not used in place, since a copy outlives its owner's changes.

    Args:
        query: of the master.
        mounts: of the node.
        resolve: returns a path with all links followed.
    """
    found = [
        path
        for path in query.paths
        if query.share is not None or find_share(resolve(path), mounts) is not None
    ]
    if query.share is not None:
        found += find_places(query.share, mounts)
        if query.share.kind in ("nfs", "sshfs") and query.share.path.startswith("/"):
            found.append(query.share.path)
    for path in query.paths:
        for kind in ("nfs", "sshfs"):
            found += find_places(Share(kind=kind, server="", path=path), mounts)
    return tuple(dict.fromkeys(found))
