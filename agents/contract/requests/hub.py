"""Requests about a node's Hugging Face cache and token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from agents.contract.hub import HubSnapshot, check_data_id, check_hub_id, check_revision
from agents.contract.names import MAX_FILE_BYTES, check_inside, check_number
from agents.contract.requests import HASH_S, LOOK_S, NodeRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundSnapshot:
    snapshot: HubSnapshot | None
    """Snapshot; None: the cache lacks a part of it, or has it in a form that cannot be copied."""
    folder: str = ""
    """Path of the agent's own copy of it on the node; empty: it is in the hub's cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FindSnapshot(NodeRequest[FoundSnapshot]):
    """Find a model in the cache, else among the agent's own copies."""

    kind = "hub.snapshot"
    model: str
    """Hub id."""

    def check_foreign(self) -> None:
        check_hub_id(self.model)


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchSnapshot(NodeRequest[FoundSnapshot]):
    """Download a model into the cache, with `progress` events; a large model takes hours."""

    kind = "hub.fetch"
    limit_s = None
    model: str
    """Hub id."""
    revision: str = ""
    """Branch, tag or commit; empty: the newest."""

    def check_foreign(self) -> None:
        check_hub_id(self.model)
        check_revision(self.revision)


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchData(NodeRequest[None]):
    """Download the files of a data set that runs read into the cache, with `progress` events."""

    kind = "hub.fetch_data"
    limit_s = None
    data: str
    """Hub id `org/name`, or `org/name:part`."""
    revision: str = ""
    """Branch, tag or commit, whose own files are downloaded; empty: the newest."""

    def check_foreign(self) -> None:
        check_data_id(self.data)
        check_revision(self.revision)


MAX_CACHED = 1000
"""Maximum number of models and data sets in a listing of a cache."""
MAX_REVISIONS = 100
"""Maximum number of revisions of one of them in a listing."""
CachedKind = Literal["model", "data"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedRepo:
    """A model or data set in a PC's cache."""

    kind: CachedKind
    name: str
    """Hub id."""
    size_bytes: int
    """Size of its files on disk, each counted once, in bytes."""
    revisions: tuple[str, ...] = ()
    """Commits with files in the cache, that of the newest download first."""
    is_whole: bool = True
    """False if a download was interrupted, or lacks weights."""

    def check_foreign(self) -> None:
        check_hub_id(self.name)
        check_number("size_bytes", self.size_bytes, 0, MAX_FILE_BYTES)
        check_number("number of revisions", len(self.revisions), 0, MAX_REVISIONS)
        for revision in self.revisions:
            check_revision(revision)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheListing:
    repos: tuple[CachedRepo, ...]

    def check_foreign(self) -> None:
        check_number("number of repos", len(self.repos), 0, MAX_CACHED)


@dataclass(frozen=True, kw_only=True, slots=True)
class ListCached(NodeRequest[CacheListing]):
    """List the models and data sets in the cache, without asking the hub."""

    kind = "hub.cached"
    limit_s = LOOK_S


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotPlace:
    """A snapshot, and a folder with the same files below a node's agent's home."""

    model: str
    """Hub id."""
    snapshot: HubSnapshot
    folder: str

    def check_foreign(self) -> None:
        check_hub_id(self.model)
        check_inside(self.folder)


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferSnapshot(NodeRequest[None]):
    """Export a snapshot as a folder that other nodes can copy."""

    kind = "hub.offer"
    flat = "place"
    limit_s = HASH_S
    place: SnapshotPlace


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepSnapshot(NodeRequest[FoundSnapshot]):
    """Verify a copied folder and use it for its model; the user's cache stays as it is."""

    kind = "hub.keep"
    flat = "place"
    limit_s = HASH_S
    place: SnapshotPlace


NodeTokenPlace = Literal["none", "same", "other"]
"""State of a node's hub token: none, the one in question, or another one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundToken:
    place: NodeTokenPlace


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenWish(NodeRequest[FoundToken]):
    """Find, keep or forget the hub token on a node; the answer is the state afterwards."""

    kind = "hub.token"
    deed: Literal["find", "keep", "forget"]
    token: str = field(default="", repr=False)
    """Token to keep; else empty."""
    digest: str = ""
    """SHA-256 of the token to find or forget, in hex."""
