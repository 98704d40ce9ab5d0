"""Write locks: cut what a resolver found down to the systems of Rackless, and to wheels.

`installers/lock.py` writes the locks that ship with it, and a master the one of a build of torch
that does not ship. A package is a table as in PEP 751: `name`, `version`, perhaps a `marker`, and
`wheels` or an `sdist` with their `hashes`. A source package runs code while it is built, so it is
locked only where its release has no wheel, and stands in the lock by name (`--no-binary`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.markers import Marker, default_environment
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

from agents.contract.wheel_tags import SUPPORTED_PYTHONS

NEWEST_GLIBC = 41
"""Newest glibc 2.x whose wheels are accepted; pip itself refuses what is too new for a PC."""
LINUX_MACHINES = ("x86_64", "aarch64")
COOLING_OFF = timedelta(days=7)
"""Minimum age of a release that no limit names: most hijacked ones are found within days."""


class NoWheel(Exception):
    """A package has no file that a lock may name."""


def environment_of(
    version: tuple[int, int], machine: str, platform: str = "linux", system: str = "Linux"
) -> dict[str, Any]:
    """Return the marker variables of a Python on a kind of PC."""
    variables: dict[str, Any] = dict(default_environment())
    variables["sys_platform"], variables["platform_system"] = platform, system
    variables["platform_machine"] = machine
    variables["os_name"] = "nt" if platform == "win32" else "posix"
    variables["python_version"] = f"{version[0]}.{version[1]}"
    variables["python_full_version"] = f"{version[0]}.{version[1]}.0"
    return variables


def environments(windows: bool) -> list[dict[str, Any]]:
    """Return the marker variables of every system and Python that a lock is for."""
    made = [environment_of(v, machine) for machine in LINUX_MACHINES for v in SUPPORTED_PYTHONS]
    if windows:
        made += [environment_of(v, "AMD64", "win32", "Windows") for v in SUPPORTED_PYTHONS]
    return made


def marker_for(text: str | None, windows: bool) -> str | None:
    """Return the marker that a lock needs: empty where it always holds; None: it never does."""
    if text is None:
        return ""
    marker = Marker(text)
    holds = {marker.evaluate(one) for one in environments(windows)}
    return (text if False in holds else "") if True in holds else None


def supported_tags(windows: bool) -> frozenset[Tag]:
    """Return the tags of all wheels that some supported PC takes."""
    platforms: list[str] = ["win_amd64"] if windows else []
    for machine in LINUX_MACHINES:
        platforms += [f"manylinux_2_{minor}_{machine}" for minor in range(5, NEWEST_GLIBC + 1)]
        platforms += [f"manylinux2014_{machine}", f"linux_{machine}"]
    platforms += ["manylinux1_x86_64", "manylinux2010_x86_64"]
    tags: set[Tag] = set()
    for version in SUPPORTED_PYTHONS:
        interpreter = f"cp{version[0]}{version[1]}"
        tags.update(cpython_tags(version, [interpreter], platforms))
        tags.update(compatible_tags(version, interpreter, platforms))
    return frozenset(tags)


def hashes_of(package: dict[str, Any], tags: frozenset[Tag]) -> tuple[list[str], bool]:
    """Return the SHA-256 of each file that may be installed, and whether it is a source package.

    Raises:
        NoWheel: there is neither a wheel for any supported PC nor a source package.
    """
    wheels: list[dict[str, Any]] = package.get("wheels", [])
    fitting = [file for file in wheels if parse_wheel_filename(_file_name(file))[3] & tags]
    if fitting:
        return sorted({file["hashes"]["sha256"] for file in fitting}), False
    if wheels or "sdist" not in package:
        raise NoWheel(f"{package['name']} {package['version']} has no wheel for our systems")
    return [package["sdist"]["hashes"]["sha256"]], True


def _file_name(file: dict[str, Any]) -> str:
    """Return the name of a wheel: its own, or the end of its address."""
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
        about: lines of its head.
        packages: what a resolver found, for all systems at once.
        windows: whether it is for Windows, too.
        elsewhere: says of a package by its name that another lock brings it.

    Raises:
        NoWheel: a package has no file for any supported PC.
    """
    tags = supported_tags(windows)
    sources: list[str] = []
    entries: list[str] = []
    for package in sorted(packages, key=lambda package: str(package["name"])):
        name = package["name"]
        marker = marker_for(package.get("marker"), windows)
        if marker is None or elsewhere(name):
            continue
        hashes, is_source = hashes_of(package, tags)
        sources += [name] if is_source else []
        pin = f"{name}=={package['version']}" + (f" ; {marker}" if marker else "")
        entries.append(" \\\n".join([pin, *(f"    --hash=sha256:{one}" for one in hashes)]))
    head = [f"# {line}".rstrip() for line in about]
    built = [f"--no-binary {name}" for name in sources]
    return "\n".join([*head, *built, *entries]) + "\n"
