"""Messages about building, trying and pruning a training environment, and its wheels.

Reports that runs and checks also read are in `node.py`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal

from agents.contract.names import check_name, check_number, check_text

_MAX_BYTES = 2**60
_MAX_KEPT = 10_000

SUPPORTED_PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14))
"""Python versions that the locks have wheels for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WheelTarget:
    """Interpreter and PC that wheels are chosen for."""

    python: str
    """Version of the interpreter, such as `3.12.3`."""
    machine: str
    """Processor architecture, such as `x86_64`; Windows calls the same one `AMD64`."""
    glibc: str
    """Version of glibc, such as `2.39`; empty: another C library."""

    def check_foreign(self) -> None:
        for name in ("python", "machine", "glibc"):
            check_text(name, getattr(self, name))
        if re.match(r"3\.[0-9]{1,3}(?![0-9])", self.python) is None:
            raise ValueError(f"python is {self.python[:40]!a}; it must be a version such as 3.12.3")

    @property
    def minor(self) -> int:
        """Minor version of Python.

        >>> WheelTarget(python="3.12.3", machine="x86_64", glibc="2.39").minor
        12
        """
        return int(self.python.split(".")[1])

    @property
    def key(self) -> str:
        """Key that is equal for PCs that take the same wheels."""
        return f"cp3{self.minor}-glibc{self.glibc or 'none'}-{self.machine}"


def this_target(python: str) -> WheelTarget:
    """Return the target of an interpreter of this PC, given its version."""
    import platform  # slow to import, and needed only here

    # Windows has no confstr, and other C libraries do not know the name.
    confstr = getattr(os, "confstr", lambda name: "")
    try:
        libc = (confstr("CS_GNU_LIBC_VERSION") or "").split()
    except (ValueError, OSError):
        libc = []
    glibc = libc[1] if len(libc) == 2 and libc[0] == "glibc" else ""
    return WheelTarget(python=python, machine=platform.machine(), glibc=glibc)


WheelTrouble = Literal["unreachable", "missing", "wrong", "stopped"]
"""Why wheels are not available. `unreachable`: no index answers; `missing`: no index has one;
`wrong`: a file differs from the lock; `stopped`: the request was cancelled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentTools:
    """Tools with which a node can build an environment."""

    target: WheelTarget
    """Interpreter to choose wheels for: `python`, else the one that runs the agent."""
    python: str | None = None
    """Interpreter to build on; None: the node has no supported Python."""
    uv: str | None = None
    """Path of a recent enough uv; None: not installed."""
    uv_version: str = ""

    def check_foreign(self) -> None:
        check_text("uv_version", self.uv_version)
        for name in ("python", "uv"):
            check_text(name, getattr(self, name) or "")


@dataclass(frozen=True, kw_only=True, slots=True)
class WheelQuery:
    """The wheels of a lock for one interpreter, which may be that of another PC."""

    lock_text: str
    target: WheelTarget
    index_url: str | None = None
    """Index to ask in addition to the node's own; None: no other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WheelReport:
    """Result of a wheel query."""

    path: str
    """Folder of the set, relative to the agent's home."""
    num_packages: int
    num_present: int
    is_complete: bool
    size_bytes: int = 0
    """Size of the present wheels, in bytes."""
    trouble: WheelTrouble | None = None
    """Why wheels could not be fetched; None: they were, or no download was requested."""
    message: str = ""
    """Sentence about the trouble; its subject is the node."""
    hint: str = ""

    def check_foreign(self) -> None:
        check_number("num_packages", self.num_packages, 0, _MAX_KEPT)
        check_number("num_present", self.num_present, 0, _MAX_KEPT)
        check_number("size_bytes", self.size_bytes, 0, _MAX_BYTES)
        for name in ("path", "message", "hint"):
            check_text(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceTrial:
    """Result of one small training step on a device."""

    device: str
    """Device, such as `cuda:0` or `cpu`."""
    name: str
    seconds: float | None = None
    """Duration of the step, including loading and compiling, in seconds; None: it was not done."""
    problem: str = ""
    """Why the step failed or was skipped; empty: it passed."""
    is_failed: bool = False

    def check_foreign(self) -> None:
        check_number("seconds", self.seconds or 0, 0, 1e6)
        for name in ("device", "name", "problem"):
            check_text(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialJob:
    """Devices to try, by their names in torch; devices with a problem are skipped."""

    devices: tuple[DeviceTrial, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentTrial:
    """Result of importing the training packages and of one small step on each device."""

    import_s: float
    """Duration of importing torch, transformers and peft, in seconds."""
    torch: str
    """Version of torch with its build, such as `2.13.0+cu130`."""
    devices: tuple[DeviceTrial, ...]

    @property
    def failed(self) -> tuple[DeviceTrial, ...]:
        """Devices that cannot train."""
        return tuple(device for device in self.devices if device.is_failed)

    def check_foreign(self) -> None:
        check_number("import_s", self.import_s, 0, 1e6)
        check_text("torch", self.torch)


KeptKind = Literal["environment", "packages", "wheels", "downloads", "uv", "python"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptItem:
    """Item that building environments has left on a node."""

    kind: KeptKind
    name: str
    """Name of the folder, by which it is deleted."""
    size_bytes: int
    used_s: float
    """Time at which it was made or last built on, in seconds since 1970 by the node's clock."""
    needed_by: str = ""
    """Reason to keep it, such as `training` or `run r-1`; empty: it is not needed."""

    def check_foreign(self) -> None:
        check_name("name", self.name)
        check_number("size_bytes", self.size_bytes, 0, _MAX_BYTES)
        check_text("needed_by", self.needed_by)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptItems:
    items: tuple[KeptItem, ...] = ()
