"""Pack the agent into one zip file, from the sources that are installed here.

The same sources give the same bytes on every master, so masters of one version share one archive on
a node. It is built at each start, which takes a few milliseconds: less than verifying a stored
copy, and it can never be stale.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import importlib.util
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path

from app.errors import UserError

# Earliest time that a zip can hold; a real one would change the hash at each build.
_FIXED_TIME = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class AgentArchive:
    sha256: str
    data: bytes


def build_archive() -> AgentArchive:
    """Return the archive: `agents`, `packaging`, `pynvml.py`, and `__main__.py` at its root."""
    files = {
        path: source
        for name in ("agents", "packaging")
        for path, source in _package_files(importlib.resources.files(name), name)
    }
    files["__main__.py"] = files["agents/__main__.py"]
    files["pynvml.py"] = _pynvml_source()
    buffer = io.BytesIO()
    # Stored, not deflated: compressed bytes differ between zlib versions, and so would the hash.
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        # In sorted order: a folder lists its files in an order of its own on each file system.
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, _FIXED_TIME)
            entry.create_system = 3  # Unix, even if built on Windows
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, files[name])
    data = buffer.getvalue()
    return AgentArchive(hashlib.sha256(data).hexdigest(), data)


def _package_files(folder: Traversable, name: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        path = f"{name}/{entry.name}"
        if entry.is_dir():
            yield from _package_files(entry, path)
        elif entry.name.endswith(".py"):
            yield path, _with_unix_newlines(entry.read_bytes())


def _pynvml_source() -> bytes:
    spec = importlib.util.find_spec("pynvml")
    if spec is None or spec.origin is None:
        raise UserError(
            "The package nvidia-ml-py is not installed here; nodes need it to read their GPUs",
            "Install it: python -I -m pip install nvidia-ml-py",
        )
    return _with_unix_newlines(Path(spec.origin).read_bytes())


def _with_unix_newlines(source: bytes) -> bytes:
    # A checkout on Windows may have CRLF, which would give the same version another hash.
    return source.replace(b"\r\n", b"\n")
