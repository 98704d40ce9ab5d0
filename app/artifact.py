"""An artifact: the result of an export with its origin, measured quality and copies.

Its name is that of the run and the format; another export makes the next version. `NAME` means the
newest version, `NAME:2` the second. The hashes of its files identify it, so equal files are the
same artifact at any location.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from agents.contract.requests.exports import Origin
from agents.contract.run import FileEntry
from agents.contract.run_layout import checkpoint_path
from app.text import count_of, show_list

CopyKind = Literal["folder", "node", "hub"]
CopyState = Literal["whole", "missing", "damaged", "unknown"]
"""State of a copy. `unknown`: its location did not answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Measured quality of one file of an artifact."""

    name: str
    """Type of the file, such as `Q8_0`."""
    keep: bool
    problems: tuple[str, ...]
    """Reasons not to keep it."""
    kl: float
    """Divergence from the original's next-token distributions, in nats per token."""
    control_kl: float
    """The same divergence for plain rounding to 4 bits, the baseline, in nats per token."""
    perplexity: float
    original_perplexity: float
    size_bytes: int
    tokens_per_s: float | None
    """Generation speed on the node that made it, in tokens per second; None: not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArtifactCopy:
    """A current or former copy of an artifact."""

    kind: CopyKind
    place: str
    """Folder on this PC, name of a node, or id on the hub."""
    path: str = ""
    """On a node: folder below the agent's home. On the hub: the address."""
    made_s: float
    checked_s: float | None = None
    """Wall clock of the last hashing of its files, in seconds; None: not hashed since it was made.
    """
    state: CopyState = "whole"
    problem: str = ""

    @property
    def counts(self) -> bool:
        """True if the artifact can probably be fetched from there."""
        # `unknown` counts, since a node that is off still has its copy.
        return self.state in ("whole", "unknown")


@dataclass(frozen=True, kw_only=True, slots=True)
class ArtifactSnapshot:
    """One version of an artifact."""

    name: str
    version: int
    format: str
    """Format: one of `agents.contract.formats.FORMATS`."""
    types: tuple[str, ...] = ()
    origin: Origin | None = None
    """Origin; None: unknown, since it was made elsewhere."""
    size_bytes: int
    created_s: float
    files: tuple[FileEntry, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    """Measured quality per file; empty for a merged model, which is lossless."""
    runtimes: tuple[str, ...] = ()
    """Programs with versions that loaded it for its proof."""
    measured: dict[str, Any] | None = None
    """Time and memory used, as reported by the node; None: not known."""
    copies: tuple[ArtifactCopy, ...] = ()

    @property
    def label(self) -> str:
        """Name and version.

        >>> ArtifactSnapshot(name="poems-awq", version=2, format="awq", size_bytes=1,
        ...     created_s=0.0).label
        'poems-awq:2'
        """
        return f"{self.name}:{self.version}"

    @property
    def checkpoint(self) -> str | None:
        """Checkpoint of its origin, as a path below an agent's home; None without an origin."""
        if self.origin is None:
            return None
        return checkpoint_path(self.origin.run_id, self.origin.step)

    def folder(self) -> str | None:
        """Return its folder on this PC; None without one."""
        found = [copy.place for copy in self.copies if copy.kind == "folder" and copy.counts]
        return found[0] if found else None


def describe_places(artifact: ArtifactSnapshot) -> str:
    """Describe the locations of its copies in a few words.

    >>> describe_places(ArtifactSnapshot(name="a", version=1, format="awq", size_bytes=1,
    ...     created_s=0.0, copies=(ArtifactCopy(kind="folder", place="/m/a", made_s=0.0),
    ...     ArtifactCopy(kind="node", place="beta", made_s=0.0),
    ...     ArtifactCopy(kind="node", place="pc", made_s=0.0, state="missing"))))
    'this PC, beta'
    """
    names = ["this PC"] if artifact.folder() else []
    names += [copy.place for copy in artifact.copies if copy.counts and copy.kind != "folder"]
    if names:
        return ", ".join(names)
    # No copy counts, so all of them are lost.
    lost = [copy.place for copy in artifact.copies]
    return f"missing: {show_list(lost)}" if lost else "nowhere"


def describe_verdicts(artifact: ArtifactSnapshot) -> str:
    """Summarize the verdicts of all files in a few words.

    >>> describe_verdicts(ArtifactSnapshot(name="a", version=1, format="merged", size_bytes=1,
    ...     created_s=0.0))
    'not measured'
    """
    if not artifact.verdicts:
        # A merge by Rackless is exact; a folder made elsewhere may be anything.
        is_ours = artifact.format == "merged" and artifact.origin is not None
        return "lossless" if is_ours else "not measured"
    bad = [verdict.name for verdict in artifact.verdicts if not verdict.keep]
    if not bad:
        return "keep"
    return "do not keep" if len(bad) == len(artifact.verdicts) else f"not {show_list(bad)}"


def describe_kind(artifact: ArtifactSnapshot) -> str:
    """Return format and types.

    >>> describe_kind(ArtifactSnapshot(name="a", version=1, format="gguf", types=("F16", "Q8_0"),
    ...     size_bytes=1, created_s=0.0))
    'gguf F16, Q8_0'
    """
    return f"{artifact.format} {', '.join(artifact.types)}".strip()


def tell_last(artifact: ArtifactSnapshot, place: str | None) -> str:
    """Return a warning if deleting leaves no copy; empty: another copy is left.

    Args:
        artifact: the artifact with its current copies.
        place: location of the copy to delete; None: all copies.
    """
    kept = [copy for copy in artifact.copies if place is not None and copy.place != place]
    if any(copy.counts for copy in kept):
        return ""
    if place is None and len(artifact.copies) > 1:
        return (
            f"Deletes all {count_of(len(artifact.copies), 'copy', 'copies')} of {artifact.label}."
        )
    return f"This is the last copy of {artifact.label}."
