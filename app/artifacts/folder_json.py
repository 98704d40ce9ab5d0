"""Read the JSON files of an artifact's folder, which a stranger may have made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agents.contract.json_text import parse_json
from agents.shared.files.folder_files import read_regular


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ValueError: it is not an object, is nested too deeply, or holds numbers out of range.
        OSError: it cannot be read, or is not an ordinary file in the folder.
    """
    # Proofs of diverged runs and configs of Mamba contain NaN and Infinity.
    found = parse_json(read_regular(folder / name, folder), finite=False)
    if not isinstance(found, dict):
        raise ValueError(f"{folder / name} holds no JSON object")
    return found
