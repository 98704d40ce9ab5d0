"""Run the demo in a process of its own, with its own window and home folder.

The user's own nodes and runs are not touched.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from typing import IO

from agents.shared.files.python_child import SAFE_FOLDER, python_environ, same_source
from app.core.action import CoreApi
from app.errors import UserError
from app.gui.session.bridge import Report
from app.gui.shell.shell import DemoProgress

POLL_S = 0.5
COMMAND = (sys.executable, "-m", "app", "demo")
_TITLE = "The demo runs in its own window"


async def run_demo_apart(core: CoreApi, report: Report) -> None:
    """Start the demo and wait for it to end; it outlives this window.

    Raises:
        UserError: the demo could not be started, or one of its steps failed.
    """
    # A file and not a pipe, which would fill up, or break once this window has closed.
    with tempfile.TemporaryFile() as errors:
        process = _start(errors)
        report(DemoProgress(((_TITLE, "now"),), "It opens in a few seconds."))
        while process.poll() is None:  # noqa: ASYNC110 - a thread waiting for it would keep this process alive
            await asyncio.sleep(POLL_S)
        if process.returncode:
            errors.seek(0)
            lines = errors.read().decode("utf-8", "replace").strip().splitlines()
            why = lines[-1] if lines else f"exit code {process.returncode}"
            report(DemoProgress(((_TITLE, "failed"),)))
            raise UserError(
                f"The demo ended early: {why}",
                "Run it in a terminal to see its output: rackless demo --headless",
            )
    report(
        DemoProgress(((_TITLE, "done"),), "The demo ended. To use your own PCs, choose Add a PC.")
    )


def _start(errors: IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            COMMAND,
            env=python_environ(os.environ, *same_source()),
            cwd=SAFE_FOLDER,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,  # so that Ctrl+C in our terminal does not reach it
        )
    except OSError as error:
        raise UserError(
            f"The demo could not be started: {error}", "Run it in a terminal: rackless demo"
        ) from error
