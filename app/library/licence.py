"""Find the licence of a model in its card: `license` in the front matter of README.md.

https://huggingface.co/docs/hub/model-cards#model-card-metadata
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from agents.contract.hub import find_snapshot
from agents.shared.files.folder_files import open_regular
from app.library.configs import is_hub_id

_CARD = "README.md"
_MAX_BYTES = 1 << 20
_FRONT = re.compile(r"\A---[ \t]*\n(.*?)^---[ \t]*$", re.DOTALL | re.MULTILINE)
# A single licence id, since only that can be copied into another card.
_LICENCE = re.compile(
    r"""^license:[ \t]*(["']?)([A-Za-z0-9][\w.+-]*)\1[ \t]*(?:#.*)?$""", re.MULTILINE
)


def find_licence(model: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Return the licence of a folder, or of a hub id in the cache; None: not known.

    Args:
        model: name of the model as in a run file.
        environ: environment that locates the hub's cache; None: that of this process.
    """
    folder = _find_folder(model, os.environ if environ is None else environ)
    try:
        with open_regular(folder / _CARD, folder) as file:
            card = file.read(_MAX_BYTES).decode("utf-8-sig", "ignore")  # cut within a character
        return read_licence(card.replace("\r\n", "\n"))
    except (OSError, ValueError):
        return None


def read_licence(card: str) -> str | None:
    """Return the licence that a card names; None: it names no licence or several.

    >>> read_licence("---\\nlicense: apache-2.0  # as its base\\n---\\n# Poems")
    'apache-2.0'
    >>> read_licence("# Poems\\nlicense: mit") is None
    True
    """
    front = _FRONT.match(card)
    found = _LICENCE.search(front[1]) if front else None
    return found[2] if found else None


def _find_folder(model: str, environ: Mapping[str, str]) -> Path:
    folder = Path(os.path.expanduser(model))  # Path.expanduser would raise for an unknown user
    if folder.is_dir() or not is_hub_id(model):
        return folder
    return find_snapshot(model, environ) or folder
