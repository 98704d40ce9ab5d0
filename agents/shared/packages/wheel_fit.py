"""Wheels that fit an interpreter of any PC, and environment markers of a lock.

`packaging` decides both. It travels in the agent's archive; its functions are imported on use,
since reading them from the archive takes a tenth of a second.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from agents.contract.environments import WheelTarget

if TYPE_CHECKING:
    from packaging.tags import Tag
    from packaging.version import Version

_LEGACY_NAMES = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}
"""Legacy platform name by the minor version of its glibc."""


@functools.lru_cache(maxsize=32)
def supported_tags(target: WheelTarget) -> dict[Tag, int]:
    """Return the rank of each wheel tag that a target accepts; 0 is the best.

    >>> pc = WheelTarget(python="3.12.3", machine="x86_64", glibc="2.39")
    >>> [str(tag) for tag, rank in supported_tags(pc).items() if rank < 2]
    ['cp312-cp312-linux_x86_64', 'cp312-cp312-manylinux_2_39_x86_64']
    """
    from packaging.tags import compatible_tags, cpython_tags

    # The ABI is given, since packaging would use that of the running interpreter.
    python, interpreter = (3, target.minor), f"cp3{target.minor}"
    platforms = _platforms(target)
    tags = [
        *cpython_tags(python, [interpreter], platforms),
        *compatible_tags(python, interpreter, platforms),
    ]
    return {tag: rank for rank, tag in enumerate(tags)}


def _platforms(target: WheelTarget) -> list[str]:
    """Return the platforms of wheels in order of preference, the newest glibc first."""
    machine = target.machine
    if machine == "AMD64":
        return ["win_amd64"]
    major, _, minor = target.glibc.partition(".")
    names = [f"linux_{machine}"]
    # Bounded, since the version comes from another PC and is counted down from.
    is_known = major == "2" and minor.isdecimal() and len(minor) <= 2
    for version in range(int(minor) if is_known else 0, 4, -1):
        legacy = [_LEGACY_NAMES[version]] if version in _LEGACY_NAMES else []
        names += [f"manylinux_2_{version}_{machine}", *(f"{name}_{machine}" for name in legacy)]
    return names


def rank_wheel(tags: Iterable[Tag], target: WheelTarget) -> int | None:
    """Return the rank of a wheel for a target, the best lowest, or None if it does not fit."""
    supported = supported_tags(target)
    return min((supported[tag] for tag in tags if tag in supported), default=None)


def read_wheel_name(file: str) -> tuple[str, Version, frozenset[Tag]] | None:
    """Return normalized name, version and tags of a wheel's file name, or None for another file.

    >>> sorted(map(str, read_wheel_name("tiny_thing-1.5-py2.py3-none-any.whl")[2]))
    ['py2-none-any', 'py3-none-any']
    """
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    try:
        name, version, _, tags = parse_wheel_filename(file)
    except InvalidWheelFilename:
        return None
    return name, version, tags


def marker_variables(target: WheelTarget) -> dict[str, str]:
    """Return the variables of environment markers for a target."""
    is_windows = target.machine == "AMD64"
    return {
        "python_version": f"3.{target.minor}",
        "python_full_version": target.python,
        "implementation_version": target.python,
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "sys_platform": "win32" if is_windows else "linux",
        "platform_system": "Windows" if is_windows else "Linux",
        "platform_machine": target.machine,
        "os_name": "nt" if is_windows else "posix",
    }


def marker_holds(marker: str, target: WheelTarget) -> bool:
    """Return whether a package's environment marker is true for a target; an empty one is.

    Raises:
        ValueError: it is not a marker.

    >>> pc = WheelTarget(python="3.12.3", machine="x86_64", glibc="2.39")
    >>> marker_holds("python_version < '3.13' and platform_machine == 'x86_64'", pc)
    True
    >>> marker_holds("sys_platform == 'win32'", pc)
    False
    """
    if not marker:
        return True
    from packaging.markers import Marker

    try:
        return Marker(marker).evaluate(marker_variables(target), "lock_file")
    except (ValueError, KeyError) as error:
        raise ValueError(f"the marker {marker[:80]!r} cannot be read") from error
