"""What kind of program this process is: Python with our packages, or the desktop bundle.

The bundle has no interpreter that others could use: nodes cannot train with it.
"""

from __future__ import annotations

import sys


def is_bundle() -> bool:
    """Return whether this is the desktop bundle."""
    return bool(getattr(sys, "frozen", False))


def own_pythons() -> tuple[str, ...]:
    """Return the interpreter of this process, as one that a node on this PC may use; else none."""
    return () if is_bundle() else (sys.executable,)
