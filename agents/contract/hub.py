"""Where the tools of the Hugging Face hub keep what they fetch, and the token, on this PC.

https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path


def hub_cache(environ: Mapping[str, str]) -> Path:
    """Return the folder where huggingface_hub keeps what it fetched.

    >>> str(hub_cache({"HF_HOME": "/data/hf"}))
    '/data/hf/hub'
    """
    if environ.get("HF_HUB_CACHE"):
        return Path(environ["HF_HUB_CACHE"]).expanduser()
    return hub_home(environ) / "hub"


def find_snapshot(model: str, environ: Mapping[str, str]) -> Path | None:
    """Return the folder of what was fetched last of a hub id; None: nothing was."""
    cached = hub_cache(environ) / f"models--{model.replace('/', '--')}"
    try:
        revision = (cached / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    # Only the last part: the content of a file must not lead out of the cache.
    return cached / "snapshots" / Path(revision).name


def hub_home(environ: Mapping[str, str]) -> Path:
    """Return the folder of the hub's tools.

    >>> str(hub_home({"HOME": "/home/anna"}))
    '/home/anna/.cache/huggingface'
    """
    if environ.get("HF_HOME"):
        return Path(environ["HF_HOME"]).expanduser()
    home = Path(environ.get("HOME") or str(Path.home()))
    # In the order of huggingface_hub, so that both find the same folder.
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else home / ".cache") / "huggingface"


def token_path(environ: Mapping[str, str]) -> Path:
    """Return the file that huggingface_hub reads.

    >>> str(token_path({"HF_HOME": "/data/hf"}))
    '/data/hf/token'
    """
    named = environ.get("HF_TOKEN_PATH")
    return Path(named).expanduser() if named else hub_home(environ) / "token"


def read_token(environ: Mapping[str, str]) -> str:
    """Return the token that the hub's tools would use; empty: there is none."""
    return environ.get("HF_TOKEN", "").strip() or read_file(token_path(environ))


def digest_of(token: str) -> str:
    """Return the SHA-256 of a token, in hex."""
    return hashlib.sha256(token.encode("utf-8")).hexdigest()


def read_file(path: Path) -> str:
    """Return what is in a file of a token; empty: there is none."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""
