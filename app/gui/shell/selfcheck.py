"""Refuse to start with a PySide6 that would crash within seconds."""

from __future__ import annotations

import sys

import PySide6
from PySide6.QtCore import QObject

from app.errors import UserError

CALLS = 100
"""Number of probing calls, large enough to stand out from other changes of the count."""


def check_reference_counts() -> None:
    """Check that a call into Qt does not change the reference count of None.

    PySide6 6.12.0 drops one reference with each call that returns nothing; on Python 3.11, where
    None is not immortal, that aborts the process after some hundred signals.

    Raises:
        UserError: this PySide6 does change it.
    """
    probe = QObject()
    before = sys.getrefcount(None)
    for _ in range(CALLS):
        probe.setObjectName("x")
    # Half the calls: other code may change the count meanwhile.
    if sys.getrefcount(None) - before <= -CALLS // 2:
        raise UserError(
            f"PySide6 {PySide6.__version__} corrupts reference counts on Python "
            f"{sys.version.split()[0]}; the window would crash within seconds.",
            "Install the version that Rackless asks for: "
            'python -I -m pip install "PySide6_Essentials>=6.11.3,<6.12"',
        )
