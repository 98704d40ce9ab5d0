"""Run the demo beside this window: a process and a window of its own, with a home of its own.

So a person who tries it finds their own cluster as it was.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from app.core.api import CoreApi
from app.errors import UserError
from app.gui.session.bridge import Report
from app.gui.shell.shell import DemoProgress

POLL_S = 0.5
COMMAND = (sys.executable, "-m", "app", "demo")
_TITLE = "The demo has a window of its own"


async def run_demo_apart(core: CoreApi, report: Report) -> None:
    """Start the demo and wait for its end. It goes on when this window is closed first.

    Raises:
        UserError: it could not be started, or a step of it did not happen.
    """
    with tempfile.TemporaryFile() as errors:
        process = _start(errors)
        report(DemoProgress(((_TITLE, "now"),), "It takes a few seconds to open."))
        while process.poll() is None:  # noqa: ASYNC110 - it outlives any thread that waits
            await asyncio.sleep(POLL_S)
        if process.returncode:
            errors.seek(0)
            lines = errors.read().decode("utf-8", "replace").strip().splitlines()
            why = lines[-1] if lines else f"exit code {process.returncode}"
            report(DemoProgress(((_TITLE, "failed"),)))
            raise UserError(
                f"The demo ended early: {why}",
                "Run it in a terminal to see all of it: rackless demo --headless",
            )
    report(
        DemoProgress(((_TITLE, "done"),), "It was closed. Your own cluster begins with Add a PC.")
    )


def _start(errors: IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            COMMAND,
            cwd=Path(__file__).resolve().parents[3],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
    except OSError as error:
        raise UserError(
            f"The demo could not be started: {error}", "Run it in a terminal: rackless demo"
        ) from error
