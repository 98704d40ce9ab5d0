"""Loopback nodes and the `rackless` command of one person, for tests of the whole path."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.nodes.transport.loopback import power_cut
from tests.fakes.ssh import make_key

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "resources" / "demo"
_HELD_S = 0.2


@dataclass(frozen=True, slots=True)
class Answer:
    code: int
    output: str
    problem: str

    @property
    def document(self) -> Any:
        return json.loads(self.output)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.output.splitlines()]


class Site:
    """Made by `open_site`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "master"
        self.key = make_key(folder)
        self.servers: dict[str, dict[str, Any]] = {}
        self._processes: list[subprocess.Popen[str]] = []

    def start_node(self, name: str) -> None:
        process = subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-m",
                    "app.nodes.transport.loopback",
                    "--home",
                    str(self.node_home(name)),
                ),
                *("--authorized-key", f"{self.key}.pub", "--until-eof"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self._processes.append(process)
        assert process.stdout is not None
        self.servers[name] = {**json.loads(process.stdout.readline()), "pid": process.pid}

    def add_node(self, name: str) -> None:
        server = self.servers[name]
        address = f"{getpass.getuser()}@127.0.0.1:{server['port']}"
        self.answer(
            *("nodes", "add", name, "--ssh", address, "--key", str(self.key)),
            *("--accept-host-key", server["fingerprint"]),
        )

    def node_home(self, name: str) -> Path:
        return self.folder / "nodes" / name

    def agent_home(self, name: str) -> Path:
        return self.node_home(name) / ".local/share/rackless-agent"

    def attempt(self, name: str, run_id: str, attempt: int = 1) -> Path:
        return self.agent_home(name) / "runs" / run_id / "attempts" / str(attempt)

    def close(self) -> None:
        for name in self.servers:
            power_cut(self.node_home(name))
        for process in self._processes:
            process.communicate()

    # ------------------------------------------------------------ the command

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `rackless ...`."""
        environ = {"RACKLESS_HOME": str(self.home), "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            [sys.executable, "-m", "app", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environ},
            cwd=self.folder,
        )

    def rackless(self, *arguments: str, timeout_s: float = 120.0) -> Answer:
        """Run `rackless ...` to its end, with any exit code."""
        with self.start(*arguments) as process:
            try:
                output, problem = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            return Answer(process.returncode, output, problem)

    def answer(self, *arguments: str) -> Any:
        """Return the JSON document of a command that must succeed."""
        done = self.rackless(*arguments, "--json")
        assert done.code == 0, f"rackless {' '.join(arguments)}: {done.problem}"
        return done.document

    def write_run_file(self, max_steps: int, **changes: Any) -> Path:
        """Write a run file that trains the demo's model in quick steps."""
        run = {
            "name": "quick",
            "model": str(DEMO / "model"),
            "data": {"train": str(DEMO / "train.jsonl"), "format": "chat"},
            "adapter": {"kind": "lora", "rank": 4, "alpha": 8, "dropout": 0.0},
            "sequence_tokens": 64,
            "batch_sequences": 4,
            "max_steps": max_steps,
            "learning_rate": 1e-3,
            "checkpoint": {"every_minutes": None, "every_steps": 5, "keep": 3, "copies": 2},
        }
        path = self.folder / "run.yaml"
        path.write_text(json.dumps({**run, **changes}))  # JSON is YAML
        return path

    def ranks_of(self, name: str, run_id: str) -> list[int]:
        """Return the processes of a run's ranks on a node."""
        home = str(self.node_home(name)).encode()
        found = []
        for process in filter(is_rank, tagged_processes(run_id)):
            with contextlib.suppress(OSError):
                if home in Path(f"/proc/{process}/environ").read_bytes():
                    found.append(process)
        return found

    def steps_told(self, name: str, run_id: str, rank: int, attempt: int = 1) -> list[int]:
        """Return the steps in a rank's own journal on its node."""
        journal = self.attempt(name, run_id, attempt) / f"rank-{rank}.jsonl"
        if not journal.exists():
            return []
        whole = journal.read_bytes().rpartition(b"\n")[0].splitlines()
        return [line["step"] for line in map(json.loads, whole) if line["kind"] == "step"]


@contextlib.contextmanager
def open_site(folder: Path, names: Sequence[str] = ("alpha", "beta")) -> Iterator[Site]:
    """Start the nodes, add them, and let them train with this Python."""
    site = Site(folder)
    try:
        for name in names:
            site.start_node(name)
            site.add_node(name)
            site.answer("nodes", "setup", name, "--python", sys.executable)
        yield site
    finally:
        site.close()


def wait_until(condition: Callable[[], Any], what: str, limit_s: float = 90.0) -> Any:
    """Return the condition's value as soon as it is true."""
    end_s = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < end_s, f"{what}: not within {limit_s:.0f} s"
        time.sleep(0.05)
    return value


@contextlib.contextmanager
def slowed(run_id: str) -> Iterator[None]:
    """Let the run train for a third of the time only, as on PCs that are busy otherwise.

    However late commands come to it on a busy machine, it is not over by then.
    """
    is_over = threading.Event()

    def slow_down() -> None:
        while not is_over.is_set():
            held = [one for one in tagged_processes(run_id) if is_rank(one)]
            _signal(held, signal.SIGSTOP)
            is_over.wait(_HELD_S)
            _signal(held, signal.SIGCONT)
            is_over.wait(_HELD_S / 2)

    thread = threading.Thread(target=slow_down)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def is_rank(process: int) -> bool:
    """Return whether a process is a rank."""
    with contextlib.suppress(OSError):
        return b"agents.trainer" in Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    return False


def _signal(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def tagged_processes(run_id: str) -> list[int]:
    """Return the processes of this PC that carry the run's tag."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"RACKLESS_RUN={run_id}".encode() in (
                entry / "environ"
            ).read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found
