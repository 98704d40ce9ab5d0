"""Register artifacts, from exports and from folders made elsewhere, and find them by name.

The functions read and hash files, so they must not run on the event loop.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from agents.contract.messages import WireError, from_wire
from agents.contract.requests.exports import PROOF_FILE, Origin, card_code, card_licence, card_text
from agents.contract.run import FileEntry
from agents.shared.files.folder_files import ForeignFile, read_regular, walk_own
from app.artifact import ArtifactCopy, ArtifactSnapshot
from app.artifacts.bundle import read_artifact, read_verdicts
from app.artifacts.folder_json import read_object
from app.errors import UserError
from app.library.bundles import Source, make_bundle, refused, safe_name
from app.paths import is_same_folder, whole_path
from app.runs.services import Services
from app.shell_words import command_here
from app.text import show_list

CARD_FILE = "README.md"
LINEAGE_FILE = "rackless.json"
"""File in a merged model with the hashes of its base and data."""
_MAX_CARD_BYTES = 4 << 20
# Maximum length of a name, as in `safe_name`.
_MOST_LETTERS = 60
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
MODELFILES = "Modelfile-*"
"""Files for Ollama; written on request for serving, so they are not part of the artifact."""


def folder_here(artifact: ArtifactSnapshot) -> Path:
    """Return an artifact's folder on this PC.

    Raises:
        UserError: this PC has no whole copy.
    """
    folder = artifact.folder()
    if folder is None:
        raise UserError(
            f"{artifact.label} has no whole copy on this PC",
            "Copy it here: "
            + command_here("rackless", "artifacts", "copy", artifact.label, "--to", "./FOLDER"),
        )
    return Path(folder)


def find_artifact(services: Services, label: str) -> ArtifactSnapshot:
    """Return the artifact `NAME` (its newest version) or `NAME:VERSION`.

    Raises:
        UserError: there is no such artifact.
    """
    name, _, version = label.partition(":")
    for one in services.artifacts.versions(name):
        if not version or str(one.version) == version:
            return one
    known = {artifact.name for artifact in services.artifacts.all()}
    raise UserError(
        f"there is no artifact {label}",
        f"There are {show_list(sorted(known))}." if known else "Make one: rackless export RUN",
    )


def list_artifacts(services: Services, run: str | None) -> tuple[ArtifactSnapshot, ...]:
    """Return all artifacts, or those of a run by its id, a prefix of its id, or its name.

    Raises:
        UserError: there is no such run, and no artifact of a deleted run matches.
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
        types: requested types, if its proof does not name the actual ones.
        measured: figures to store in addition to those that the job measured.
    """
    about = _read_about(folder)
    own = about.pop("measured") or _read_json(folder / LINEAGE_FILE).get("measured") or {}
    about["measured"] = {**own, **(measured or {})} or None
    traced = about.pop("origin") or _trace(folder, origin)
    if (folder / PROOF_FILE).exists():
        with suppress(UserError):  # the proof is not usable
            types = read_artifact(folder).types
    card = folder / CARD_FILE
    if to == "merged" and not card.exists():
        card.write_text(_describe_merged(traced), encoding="utf-8")
    found = ArtifactSnapshot(
        name=_name(origin, to),
        version=0,
        format=to,
        types=tuple(types),
        origin=traced,
        size_bytes=0,
        created_s=time.time(),
        **about,
    )
    return _enter(services, found, folder)


def _describe_merged(origin: Origin) -> str:
    """Return the card of a merged model as Markdown; nothing is measured, since nothing is lost.

    >>> origin = Origin(base="org/base", data="x.jsonl", run_id="r", run_name="poems", step=4)
    >>> _describe_merged(origin).splitlines()[1]
    'base_model: org/base'
    """
    base = f"base_model: {origin.base}\n" if _HUB_ID.fullmatch(origin.base) else ""
    licence = card_licence(origin.licence)
    return (
        f"---\n{base}{licence}tags: [rackless, merged]\n---\n"
        f"# {card_text(origin.run_name)}, merged\n\n"
        f"Step {origin.step} of run `{origin.run_id}`, merged into its base model. Values are "
        "rounded only to the base's own precision.\n\n"
        f"- Base: {card_code(origin.base)}, sha256 {card_code(origin.base_sha256 or '-')}\n"
        f"- Trained on: {card_code(origin.data)}, sha256 {card_code(origin.data_sha256 or '-')}\n"
        f"- Licence of the base: {card_text(origin.licence or 'not known')}\n"
    )


# ------------------------------------------------------------------------


def _name(origin: Origin, to: str) -> str:
    """Return the default name: that of the run, truncated so that the format always fits.

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
    """Register a folder made elsewhere, or a known artifact's moved folder as another copy.

    Args:
        folder: folder that an export made, on this PC or another.
        name: name for a new artifact; None: that of its run, else of the folder.

    Raises:
        UserError: the folder is not an artifact.
    """
    try:
        folder = whole_path(folder)
    except OSError as error:
        raise UserError(
            f"{folder} is not a usable path: {error.strerror}", "Name a folder."
        ) from error
    kind = read_artifact(folder)
    about = _read_about(folder)
    origin = about["origin"]
    usual = _name(origin, kind.method) if origin else safe_name(folder.name)
    found = ArtifactSnapshot(
        name=safe_name(name) if name else usual,
        version=0,
        format=kind.method,
        types=kind.types,
        size_bytes=0,
        created_s=folder.stat().st_mtime,
        **about,
    )
    return _enter(services, found, folder)


def bundle_whole(services: Services, name: str, folder: Path) -> Source:
    """Return the artifact's files in a folder, with their hashes."""
    # Not hidden files, left by file managers and the hub's tools, nor the Modelfiles that
    # `write_modelfile` adds later.
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
    # Keep the known spelling of a folder, so that a second path to it adds no second copy.
    folders = [Path(other.place) for other in known.copies if other.kind == "folder"]
    same = next((other for other in folders if is_same_folder(other, folder)), folder)
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
    runtimes = [str(proof["runtime"]) for proof in proofs if "runtime" in proof]
    return {
        "origin": origin,
        "verdicts": read_verdicts(folder),
        "runtimes": tuple(dict.fromkeys(runtimes)),
        "measured": about.get("measured"),
    }


def _trace(folder: Path, origin: Origin) -> Origin:
    """Return the origin of a merged model with the hashes from its lineage file."""
    found = _read_json(folder / LINEAGE_FILE)
    base, data = found.get("base_sha256"), found.get("data_sha256")
    return replace(origin, base_sha256=base, data_sha256=data)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_object(path.parent, path.name)
    except (OSError, ValueError):
        return {}


def read_card(artifact: ArtifactSnapshot) -> str:
    """Return the card of a copy on this PC; empty: no copy or no card."""
    folder = artifact.folder()
    if folder is None:
        return ""
    try:
        card = Path(folder, CARD_FILE)
        return read_regular(card, card.parent, _MAX_CARD_BYTES).decode("utf-8")
    except (OSError, ValueError):
        return ""


def missing_files(folder: Path, files: Sequence[FileEntry]) -> list[str]:
    """Return the files that are missing in a folder or have another size; reads no contents."""
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
    """Return an artifact with the current state of its folders, by file names and sizes.

    Args:
        artifact: artifact as stored.
        nodes: names of the nodes; copies on others are missing. None: trust all.
    """
    copies = tuple(_look(artifact, copy, nodes) for copy in artifact.copies)
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
