"""A lock: each package of an environment in one version, with the hashes of its possible files.

It is a requirements file of pip and uv in its strictest form. Nothing else is accepted: no address,
no option, no package without a version and a hash. `--no-binary NAME` marks a package without
wheels, which is built from source.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.version import Version

_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9.+!_-]*)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_SOURCE = re.compile(r"--no-binary[ =]([A-Za-z0-9][A-Za-z0-9._-]*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class LockedPackage:
    name: str
    version: str
    marker: str
    """Environment marker that limits where it is installed; empty: everywhere."""
    hashes: tuple[str, ...]
    """SHA-256 of each file that may be installed."""

    @property
    def key(self) -> tuple[str, Version]:
        """Normalized name and version, as in the names of its wheels.

        Raises:
            ValueError: the version is not one of PEP 440.
        """
        from packaging.utils import canonicalize_name  # slow, and rarely needed
        from packaging.version import Version

        return canonicalize_name(self.name), Version(self.version)

    @property
    def line(self) -> str:
        """The package as one line of a requirements file."""
        marker = f" ; {self.marker}" if self.marker else ""
        hashes = " ".join(f"--hash=sha256:{digest}" for digest in self.hashes)
        return f"{self.name}=={self.version}{marker} {hashes}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Lock:
    packages: tuple[LockedPackage, ...]
    sources: tuple[str, ...] = ()
    """Names of packages that are built from source."""

    @property
    def text(self) -> str:
        """Text of the lock without comments, one package per line."""
        lines = [f"--no-binary {name}" for name in self.sources]
        lines += [package.line for package in self.packages]
        return "".join(f"{line}\n" for line in lines)


def read_lock_text(text: str) -> Lock:
    """Parse a lock.

    Raises:
        ValueError: a line has another form, a package has no hash, or a name is repeated.

    >>> lock = read_lock_text("b==2 \\\\\\n    --hash=sha256:" + 64 * "0" + "\\n# why\\n")
    >>> lock.packages[0].name, lock.packages[0].version, len(lock.packages[0].hashes)
    ('b', '2', 1)
    """
    packages: dict[str, LockedPackage] = {}
    sources: list[str] = []
    for number, line in _logical_lines(text):
        source = _SOURCE.fullmatch(line)
        if source is not None:
            sources.append(source[1])
            continue
        package = _read_package(number, line)
        if package.name in packages:
            raise ValueError(f"line {number} of the lock names {package.name} again")
        packages[package.name] = package
    return Lock(packages=tuple(packages.values()), sources=tuple(sources))


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Return the logical lines with their first line's number, without comments and
    continuations.
    """
    lines: list[tuple[int, str]] = []
    begun, start = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        # A `#` within a word belongs to it, as in pip.
        line = re.sub(r"(^|\s)#.*", "", raw).strip()
        start = start if begun else number
        if line.endswith("\\"):
            begun += line[:-1] + " "
            continue
        if (begun + line).strip():
            lines.append((start, " ".join((begun + line).split())))
        begun = ""
    return [*lines, (start, begun.strip())] if begun.strip() else lines


def _read_package(number: int, line: str) -> LockedPackage:
    before, _, marker = line.partition(" --hash")[0].partition(";")
    pin = _PIN.fullmatch(before.strip())
    if pin is None:
        raise ValueError(f"line {number} of the lock is {line[:80]!r}; it must be name==version")
    words = line[line.find(" --hash") :].split() if " --hash" in line else []
    hashes = [_HASH.fullmatch(word) for word in words]
    if not hashes or None in hashes:
        what = "has no --hash=sha256:... of its files" if not hashes else "has a wrong --hash"
        raise ValueError(f"line {number} of the lock: {pin[1]}=={pin[2]} {what}")
    return LockedPackage(
        name=pin[1],
        version=pin[2],
        marker=marker.strip(),
        hashes=tuple(match[1] for match in hashes if match),
    )
