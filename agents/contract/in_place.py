"""Queries for files of a run that a node can read in place instead of getting a copy.

The node compares names, sizes and hashes with those of the master; until then the location
is a guess. Its answer never reveals other files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agents.contract.names import check_inside, check_text
from agents.contract.run import FileEntry
from agents.contract.shares import Mount, Share, find_places, find_share, list_shares

MAX_PATHS = 4
MAX_QUERIES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceQuery:
    """Files of the master that a node may have, too."""

    is_model: bool
    """True if a whole model folder is used; False if it is data."""
    paths: tuple[str, ...]
    """Absolute paths of the folder on the master: as named, and with links resolved."""
    share: Share | None
    """Server folder that holds the files; None: a local disk of the master."""
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
    """Where a node can use the files; one answer per query, in order."""

    path: str | None = None
    """File or folder on the node; None: not found."""
    share: str = ""
    """Name of its share, such as `nas:/models/tiny`, or the folder itself if it is on a local disk
    of the node, as on the server."""
    problem: str = ""
    """Why similar files are not used, as the end of a sentence."""

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

    These are the same path, mounts of the same server folder, mounts of a folder that the master
    itself serves, and on the server the folder that it serves. A path that neither PC knows as
    shared is not used in place, since its owner may change it while a copy stays the same.

    Args:
        query: query of the master.
        mounts: mounts of the node.
        resolve: function that returns a path with all links resolved.
    """
    found = [
        path
        for path in query.paths
        if query.share is not None or find_share(resolve(path), mounts) is not None
    ]
    if query.share is not None:
        found += find_places(query.share, mounts)
        # On the server itself the export is a plain folder.
        if query.share.kind in ("nfs", "sshfs") and query.share.path.startswith("/"):
            found.append(query.share.path)
    # The master may be the server; its name differs from node to node, so any server matches.
    for path in query.paths:
        for kind in ("nfs", "sshfs"):
            found += find_places(Share(kind=kind, server="", path=path), mounts)
    # Unique, in order of likelihood.
    return tuple(dict.fromkeys(found))
