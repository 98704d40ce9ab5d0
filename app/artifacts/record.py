"""Register artifacts, from exports and from folders made elsewhere, and look them up.

Reads and hashes files: not for the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from agents.contract.messages import WireError, from_wire
from agents.contract.requests.exports import PROOF_FILE, Origin
from agents.contract.run import FileEntry
from agents.shared.files.folder_files import ForeignFile, read_regular, walk_own
from app.artifact import ArtifactCopy, ArtifactSnapshot
from app.artifacts.bundle import read_artifact, read_verdicts
from app.artifacts.folder_json import read_object
from app.artifacts.merged_card import describe_merged
from app.errors import UserError
from app.library.bundles import Source, make_bundle, refused, safe_name
from app.paths import is_same_folder, whole_path
from app.runs.services import Services
from app.text import show_list

CARD_FILE = "README.md"
LINEAGE_FILE = "rackless.json"
"""File in a merged model with the hashes of its base and data."""
_MAX_CARD_BYTES = 4 << 20
# Of a name, as `safe_name` has it.
_MOST_LETTERS = 60
MODELFILES = "Modelfile-*"
"""Files for Ollama; written on request for serving, so they are not part of the artifact."""


def folder_here(artifact: ArtifactSnapshot) -> Path:
    """Return an artifact's folder on this PC.

    Raises:
        UserError: no whole copy is here.
    """
    folder = artifact.folder()
    if folder is None:
        raise UserError(
            f"{artifact.label} has no whole copy on this PC",
            f"Copy it here: rackless artifacts copy {artifact.label} --to ./FOLDER",
        )
    return Path(folder)


def find_artifact(services: Services, label: str) -> ArtifactSnapshot:
    """Return the artifact `NAME` (its newest version) or `NAME:VERSION`.

    Raises:
        UserError: there is none.
    """
    name, _, version = label.partition(":")
    for one in services.artifacts.versions(name):
        if not version or str(one.version) == version:
            return one
    known = {one.name for one in services.artifacts.all()}
    raise UserError(
        f"there is no artifact {label}",
        f"There are {show_list(sorted(known))}." if known else "Make one: rackless export RUN",
    )


def list_artifacts(services: Services, run: str | None) -> tuple[ArtifactSnapshot, ...]:
    """Return all artifacts, or those of a run by its id, the beginning of it, or its name.

    Raises:
        UserError: there is no such run, and none of a run that is deleted.
    """
    every = services.artifacts.all()
    if run is None:
        return every
    found = tuple(one for one in every if one.origin and _is_of(one.origin, run))
    if not found:
        services.runs.get(run)
    return found


def _is_of(origin: Origin, run: str) -> bool:
    return bool(run) and (origin.run_id.startswith(run) or origin.run_name == run)


def record_export(
    services: Services,
    folder: Path,
    to: str,
    types: Sequence[str],
    origin: Origin,
    measured: Mapping[str, Any] | None = None,
) -> ArtifactSnapshot:
    """Register the result of an export in `folder`, with the figures in its files.

    Args:
        types: that were asked for; its proof says what it has.
        measured: what is kept beside that which the job has measured itself.
    """
    told = _read_about(folder)
    own = told.pop("measured") or _read_json(folder / LINEAGE_FILE).get("measured") or {}
    told["measured"] = {**own, **(measured or {})} or None
    traced = told.pop("origin") or _trace(folder, origin)
    if (folder / PROOF_FILE).exists():
        with suppress(UserError):  # a proof that says nothing
            types = read_artifact(folder).types
    card = folder / CARD_FILE
    if to == "merged" and not card.exists():
        card.write_text(describe_merged(traced), encoding="utf-8")
    found = ArtifactSnapshot(
        name=_name(origin, to),
        version=0,
        format=to,
        types=tuple(types),
        origin=traced,
        size_bytes=0,
        created_s=time.time(),
        **told,
    )
    return _enter(services, found, folder)


def _name(origin: Origin, to: str) -> str:
    """Return the usual name: of the run, and all of the format, however long the run's is.

    >>> origin = Origin(base="b", data="d", run_id="2026-x", run_name="p" * 80, step=1)
    >>> _name(origin, "awq") == "p" * 56 + "-awq", _name(replace(origin, run_name="\\u8bd7"), "awq")
    (True, '2026-x-awq')
    """
    is_plain = any(letter.isascii() and letter.isalnum() for letter in origin.run_name)
    run = origin.run_name if is_plain else origin.run_id
    whole = safe_name(f"{run}-{to}")
    cut = safe_name(run)[: _MOST_LETTERS - len(to) - 1].rstrip(".-_")
    return whole if whole.endswith(f"-{to}") else f"{cut}-{to}"


def add_folder(services: Services, folder: Path, name: str | None = None) -> ArtifactSnapshot:
    """Register a folder that was made elsewhere, or moved: then it is a copy of a known one.

    Args:
        folder: that an export made, on this PC or another.
        name: of an artifact that is not known yet; None: that of its run, else of the folder.

    Raises:
        UserError: it is no artifact.
    """
    try:
        folder = whole_path(folder)
    except OSError as error:
        raise UserError(
            f"{folder} is not a usable path: {error.strerror}", "Name a folder."
        ) from error
    kind = read_artifact(folder)
    told = _read_about(folder)
    origin = told["origin"]
    usual = _name(origin, kind.method) if origin else safe_name(folder.name)
    found = ArtifactSnapshot(
        name=safe_name(name) if name else usual,
        version=0,
        format=kind.method,
        types=kind.types,
        size_bytes=0,
        created_s=folder.stat().st_mtime,
        **told,
    )
    return _enter(services, found, folder)


def bundle_whole(services: Services, name: str, folder: Path) -> Source:
    """Return all files of a folder that are of the artifact, with their hashes.

    Modelfiles are not, which `write_modelfile` puts there, nor is what is hidden, which is left by
    file managers and the hub's tools.
    """
    try:
        files = list(walk_own(folder, lambda name: True))
    except ForeignFile as error:
        raise refused(error) from error
    except OSError as error:
        raise UserError(
            f"{folder} cannot be read: {error.strerror}", "Repair its permissions."
        ) from error
    own = [path for path in files if not (path.parent == folder and path.match(MODELFILES))]
    return make_bundle("artifacts", name, folder, own, services.hashes)


def _enter(services: Services, found: ArtifactSnapshot, folder: Path) -> ArtifactSnapshot:
    files = bundle_whole(services, found.name, folder).files
    now_s = time.time()
    copy = ArtifactCopy(kind="folder", place=str(folder), made_s=now_s, checked_s=now_s)
    known = services.artifacts.find_content(files) if files else None
    if known is None:
        size = sum(entry.size_bytes for entry in files)
        return services.artifacts.add(replace(found, files=files, size_bytes=size, copies=(copy,)))
    there = [Path(one.place) for one in known.copies if one.kind == "folder"]
    same = next((one for one in there if is_same_folder(one, folder)), folder)
    services.artifacts.save_copy(known, replace(copy, place=str(same)))
    return find_artifact(services, known.label)


def _read_about(folder: Path) -> dict[str, Any]:
    """Return the proof in a folder as fields of a snapshot."""
    about = _read_json(folder / PROOF_FILE)
    try:
        origin = from_wire(Origin, about["origin"]) if about else None
    except (WireError, KeyError):
        origin = None
    proofs = about.get("proofs", ())
    runtimes = [str(one["runtime"]) for one in proofs if "runtime" in one]
    return {
        "origin": origin,
        "verdicts": read_verdicts(folder),
        "runtimes": tuple(dict.fromkeys(runtimes)),
        "measured": about.get("measured"),
    }


def _trace(folder: Path, origin: Origin) -> Origin:
    """Return the origin of a merged model, with the hashes that lie beside it."""
    found = _read_json(folder / LINEAGE_FILE)
    base, data = found.get("base_sha256"), found.get("data_sha256")
    return replace(origin, base_sha256=base, data_sha256=data)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_object(path.parent, path.name)
    except (OSError, ValueError):
        return {}


def read_card(artifact: ArtifactSnapshot) -> str:
    """Return the card of a copy on this PC; empty: there is none."""
    folder = artifact.folder()
    if folder is None:
        return ""
    try:
        card = Path(folder, CARD_FILE)
        return read_regular(card, card.parent, _MAX_CARD_BYTES).decode("utf-8")
    except (OSError, ValueError):
        return ""


def missing_files(folder: Path, files: Sequence[FileEntry]) -> list[str]:
    """Return the files that are not in a folder, or have another size; reads no contents."""
    found = []
    for entry in files:
        try:
            same = (folder / entry.path).stat().st_size == entry.size_bytes
        except OSError:
            same = False
        if not same:
            found.append(entry.path)
    return found


def look_at_folders(
    artifact: ArtifactSnapshot, nodes: Collection[str] | None = None
) -> ArtifactSnapshot:
    """Return it with the current state of its folders on this PC, by file names and sizes.

    Args:
        artifact: as it is remembered.
        nodes: that are known; nothing can be had from others. None: all are.
    """
    copies = tuple(_look(artifact, one, nodes) for one in artifact.copies)
    return replace(artifact, copies=copies)


def _look(
    artifact: ArtifactSnapshot, copy: ArtifactCopy, nodes: Collection[str] | None
) -> ArtifactCopy:
    if copy.kind == "node" and nodes is not None and copy.place not in nodes:
        return replace(copy, state="missing", problem="it is no longer a node")
    if copy.kind != "folder" or not artifact.files:
        return copy
    gone = missing_files(Path(copy.place), artifact.files)
    if not gone:
        is_back = copy.state == "missing"
        return replace(copy, state="whole", problem="") if is_back else copy
    if len(gone) == len(artifact.files):
        return replace(copy, state="missing", problem="it was moved or deleted")
    return replace(copy, state="damaged", problem=f"{show_list(gone[:3])} missing or changed")
