"""An agent home of the test's own, and attempts of fake ranks in it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from agents.contract.run import AttemptIntent, AttemptStatus, RankPlacement
from agents.contract.spec import DataSpec, RunSpec
from agents.state import Home, open_home
from agents.supervisor.attempt import AttemptFolder, read_status
from agents.supervisor.launch import launch
from agents.supervisor.stop import stop
from agents.supervisor.sweep import find_processes

FAKE_RANK = Path(__file__).parents[2] / "fakes" / "rank.py"


@dataclass
class Node:
    """One node's agent home, and what a master would ask of it."""

    home: Home
    python: Path

    def intent(
        self,
        *behaviours: str,
        run_id: str = "run-1",
        attempt: int = 1,
        elsewhere: int = 0,
        environ: dict[str, str] | None = None,
    ) -> AttemptIntent:
        """Return an intent with one local rank per behaviour and some ranks on another node."""
        num_ranks = len(behaviours) + elsewhere
        ranks = tuple(
            RankPlacement(
                rank=rank,
                local_rank=rank if rank < len(behaviours) else rank - len(behaviours),
                node="a" if rank < len(behaviours) else "b",
                device="cpu",
            )
            for rank in range(num_ranks)
        )
        return AttemptIntent(
            run_id=run_id,
            attempt=attempt,
            node="a",
            spec=RunSpec(model="org/tiny", data=DataSpec(train="chats.jsonl")),
            python=str(self.python),
            ranks=ranks,
            master_address="127.0.0.1",
            master_port=29500,
            address="127.0.0.1",
            interface="lo",
            model_path="org/tiny",
            train_path="chats.jsonl",
            environ={"FAKE_RANKS": json.dumps(behaviours), **(environ or {})},
        )

    def launch(self, *behaviours: str, **changes: object) -> AttemptFolder:
        intent = self.intent(*behaviours)
        known = {k: v for k, v in changes.items() if k in ("run_id", "attempt")}
        environ = changes.get("environ")
        if isinstance(environ, dict):
            known["environ"] = {**intent.environ, **environ}
        intent = replace(intent, **known)  # type: ignore[arg-type]
        launch(self.home, intent)
        return AttemptFolder(self.home, intent.run_id, intent.attempt)

    def wait(
        self,
        attempt: AttemptFolder,
        until: Callable[[AttemptStatus], bool],
        timeout_s: float = 20.0,
    ) -> AttemptStatus:
        """Return the first status that fits."""
        deadline = time.monotonic() + timeout_s
        while not until(status := read_status(attempt)):
            if time.monotonic() > deadline:
                raise AssertionError(f"still {status}")
            time.sleep(0.02)
        return status

    def wait_end(self, attempt: AttemptFolder, timeout_s: float = 20.0) -> AttemptStatus:
        """Return the status once the attempt is over and its last process gone."""
        ends = ("done", "stopped", "failed", "lost")
        return self.wait(attempt, lambda s: s.state in ends and s.num_processes == 0, timeout_s)

    def wait_step(self, attempt: AttemptFolder, step: int = 1) -> AttemptStatus:
        """Return the status once every local rank has done that step."""

        intent = attempt.read_intent()
        assert intent is not None
        num_local = sum(place.node == intent.node for place in intent.ranks)

        def is_there(status: AttemptStatus) -> bool:
            # A rank that begins late is not in the status yet.
            all_began = len(status.ranks) == num_local
            return all_began and all((r.step or 0) >= step for r in status.ranks)

        return self.wait(attempt, is_there)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    yield from make_node(tmp_path, monkeypatch)


def make_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """Yield a node with a home below `tmp_path`; afterwards no process of it is left."""
    monkeypatch.setenv("RACKLESS_AGENT_HOME", str(tmp_path / "home"))
    python = tmp_path / "fake-python"
    python.write_text(f"#!{sys.executable}\n{FAKE_RANK.read_text()}")
    python.chmod(0o755)
    made = Node(open_home(), python)
    yield made
    for folder in made.home.runs.glob("*/attempts/*"):
        attempt = AttemptFolder(made.home, folder.parents[1].name, int(folder.name))
        if attempt.file("intent.json").exists() and find_processes(attempt.tag):
            stop(attempt, 0.0)


def kill_supervisor(attempt: AttemptFolder) -> None:
    """SIGKILL the supervisor and wait until it is gone."""
    supervisor = attempt.read_supervisor()
    assert supervisor is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while supervisor.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.01)
