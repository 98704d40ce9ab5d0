"""Find a model's config.json on this PC, in its folder or in the hub's cache.

The hub's cache has `models--ORG--NAME/refs/main`, which names the folder below `snapshots`.
https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agents.contract.hub import find_snapshot
from agents.shared.files.folder_files import ForeignFile, open_regular

MOST_BYTES = 4 << 20
"""Maximum size of a config, in bytes; those of the largest models have about ten thousand."""
MOST_LEVELS = 64
"""Maximum nesting of lists and objects; real configs have fewer than ten levels."""


def find_config(model: str, environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the config of a folder or a hub id, or None if it is not on this PC.

    Raises:
        ValueError: the config cannot be read; the text has the reason.
    """
    folder = os.path.expanduser(model)  # unlike Path.expanduser, it accepts any text
    if os.path.isdir(folder):
        return _read(Path(folder, "config.json"))
    # Not a hub id; and it must not lead out of the cache.
    if os.path.isabs(folder) or model.count("/") > 1 or ".." in model:
        return None
    fetched = find_snapshot(model, environ)
    return _read(fetched / "config.json") if fetched is not None else None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        with open_regular(path, path.parent) as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ValueError(f"{path} has {os.path.getsize(path)} bytes, which is not a config")
        return parse_config(data, str(path))
    except FileNotFoundError:
        return None
    except ForeignFile as error:
        raise ValueError(error.message) from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def parse_config(data: bytes, name: str) -> dict[str, Any]:
    """Return a config from its bytes.

    Raises:
        ValueError: it is not a JSON object.
    """
    try:
        config = json.loads(
            data.decode("utf-8"),  # as Transformers does; `json.loads` guesses UTF-16, too
            object_pairs_hook=_unique,
        )
        _refuse_depth(config)
    except RecursionError as error:
        said = f"its lists and objects are nested more than {MOST_LEVELS} deep"
        raise ValueError(f"{name} is not a config: {said}") from error
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {str(error)[:120]}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{name} is not a JSON object")
    return config


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object without contradictory keys, since programs differ in which value they
    take.
    """
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found and found[key] != value:
            raise ValueError(f"it gives {key[:80]!r} two values")
        found[key] = value
    return found


def _refuse_depth(config: Any) -> None:
    # By level, without recursion, so that the limit does not depend on the interpreter.
    level: list[Any] = [[config]]
    for _ in range(MOST_LEVELS + 1):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [value for values in inner for value in values if isinstance(value, (dict, list))]
        if not level:
            return
    raise RecursionError
