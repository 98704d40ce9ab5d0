"""Find the model that a run file names: a folder on this PC or on the nodes, or a hub id.

Only safetensors weights are sent, since a pickle can run code on every node that opens it.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from agents.contract.spec import RunSpec
from agents.shared.files.folder_files import ForeignFile, name_kind
from agents.shared.models.used_files import list_used, list_weights
from app.errors import UserError
from app.library.bundles import Source, make_bundle, refused
from app.library.model_check import ModelInspector, require_usable
from app.storage.hashes import HashStore
from app.text import shorten

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_NO_FOLDER = "There is no such folder on this PC, and no model of the hub is called so."
_NO_KIND = "This is a pipe, socket or device: name the folder with config.json and the weights."
_A_FILE = "This is a file: name the folder with config.json and the weights."


def find_model(
    name: str,
    hashes: HashStore,
    inspector: ModelInspector | None = None,
    spec: RunSpec | None = None,
) -> Source:
    """Return the source of the model. May read a large model once to hash it.

    Args:
        name: name as in the run file.
        hashes: cached hashes of files.
        inspector: cached inspections of folders; None: no cache.
        spec: spec of the run that trains the model; None: any run.

    Raises:
        UserError: there is no such folder, or it has no model that can be trained.
    """
    path = Path(os.path.expanduser(name))  # Path.expanduser would raise for an unknown user
    missing = explain_missing_model(name)
    if missing == _A_FILE:
        raise UserError(
            f"the model {name} is a file", "Name the folder with config.json and the weights."
        )
    if missing == _NO_KIND:
        raise UserError(
            f"the model {shorten(name)} is {name_kind(path)}, not a folder",
            "Name the folder with config.json and the weights.",
        )
    if missing:
        raise UserError(
            f"there is no model folder {shorten(name)} here, and it is not a hub id",
            "Give the folder's path (relative to the run file), or a hub id such as org/name.",
        )
    if path.is_dir():
        folder = path.absolute()
        files = require_whole(name, inspector or ModelInspector(), spec)
        return make_bundle("models", folder.name, folder, files, hashes)
    return Source(value=name)  # on the hub or on the nodes; each trainer reports if it is missing


def _refuse_private(name: str, folder: Path) -> None:
    """Refuse a folder of programs or of the system, unless it holds weights."""
    from app.library.private_places import HINT, explain_private  # on use: lists do not need it

    private = explain_private(name)
    # Programs keep models in hidden folders, too. Weights prove one; a config.json does not.
    if private and weigh_weights(str(folder)) is None:
        raise UserError(f"{shorten(name)} (model) {private}, so it is not sent", HINT)


def explain_missing_model(name: str) -> str:
    """Return why a name cannot be a model, without opening it; empty: it can."""
    path = Path(os.path.expanduser(name))
    try:
        if path.is_file():
            return _A_FILE
        if path.exists() and not path.is_dir():
            return _NO_KIND
        # An absolute POSIX path may be a folder on the nodes, even if this PC runs Windows.
        if path.is_dir() or name.startswith("/"):
            return ""
    except (OSError, ValueError):  # too long, not valid in a path
        return _NO_FOLDER
    if not name.startswith((".", "~")) and _HUB_ID.fullmatch(name):
        return ""
    return _NO_FOLDER


def find_tokenizer(name: str, hashes: HashStore, inspector: ModelInspector | None = None) -> Source:
    """Return the source of the model's tokenizer; like `find_model` without the weights.

    Raises:
        UserError: there is no such folder, or it has no tokenizer that can be used.
    """
    path = Path(os.path.expanduser(name))
    if explain_missing_model(name) or not path.is_dir():
        return find_model(name, hashes)
    _refuse_private(name, path)
    folder = path.absolute()
    files = [path for path in _list_sent(folder) if path.suffix != ".safetensors"]
    found = (inspector or ModelInspector()).inspect(folder, parts="tokenizer")
    # Data can also be previewed with a model that the run cannot train.
    kinds = ("tokenizer", "config", "adapter")
    broken = [finding for finding in found.findings if finding.kind in kinds]
    require_usable(name, replace(found, findings=tuple(broken)))
    return make_bundle("models", f"{folder.name}-tokenizer", folder, files, hashes)


def _list_sent(folder: Path) -> list[Path]:
    try:
        return list_used(folder)
    except ForeignFile as error:
        raise refused(error) from error
    except OSError as error:
        raise UserError(
            f"{folder} cannot be read: {error.strerror}", "Repair its permissions."
        ) from error


def weigh_weights(name: str) -> int | None:
    """Return the bytes of the weights in a model's folder; None: they are not on this PC."""
    folder = Path(os.path.expanduser(name))  # Path.expanduser would raise for an unknown user
    try:
        sizes = [path.stat().st_size for path in list_weights(folder)]
    except OSError:
        return None
    return sum(sizes) if sizes else None


def require_whole(name: str, inspector: ModelInspector, spec: RunSpec | None = None) -> list[Path]:
    """Check a model's folder and return its files to send.

    Raises:
        UserError: it cannot be trained, or a file is a link out of the folder.
    """
    folder = Path(os.path.expanduser(name)).absolute()
    _refuse_private(name, folder)
    files = _list_sent(folder)
    require_usable(name, inspector.inspect(folder), spec)
    return files
