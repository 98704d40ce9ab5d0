"""Gives this rank another supervisor where the one that it had is gone and nobody else noticed.

The recorder of the node, or the next request of a master, usually starts one within a second (see
`agents.supervisor.ownership`). Where both were killed, and no master comes, this thread does.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from agents.errors import ExpectedError
from agents.state import Home
from agents.supervisor.attempt import AttemptFolder
from agents.supervisor.ownership import is_ownerless, keep_owned

PERIOD_S = 5.0
"""Time between two looks, in seconds. The second one in a row that finds no supervisor acts, so
that the recorder has had its turn."""


class OwnerWatch:
    """Looks after the supervisor of one attempt, on a thread of its own."""

    def __init__(self, attempt: AttemptFolder) -> None:
        self._attempt = attempt
        self._was_ownerless = False
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin to look."""
        threading.Thread(target=self._run, name="owner", daemon=True).start()

    def close(self) -> None:
        """Look no more: a rank that ends needs no supervisor."""
        self._ended.set()

    def look(self) -> None:
        """Look once, and start a supervisor where the last look found none either."""
        is_alone = is_ownerless(self._attempt)
        if is_alone and self._was_ownerless:
            # It cannot be started, on a full disk for example: the next look tries again.
            with contextlib.suppress(ExpectedError):
                keep_owned(self._attempt)
        self._was_ownerless = is_alone

    def _run(self) -> None:
        while not self._ended.wait(PERIOD_S):
            self.look()


def watch_owner(folder: Path) -> OwnerWatch | None:
    """Start to look after the supervisor of the attempt in `folder`; None: none started it."""
    home, number = Home(Path(os.environ.get("RACKLESS_AGENT_HOME", ""))), folder.name
    run_id = folder.parent.parent.name
    if not number.isdigit() or folder != home.attempt(run_id, int(number)):
        return None  # torchrun by hand
    watch = OwnerWatch(AttemptFolder(home, run_id, int(number)))
    watch.start()
    return watch
