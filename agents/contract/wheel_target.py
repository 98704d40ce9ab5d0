"""The interpreter and PC that wheels are for."""

from __future__ import annotations

import os
from dataclasses import dataclass

from agents.contract.names import check_text

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
