"""Hashes of what the trained numbers depend on: the model's files and the spec.

Reading and hashing a model of 14 GB takes about ten seconds, so each file's hash is remembered in
the agent's home with its size and time of change, and a thread hashes while the model loads.
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from agents.contract.run_layout import MANIFEST_FILE
from agents.contract.spec import RunSpec
from agents.contract.wire import to_wire
from agents.errors import ExpectedError, explain_os_error
from agents.file_hashes import hash_cached
from agents.shared.files.folder_files import list_own

_MODEL_FILES = (".safetensors", ".json", ".jinja", ".model", ".txt")
# Files that change without the model; a manifest is that of a bundle or of a checkpoint.
_NOT_THE_MODEL = ("README", "LICENSE", MANIFEST_FILE, "generation_config.json")
# Keys of the spec that may differ between the attempts of a run: they change no number, or only
# its last bits. So may the learning rate, with which a run that diverged goes on.
_FREE_TO_CHANGE = (
    "name", "model", "nodes", "parallel", "shares", "rebalance", "checkpoint",
    "recompute", "compile", "exact", "memory_gib", "evaluate_every_steps", "recovery",
    "rejoin", "divergence", "learning_rate",
)  # fmt: skip


def hash_model(folder: Path, memory: Path | None) -> str:
    """Return the sha256 over names and hashes of the files that make the model.

    Args:
        folder: of the model.
        memory: folder that remembers hashes of files; None: none does.

    Raises:
        ExpectedError: a file cannot be read, or there is none.
    """
    # Only the folder itself: Transformers loads nothing from its subfolders.
    try:
        names = [path.name for path in list_own(folder, _is_of_model)]
    except OSError as error:
        raise explain_os_error(error, f"looking through {folder}") from error
    if "config.json" not in names:
        raise ExpectedError(
            f"{folder} holds no model: config.json is missing.",
            "Give a folder as Transformers saves it, with config.json and model.safetensors",
        )
    with ThreadPoolExecutor(max_workers=4) as pool:
        hashes = list(pool.map(lambda name: hash_cached(folder / name, memory), names))
    lines = [f"{name} {sha256}\n" for name, sha256 in zip(names, hashes, strict=True)]
    return hashlib.sha256("".join(lines).encode("utf-8")).hexdigest()


def _is_of_model(name: str) -> bool:
    return Path(name).suffix in _MODEL_FILES and not name.startswith(_NOT_THE_MODEL)


def fixed_part(spec: RunSpec) -> dict[str, Any]:
    """Return the part of a spec that decides the numbers, as plain values."""
    plain: dict[str, Any] = to_wire(spec)
    for key in _FREE_TO_CHANGE:
        del plain[key]
    data = plain["data"]
    plain["data"] = {"format": data["format"]}  # the content has a hash of its own
    if data["ignore_columns"]:  # left out when empty, as in checkpoints of older versions
        plain["data"]["ignore_columns"] = sorted(data["ignore_columns"])
    if spec.activation_bits == 16:  # likewise
        del plain["activation_bits"]
    if not spec.adapter.experts:  # likewise
        del plain["adapter"]["experts"]
    return plain


def hash_spec(spec: RunSpec) -> str:
    """Return the sha256 of what decides the numbers."""
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
