"""Files of a model that training uses; of several copies of its weights, only one.

Models come with their weights in several formats: Mistral's with `consolidated.safetensors`, others
with `pytorch_model.bin`, GGUF or ONNX files, or folders such as `original`. Each copy may have
hundreds of gigabytes. So only the files that Transformers would load are sent, downloaded, hashed
and counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG = "config.json"
MODEL_SUFFIXES = frozenset({".safetensors", ".json", ".model", ".txt", ".jinja", ".tiktoken"})
"""Suffixes of a model's files; pickled weights are excluded."""
MAX_INDEX_BYTES = 64 << 20
"""Maximum size of the list of shards, in bytes; that of a model of 90,000 tensors has 9 MB."""
_SHARD, _LIST = ".safetensors", ".safetensors.index.json"
Read = Callable[[str], bytes | None]
"""Function that returns the content of a small file; None: it cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UsedFiles:
    """Files of a model that training uses."""

    names: frozenset[str]
    """Files of the folder, weights included."""
    weights: frozenset[str]
    """Weights, also missing ones; empty: there is no usable set."""

    @property
    def is_whole(self) -> bool:
        """True if all weights are there."""
        return bool(self.weights) and self.weights <= self.names


def choose_files(names: Iterable[str], read: Read) -> UsedFiles:
    """Choose the used files of a folder or of a repository of the hub.

    Args:
        names: paths relative to it.
        read: reads its config and its list of shards.

    >>> names = ["config.json", "model.safetensors", "consolidated.safetensors", "x.Q8_0.gguf",
    ...     "original/params.json", "pytorch_model.bin.index.json", "tokenizer.json"]
    >>> sorted(choose_files(names, lambda name: None).names)
    ['config.json', 'model.safetensors', 'tokenizer.json']
    """
    # Transformers loads nothing from subfolders.
    there = {name for name in names if "/" not in name and not name.startswith(".")}
    named = _read_object(read, CONFIG).get("transformers_weights") if CONFIG in there else None
    found = find_weights(there, named)
    weights = {found} if found else set()
    if found and found.endswith(_LIST):
        places = _read_object(read, found).get("weight_map") if found in there else None
        shards = places.values() if isinstance(places, dict) else ()
        weights = {name for name in shards if is_plain(name, (_SHARD,))}
    kept = {
        name
        for name in there
        if (name.endswith(tuple(MODEL_SUFFIXES)) and not name.endswith((_SHARD, ".index.json")))
        or name == found
    }
    return UsedFiles(names=frozenset(kept | (weights & there)), weights=frozenset(weights))


def find_weights(names: Iterable[str], named: object) -> str | None:
    """Return the file from which Transformers takes the weights, or the list of such files.

    Args:
        names: files of the model's folder.
        named: `transformers_weights` of its config; None: not set.

    Returns:
        The name; empty: there is no such file; None: the config names no file of the folder.
    """
    if named is None:
        return next((name for name in (WEIGHTS, INDEX) if name in names), "")
    return str(named) if is_plain(named, (_SHARD, _LIST)) else None


def is_plain(name: Any, endings: tuple[str, ...]) -> bool:
    """Return whether a value is the name of a file in the folder itself."""
    if not isinstance(name, str) or not name.endswith(endings) or len(name) > 255:
        return False
    return not name.startswith(".") and not {"/", "\\", "\0", ":"} & set(name)


def _read_object(read: Read, name: str) -> dict[str, Any]:
    """Return the object of a JSON file; empty: it is none, which an inspection reports."""
    try:
        value = json.loads(read(name) or b"{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
