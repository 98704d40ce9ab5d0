"""Write locks: reduce a resolver's result to the systems of Rackless, and to wheels.

`installers/lock.py` writes the locks that ship with it, and a master the lock of a torch build that
does not ship. A package is a table as in PEP 751: `name`, `version`, an optional `marker`, and
`wheels` or an `sdist` with their `hashes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any
from urllib.parse import unquote, urlsplit

from agents.contract.wheel_target import SUPPORTED_PYTHONS, WheelTarget
from agents.shared.packages.wheel_fit import marker_holds, rank_wheel, read_wheel_name

NEWEST_GLIBC = 41
"""Newest glibc 2.x whose wheels are accepted; pip itself refuses wheels too new for a PC."""
LINUX_MACHINES = ("x86_64", "aarch64")
COOLING_OFF = timedelta(days=7)
"""Minimum age of a release that is not pinned; most hijacked releases are found within days."""


class NoWheel(Exception):
    """A package has no file that a lock may name."""


def lock_targets(windows: bool) -> tuple[WheelTarget, ...]:
    """Return each system and Python that a lock supports."""
    machines = (*LINUX_MACHINES, "AMD64") if windows else LINUX_MACHINES
    return tuple(
        WheelTarget(python=f"{major}.{minor}.0", machine=machine, glibc=f"2.{NEWEST_GLIBC}")
        for machine in machines
        for major, minor in SUPPORTED_PYTHONS
    )


def marker_for(text: str | None, windows: bool) -> str | None:
    """Return the marker that a lock needs: empty if it always holds, None if it never does."""
    if text is None:
        return ""
    # Evaluated for each target, so that a marker which is always or never true is dropped.
    holds = {marker_holds(text, target) for target in lock_targets(windows)}
    return (text if False in holds else "") if True in holds else None


def hashes_of(package: dict[str, Any], windows: bool) -> tuple[list[str], bool]:
    """Return the SHA-256 of each installable file, and True if it is a source package.

    Raises:
        NoWheel: there is neither a wheel for any supported PC nor a source package.
    """
    wheels: list[dict[str, Any]] = package.get("wheels", [])
    targets = lock_targets(windows)
    fitting = [
        file
        for file in wheels
        if (wheel := read_wheel_name(_file_name(file)))
        and any(rank_wheel(wheel[2], target) is not None for target in targets)
    ]
    if fitting:
        return sorted({file["hashes"]["sha256"] for file in fitting}), False
    # A source package runs code while it is built, so it is locked only if its release has no
    # wheel, and named in the lock (`--no-binary`).
    if wheels or "sdist" not in package:
        raise NoWheel(f"{package['name']} {package['version']} has no wheel for our systems")
    return [package["sdist"]["hashes"]["sha256"]], True


def _file_name(file: dict[str, Any]) -> str:
    """Return the name of a wheel: its own, or the end of its URL."""
    return str(file.get("name") or unquote(urlsplit(file["url"]).path.rsplit("/", 1)[1]))


def lock_text(
    about: Iterable[str],
    packages: Iterable[dict[str, Any]],
    *,
    windows: bool = False,
    elsewhere: Callable[[str], bool] = lambda name: False,
) -> str:
    """Return the text of a lock file, which is a requirements file of pip and uv.

    Args:
        about: lines of the header.
        packages: result of a resolver, for all systems at once.
        windows: True if the lock also supports Windows.
        elsewhere: predicate for names of packages that another lock installs.

    Raises:
        NoWheel: a package has no file for any supported PC.
    """
    sources: list[str] = []
    entries: list[str] = []
    for package in sorted(packages, key=lambda package: str(package["name"])):
        name = package["name"]
        marker = marker_for(package.get("marker"), windows)
        if marker is None or elsewhere(name):
            continue
        hashes, is_source = hashes_of(package, windows)
        sources += [name] if is_source else []
        pin = f"{name}=={package['version']}" + (f" ; {marker}" if marker else "")
        entries.append(" \\\n".join([pin, *(f"    --hash=sha256:{one}" for one in hashes)]))
    head = [f"# {line}".rstrip() for line in about]
    built = [f"--no-binary {name}" for name in sources]
    return "\n".join([*head, *built, *entries]) + "\n"
