"""A checkpoint's `manifest.json`: a list of its files, and a hash over the manifest itself.

The hashes in the manifest verify the files, so the manifest itself needs one, too: otherwise a
changed character in the hash of the training data would look like changed training data. Its last
field, `sha256`, is the hash of all bytes before it, so that any changed byte is detected.

Earlier versions wrote only the fields in `_UNSEALED`, without a seal. A manifest with any other
field must be sealed, so that a damaged name of the last field is detected, too.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from agents.contract.json_text import parse_json
from agents.contract.run_layout import MANIFEST_FILE
from agents.contract.wire import WireError
from agents.shared.files.folder_files import read_regular

# Fixed: new fields require a seal.
_UNSEALED = {
    "run_id",
    "attempt",
    "step",
    "created_s",
    "files",
    "spec_sha256",
    "data_sha256",
    "model_sha256",
    "versions",
}
_SEAL = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\Z')


def write_manifest(folder: Path, fields: dict[str, Any]) -> Path:
    """Write the manifest of a checkpoint, sealed with its own hash; return its path.

    Raises:
        OSError: the disk is full or refuses.
    """
    # The seal is added as text, because it covers the exact bytes before it.
    head = json.dumps(fields, indent=1).removesuffix("\n}").encode("ascii")
    seal = f',\n "sha256": "{hashlib.sha256(head).hexdigest()}"\n}}'
    path = folder / MANIFEST_FILE
    path.write_bytes(head + seal.encode("ascii"))
    return path


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the fields of a checkpoint's manifest, without its own hash.

    Raises:
        WireError: the manifest is missing, not a JSON object, or damaged.
    """
    try:
        data = read_regular(folder / MANIFEST_FILE, folder)
        fields = parse_json(data, finite=False)
    except (OSError, WireError) as error:
        raise WireError("it is missing or not JSON") from error
    if not isinstance(fields, dict):
        raise WireError("it is missing or not JSON")
    found = _SEAL.search(data)
    if found is None:
        is_whole = fields.keys() <= _UNSEALED
    else:
        is_whole = hashlib.sha256(data[: found.start()]).hexdigest() == fields.pop("sha256", "")
    if not is_whole:
        raise WireError("it is not what was written")
    return fields
