"""Kill writers of checkpoints at any instant, for tests and the campaign, which has no pytest."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

from agents.node.checkpoints import list_checkpoints, verify
from agents.state import Home
from tests.agents.trainer.checkpoint.checkpoint_writer import NAMES, content


def start_writer(
    run: Path, attempt: int, failpoint: str = "", last_step: int = 10**9
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.agents.trainer.checkpoint.checkpoint_writer", run,
         str(attempt),
         str(last_step)],
        env={**os.environ, "RACKLESS_FAILPOINT": failpoint},
        stdout=subprocess.PIPE,
    )  # fmt: skip


def check_newest(run: Path) -> int:
    """Load and verify the newest checkpoint as the agent lists it; return its step."""
    home = Home(run.parent.parent)
    listed = list_checkpoints(home, run.name)
    if not listed:
        return 0
    newest = listed[-1]
    assert not newest.problem
    assert verify(home, run.name, newest.step).verified
    for name in NAMES:
        path = home.path / newest.path / name
        assert path.read_bytes() == content(name, newest.step)
    return newest.step


def kill_writer(run: Path, attempt: int, draw: random.Random, newest: int) -> int:
    """Kill a writer at a random instant; return the newest step, which has to be whole."""
    writer = start_writer(run, attempt)
    assert writer.stdout is not None
    writer.stdout.readline()
    time.sleep(draw.uniform(0.0, 0.08))
    writer.kill()
    writer.wait()
    step = check_newest(run)
    assert step >= newest
    return step
