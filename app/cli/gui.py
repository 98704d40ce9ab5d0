"""`rackless` and `rackless gui`: open the window."""

from __future__ import annotations

import argparse
import os
import sys

from app.cli.kit.output import Output
from app.errors import UserError


def declare(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(handler=open_window)


def open_window(args: argparse.Namespace, out: Output) -> int:
    """Open the window and return when it is closed.

    Raises:
        UserError: there is no display.
    """
    if not has_display():
        raise UserError(
            "no display is available for the window",
            "Use the commands (rackless --help), or log in with one: ssh -X, or on the PC itself.",
            topic="no-display",
        )
    from app.gui.application import run
    from app.paths import default_home

    return run(default_home())


def has_display() -> bool:
    """Return whether a window can be shown here."""
    # QT_QPA_PLATFORM: with `offscreen` a window needs no display, as in tests.
    names = ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM")
    return sys.platform in ("win32", "darwin") or any(os.environ.get(name) for name in names)
