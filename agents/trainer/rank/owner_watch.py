"""Start another supervisor for this rank if its own is gone and no other process noticed.

The recorder of the node, or the next request of a master, usually starts one within a second (see
`agents.supervisor.ownership`). This thread does it if both were killed and no master connects.
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
"""Time between two checks, in seconds. The second consecutive check without a supervisor acts, so
the recorder has had its turn.
"""


class OwnerWatch:
    """Checks the supervisor of one attempt in a thread."""

    def __init__(self, attempt: AttemptFolder) -> None:
        self._attempt = attempt
        self._was_ownerless = False
        self._ended = threading.Event()

    def start(self) -> None:
        """Start to check."""
        threading.Thread(target=self._run, name="owner", daemon=True).start()

    def close(self) -> None:
        """Stop checking: a rank that ends needs no supervisor."""
        self._ended.set()

    def look(self) -> None:
        """Check once, and start a supervisor if the last check found none, either."""
        is_alone = is_ownerless(self._attempt)
        if is_alone and self._was_ownerless:
            # A failed start, for example on a full disk, is retried at the next check.
            with contextlib.suppress(ExpectedError):
                keep_owned(self._attempt)
        self._was_ownerless = is_alone

    def _run(self) -> None:
        while not self._ended.wait(PERIOD_S):
            self.look()


def watch_owner(folder: Path) -> OwnerWatch | None:
    """Start to check the supervisor of the attempt in `folder`; None if it never had one."""
    home, number = Home(Path(os.environ.get("RACKLESS_AGENT_HOME", ""))), folder.name
    run_id = folder.parent.parent.name
    if not number.isdigit() or folder != home.attempt(run_id, int(number)):
        return None  # manual torchrun
    watch = OwnerWatch(AttemptFolder(home, run_id, int(number)))
    watch.start()
    return watch
