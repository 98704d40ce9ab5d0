"""Find the versions and files of a build of torch and of all that it needs, for its lock.

Where Rackless is developed, uv resolves. A user's PC may have none, as on Windows, and pip may be
set up with mirrors that uv does not read. So this asks the same indexes in the same order as the
fetching of the wheels does. torch pins almost all that it needs, so the newest version that all
limits allow is taken, and limits that contradict each other are an error, not a search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from agents.contract.wheel_target import WheelTarget
from agents.shared.packages.package_index import IndexedFile, PackageIndex
from agents.shared.packages.wheel_fit import marker_variables, rank_wheel, read_wheel_name
from app.provisioning.lock_text import COOLING_OFF, lock_targets
from app.provisioning.wheel_metadata import requirements_of

_MAX_PASSES = 8
"""Maximum number of times that new limits may change a choice that was made."""


class Unresolvable(Exception):
    """No versions of an index fulfil all that a build needs; the message says which."""


PLACES = lock_targets(windows=False)
"""Pythons and kinds of PC that a build may be for."""


@dataclass
class _Wanted:
    """What has been asked of a package so far, and the version that it got."""

    version: str
    files: list[IndexedFile]
    extras: dict[WheelTarget, frozenset[str]] = field(default_factory=dict)


def resolve_build(
    need: str,
    index: PackageIndex,
    given: Mapping[str, str],
    preferred: Mapping[str, str],
    check_stopped: Callable[[], None],
) -> list[dict[str, Any]]:
    """Return the packages of a build in PEP 751's form, with the hashes that an index names.

    Args:
        need: the build, such as `torch==2.13.0+cu126`.
        index: to ask.
        given: versions that another lock brings, which are not in the result.
        preferred: versions to take where the limits allow several.
        check_stopped: called before each request; raises to end the work.

    Raises:
        IndexUnreachable: an index does not answer.
        Unresolvable: no file has the build, or limits contradict each other.
    """
    return _Resolver(index, given, preferred, check_stopped).resolve(Requirement(need))


class _Resolver:
    def __init__(
        self,
        index: PackageIndex,
        given: Mapping[str, str],
        preferred: Mapping[str, str],
        check_stopped: Callable[[], None],
    ) -> None:
        self._index = index
        self._given = given
        self._preferred = preferred
        self._check_stopped = check_stopped
        self._known: dict[str, list[dict[str, list[IndexedFile]]]] = {}
        self._unread: dict[str, Iterator[list[IndexedFile]]] = {}
        self._requirements: dict[str, tuple[Requirement, ...]] = {}
        self._limits: dict[str, SpecifierSet] = {}

    def resolve(self, need: Requirement) -> list[dict[str, Any]]:
        places = PLACES
        for _ in range(_MAX_PASSES):
            before = self._limits
            found, served = self._walk(need, places)
            if served == places and self._limits == before:
                return [_table(name, one, places) for name, one in found.items()]
            places = served
            if not places:
                raise Unresolvable(f"{need} has no files for any kind of PC that Rackless supports")
        raise Unresolvable(f"the versions that {need} needs contradict each other")

    def _walk(
        self, need: Requirement, places: tuple[WheelTarget, ...]
    ) -> tuple[dict[str, _Wanted], tuple[WheelTarget, ...]]:
        """Follow all requirements once; return what was found, and the places that it serves."""
        known, self._limits = self._limits, {}
        found: dict[str, _Wanted] = {}
        served = set(places)
        queue: list[tuple[str, Requirement, WheelTarget]] = [("", need, place) for place in places]
        while queue:
            parent, requirement, place = queue.pop()
            name = canonicalize_name(requirement.name)
            if name in self._given:
                self._compare_given(parent, requirement, self._given[name])
                continue
            limits = self._limits.get(name, SpecifierSet()) & requirement.specifier
            self._limits[name] = limits
            if name not in found:
                found[name] = self._choose(name, limits & known.get(name, SpecifierSet()), parent)
            one = found[name]
            extras = one.extras.get(place, frozenset()) | requirement.extras
            if one.extras.get(place) == extras:
                continue
            one.extras[place] = extras
            file = _best_file(one.files, place)
            if file is None:
                served.discard(place)
                continue
            needed = (r for r in self._requirements_of(file) if _is_needed(r, extras, place))
            queue += [(f"{name}=={one.version}", r, place) for r in needed]
        return found, tuple(place for place in places if place in served)

    def _compare_given(self, parent: str, requirement: Requirement, version: str) -> None:
        if not requirement.specifier.contains(version, prereleases=True):
            raise Unresolvable(f"{parent} needs {requirement}, and Rackless has {version} of it")

    def _choose(self, name: str, limits: SpecifierSet, parent: str) -> _Wanted:
        """Return the version to take of a package: of the first index that has one."""
        for versions in self._versions_of(name):
            fitting = {
                version: kept
                for version, files in versions.items()
                if limits.contains(version)
                and (kept := [one for one in files if _is_exact(limits) or _is_sound(one)])
            }
            if fitting:
                newest = max(fitting, key=Version)
                preferred = self._preferred.get(name, "")
                version = preferred if preferred in fitting else newest
                return _Wanted(version=version, files=fitting[version])
        asked = f", which {parent} needs" if parent else ""
        raise Unresolvable(f"no index has {name}{limits} ready-built with its SHA-256{asked}")

    def _versions_of(self, name: str) -> Iterator[dict[str, list[IndexedFile]]]:
        """Yield the hashed wheels of each index by version; an index is asked once."""
        known = self._known.setdefault(name, [])
        unread = self._unread.setdefault(name, self._index.files_of(name))
        yield from known
        while True:
            self._check_stopped()
            files = next(unread, None)
            if files is None:
                return
            known.append(_by_version(files, name))
            yield known[-1]

    def _requirements_of(self, file: IndexedFile) -> tuple[Requirement, ...]:
        if file.url not in self._requirements:
            self._check_stopped()
            self._requirements[file.url] = requirements_of(self._index, file)
        return self._requirements[file.url]


def _by_version(files: list[IndexedFile], name: str) -> dict[str, list[IndexedFile]]:
    found: dict[str, list[IndexedFile]] = {}
    for file in files:
        wheel = read_wheel_name(file.name)
        if wheel is None or wheel[0] != name or file.sha256 is None:
            continue
        if any(rank_wheel(wheel[2], place) is not None for place in PLACES):
            found.setdefault(str(wheel[1]), []).append(file)
    return found


def _is_needed(requirement: Requirement, extras: frozenset[str], place: WheelTarget) -> bool:
    marker = requirement.marker
    return marker is None or any(
        marker.evaluate({**marker_variables(place), "extra": one}) for one in extras or {""}
    )


def _is_exact(limits: SpecifierSet) -> bool:
    return any(one.operator == "==" and not one.version.endswith("*") for one in limits)


def _is_sound(file: IndexedFile) -> bool:
    """Return whether a file may be taken that no limit names by its very version."""
    if file.is_yanked:
        return False
    try:
        uploaded = datetime.fromisoformat(file.uploaded)
    except ValueError:
        return True  # the index does not say when
    return uploaded.tzinfo is None or datetime.now(UTC) - uploaded >= COOLING_OFF


def _best_file(files: list[IndexedFile], target: WheelTarget) -> IndexedFile | None:
    ranked = [
        (rank, file.name, file)
        for file in files
        if (wheel := read_wheel_name(file.name))
        and (rank := rank_wheel(wheel[2], target)) is not None
    ]
    return min(ranked, key=lambda one: one[:2])[2] if ranked else None


def _table(name: str, one: _Wanted, places: tuple[WheelTarget, ...]) -> dict[str, Any]:
    wheels = [{"name": f.name, "url": f.url, "hashes": {"sha256": f.sha256}} for f in one.files]
    table: dict[str, Any] = {"name": name, "version": one.version, "wheels": wheels}
    marker = _marker_of([place for place in places if place in one.extras], places)
    return table | {"marker": marker} if marker else table


def _marker_of(needed: Sequence[WheelTarget], places: Sequence[WheelTarget]) -> str:
    """Return where a package is needed; empty: everywhere.

    Places without files count as others of their machine do. A PC there gets a clear "no package",
    instead of an environment that lacks one.
    """
    if len(needed) == len(places):
        return ""
    machines = sorted({place.machine for place in needed})
    if len(needed) == sum(place.machine in machines for place in places):
        return " or ".join(f"platform_machine == '{one}'" for one in machines)
    return " or ".join(
        f"platform_machine == '{one.machine}' and python_version == '3.{one.minor}'"
        for one in needed
    )
