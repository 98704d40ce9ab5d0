"""Kind of this process: Python with the installed packages, or the desktop bundle.

The bundle has no interpreter for other programs, so a node on this PC cannot train with it.
"""

from __future__ import annotations

import sys


def is_bundle() -> bool:
    """Return whether this process is the desktop bundle."""
    return bool(getattr(sys, "frozen", False))


def own_pythons() -> tuple[str, ...]:
    """Return the interpreter of this process if a node on this PC may use it, else nothing."""
    return () if is_bundle() else (sys.executable,)
