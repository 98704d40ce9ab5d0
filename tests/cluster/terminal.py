"""The `rackless` command at a terminal, inside a namespace: what it shows, and what is typed."""

from __future__ import annotations

import os
import pty
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.cluster.master import ROOT
from tests.cluster.namespaces import Cluster

Typist = Callable[[str], str | None]
"""Gets what was shown since the last answer, and returns what to type now; None: nothing yet."""


def type_at_terminal(
    cluster: Cluster, home: Path, *words: str, typist: Typist, timeout_s: float = 240.0
) -> tuple[int, str]:
    """Run `rackless WORDS` at a terminal in the master's namespace.

    Args:
        cluster: has the master.
        home: folder of that Rackless.
        words: of the command.
        typist: answers its questions.
        timeout_s: time after which the command is killed, in seconds.

    Returns:
        The exit code and all that the terminal showed.

    Raises:
        TimeoutError: the command did not end in time; it has been killed.
    """
    ours, theirs = pty.openpty()
    process = cluster.start(
        cluster.master,
        *(sys.executable, "-P", "-m", "app", *words),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env={"RACKLESS_HOME": str(home), "PYTHONPATH": str(ROOT), "HOME": str(cluster.master.home)},
        start_new_session=True,
    )
    os.close(theirs)
    end_s = time.monotonic() + timeout_s
    shown = since = ""
    try:
        while time.monotonic() < end_s:
            if not select.select([ours], [], [], 1.0)[0]:
                continue
            try:
                part = os.read(ours, 4096)
            except OSError:  # the terminal closes with the command
                return process.wait(timeout=30), shown
            text = part.decode("utf-8", "replace").replace("\r\n", "\n")
            shown, since = shown + text, since + text
            if (answer := typist(since)) is not None:
                os.write(ours, f"{answer}\n".encode())
                since = ""
        raise TimeoutError(f"rackless {' '.join(words)} did not end: {shown[-400:]}")
    finally:
        os.close(ours)
        process.kill()  # nothing, where it has ended
