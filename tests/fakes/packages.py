"""Tiny packages in a folder that pip is pointed at, and the lines that lock them."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

NO_HASH = "0" * 64


def make_wheel(
    folder: Path,
    name: str = "tiny_thing",
    version: str = "1.5",
    *,
    tag: str = "py3-none-any",
    needs: Sequence[str] = (),
) -> Path:
    """Write the smallest wheel that pip installs: one module named like the package."""
    about = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-{tag}.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {need}\n" for need in needs)
    kind = f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", "VALUE = 7\n")
        wheel.writestr(f"{about}/METADATA", metadata)
        wheel.writestr(f"{about}/WHEEL", kind)
        wheel.writestr(f"{about}/RECORD", "")
    return path


def make_sdist(
    folder: Path, name: str = "tiny_thing", version: str = "1.5", setup: str = ""
) -> Path:
    """Write a source package, whose setup.py first runs `setup`."""
    path = folder / f"{name}-{version}.tar.gz"
    code = f"{setup}\nfrom setuptools import setup\nsetup(name={name!r}, version={version!r})\n"
    files = {
        "setup.py": code,
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
    }
    with tarfile.open(path, "w:gz") as archive:
        for file, text in files.items():
            entry = tarfile.TarInfo(f"{name}-{version}/{file}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return path


def flip_a_bit(path: Path) -> None:
    """Change one bit of a wheel's module, and its checksum in the zip, so that pip can read it."""
    with zipfile.ZipFile(path) as wheel:
        files = {entry.filename: wheel.read(entry) for entry in wheel.infolist()}
    with zipfile.ZipFile(path, "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data.replace(b"VALUE = 7", b"VALUE = 6"))


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def lock_line(name: str, version: str, *hashes: str) -> str:
    """Return a package's line in a lock; without hashes, it gets one that fits no file."""
    return f"{name}=={version} " + " ".join(f"--hash=sha256:{h}" for h in hashes or (NO_HASH,))


def lock_of(*paths: Path) -> str:
    """Return a lock that names these files by their hashes."""
    parts = [path.name.removesuffix(".tar.gz").split("-") for path in paths]
    lines = [
        lock_line(part[0], part[1], sha256_of(path))
        for part, path in zip(parts, paths, strict=True)
    ]
    return "".join(f"{line}\n" for line in lines)
