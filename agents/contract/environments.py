"""What master and node say to each other while a training environment is built, tried and pruned.

The queries and reports that runs and checks use, too, are in `node.py`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from agents.contract.names import check_name, check_number, check_text

_MAX_BYTES = 2**60
_MAX_KEPT = 10_000

SUPPORTED_PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14))
"""Pythons that the locks have wheels for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WheelTarget:
    """The interpreter and PC that wheels are for."""

    python: str
    """Version of the interpreter, such as `3.12.3`."""
    machine: str
    """Kind of processor, such as `x86_64`; `AMD64` is a PC with Windows."""
    glibc: str
    """Version of glibc, such as `2.39`; empty: another C library."""

    def check_foreign(self) -> None:
        for name in ("python", "machine", "glibc"):
            check_text(name, getattr(self, name))

    @property
    def minor(self) -> int:
        """Second number of the Python's version.

        >>> WheelTarget(python="3.12.3", machine="x86_64", glibc="2.39").minor
        12
        """
        return int(self.python.split(".")[1])

    @property
    def key(self) -> str:
        """Text that is equal for PCs that take the same wheels."""
        return f"cp3{self.minor}-glibc{self.glibc or 'none'}-{self.machine}"


def this_target(python: str) -> WheelTarget:
    """Return the target of an interpreter of this PC, whose version is `python`."""
    import platform  # not for all who only name a target

    # Windows has no confstr, and other C libraries do not know the name.
    confstr = getattr(os, "confstr", lambda name: "")
    try:
        libc = (confstr("CS_GNU_LIBC_VERSION") or "").split()
    except (ValueError, OSError):
        libc = []
    glibc = libc[1] if len(libc) == 2 and libc[0] == "glibc" else ""
    return WheelTarget(python=python, machine=platform.machine(), glibc=glibc)


WheelTrouble = Literal["unreachable", "missing", "wrong", "stopped"]
"""Why wheels are not there: no index answers, none has one, one is not the locked file, or the
request was cancelled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentTools:
    """What a node can build an environment with."""

    target: WheelTarget
    """Interpreter that wheels are chosen for: `python`, else the one that runs the agent."""
    python: str | None = None
    """Interpreter to build on; None: none here is one that the locks have wheels for."""
    uv: str | None = None
    """Path of a uv that is new enough; None: there is none."""
    uv_version: str = ""

    def check_foreign(self) -> None:
        check_text("uv_version", self.uv_version)
        for name in ("python", "uv"):
            check_text(name, getattr(self, name) or "")


@dataclass(frozen=True, kw_only=True, slots=True)
class WheelQuery:
    """The wheels of a lock for an interpreter, which may be another PC's."""

    lock_text: str
    target: WheelTarget
    index_url: str | None = None
    """Index to ask beside those that the node is set up with; None: no other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WheelReport:
    """Which wheels of a query a node has."""

    path: str
    """Folder of the set, below the agent's home."""
    num_packages: int
    num_present: int
    is_complete: bool
    size_bytes: int = 0
    """Size of those that are there."""
    trouble: WheelTrouble | None = None
    """Why they could not be fetched; None: they were, or nobody asked for that."""
    message: str = ""
    """The trouble in a sentence whose subject is the node."""
    hint: str = ""

    def check_foreign(self) -> None:
        check_number("num_packages", self.num_packages, 0, _MAX_KEPT)
        check_number("num_present", self.num_present, 0, _MAX_KEPT)
        check_number("size_bytes", self.size_bytes, 0, _MAX_BYTES)
        for name in ("path", "message", "hint"):
            check_text(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceTrial:
    """One tiny training step on a device."""

    device: str
    """`cuda:0` and so on, or `cpu`."""
    name: str
    seconds: float | None = None
    """Duration of the step, with what it loads and compiles; None: it was not done."""
    problem: str = ""
    """Why it failed, or was left out; empty: it did not."""
    is_failed: bool = False

    def check_foreign(self) -> None:
        check_number("seconds", self.seconds or 0, 0, 1e6)
        for name in ("device", "name", "problem"):
            check_text(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialJob:
    """Devices to try, by their names in torch; those with a problem are passed over."""

    devices: tuple[DeviceTrial, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentTrial:
    """The packages of training imported, and one tiny step on each device."""

    import_s: float
    """Duration of importing torch, transformers and peft, in seconds."""
    torch: str
    """Version of torch with its build, such as `2.13.0+cu130`."""
    devices: tuple[DeviceTrial, ...]

    @property
    def failed(self) -> tuple[DeviceTrial, ...]:
        """Devices that cannot train."""
        return tuple(one for one in self.devices if one.is_failed)

    def check_foreign(self) -> None:
        check_number("import_s", self.import_s, 0, 1e6)
        check_text("torch", self.torch)


KeptKind = Literal["environment", "packages", "wheels", "downloads", "uv", "python"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptItem:
    """Something that building environments has left on a node."""

    kind: KeptKind
    name: str
    """Name of the folder, by which it is deleted."""
    size_bytes: int
    used_s: float
    """Wall clock of the node when it was made or last built on, in seconds since 1970."""
    needed_by: str = ""
    """What needs it, such as `training` or `run r-1`; empty: nothing does."""

    def check_foreign(self) -> None:
        check_name("name", self.name)
        check_number("size_bytes", self.size_bytes, 0, _MAX_BYTES)
        check_text("needed_by", self.needed_by)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptItems:
    items: tuple[KeptItem, ...] = ()
