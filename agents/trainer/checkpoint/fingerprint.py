"""Hashes of the inputs of training: the model's files and the spec.

Reading and hashing a model of 14 GB takes about ten seconds, so each file's hash is cached in the
agent's home with its size and modification time, and a thread hashes while the model loads.
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from agents.contract.run_layout import MANIFEST_FILE
from agents.contract.spec import RunSpec, run_keys
from agents.contract.wire import to_wire
from agents.errors import ExpectedError, explain_os_error
from agents.file_hashes import hash_cached
from agents.shared.files.folder_files import list_own
from agents.shared.models.used_files import list_used

_MODEL_FILES = (".safetensors", ".json", ".jinja", ".model", ".txt")
# Files that change without the model; a manifest belongs to a bundle or a checkpoint.
_NOT_THE_MODEL = ("README", "LICENSE", MANIFEST_FILE, "generation_config.json")


def hash_model(folder: Path, memory: Path | None, *, copies: bool = False) -> str:
    """Return the sha256 over names and hashes of the model's files.

    Args:
        folder: folder of the model.
        memory: folder that caches hashes of files; None for no cache.
        copies: True to count copies of the weights, too, as versions up to 0.2.0 did.

    Raises:
        ExpectedError: a file cannot be read, or config.json is missing.
    """
    # Only the folder itself, since Transformers loads nothing from its subfolders.
    try:
        found = list_own(folder, _is_of_model) if copies else list_used(folder)
        names = [path.name for path in found if _is_of_model(path.name)]
    except OSError as error:
        raise explain_os_error(error, f"looking through {folder}") from error
    if "config.json" not in names:
        raise ExpectedError(
            f"{folder} holds no model: config.json is missing.",
            "Give a folder as Transformers saves it, with config.json and model.safetensors",
        )
    # hashlib releases the interpreter lock, so threads hash in parallel.
    with ThreadPoolExecutor(max_workers=4) as pool:
        hashes = list(pool.map(lambda name: hash_cached(folder / name, memory), names))
    lines = [f"{name} {sha256}\n" for name, sha256 in zip(names, hashes, strict=True)]
    return hashlib.sha256("".join(lines).encode("utf-8")).hexdigest()


def hash_like(folder: Path, memory: Path | None, found: str, saved: str) -> str:
    """Return the hash that an earlier version saved if it is of this model, else `found`.

    Args:
        folder: folder of the model.
        memory: folder that caches hashes of files; None for no cache.
        found: hash of the model now.
        saved: hash in a checkpoint.
    """
    is_same = found == saved or hash_model(folder, memory, copies=True) == saved
    return saved if is_same else found


def _is_of_model(name: str) -> bool:
    return Path(name).suffix in _MODEL_FILES and not name.startswith(_NOT_THE_MODEL)


def fixed_part(spec: RunSpec) -> dict[str, Any]:
    """Return the part of a spec that affects the trained numbers, as plain values."""
    plain: dict[str, Any] = {}
    for key in run_keys().values():
        value = key.value_in(spec)
        # Keys of later versions count only with another value, so old checkpoints keep their hash.
        if key.about.may_change or (key.about.is_later and value == key.default):
            continue
        section, _, name = key.name.rpartition(".")
        (plain.setdefault(section, {}) if section else plain)[name] = to_wire(value)
    for name in ("ignore_columns", "columns"):
        if columns := plain["data"].get(name):
            plain["data"][name] = sorted(columns)  # their order has no effect
    for source in plain["data"].get("sources", ()):
        del source["path"]  # the content has a hash of its own
    if spec.data.held_out is not None:  # decides which rows are trained
        plain["data"]["eval"] = spec.data.eval
    return plain


def hash_spec(spec: RunSpec) -> str:
    """Return the sha256 of the part of a spec that affects the trained numbers."""
    text = json.dumps(fixed_part(spec), sort_keys=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def name_differences(then: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Return a phrase for each key that differs, such as `seed was 1 and is 2`."""
    phrases: list[str] = []
    for key in sorted(set(then) | set(now)):
        old, new = then.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            phrases += name_differences(old, new, f"{prefix}{key}.")
        elif old != new:
            phrases.append(f"{prefix}{key} was {old!r} and is {new!r}")
    return phrases
