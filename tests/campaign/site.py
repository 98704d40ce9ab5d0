"""The PCs that a campaign attacks: nodes with their own sshd and disks, and a master."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.campaign.delays import Delays
from tests.campaign.history import Step, read_steps
from tests.campaign.keeper import Keeper
from tests.campaign.processes import chain_of, is_running, send
from tests.cluster.master import ROOT, Master
from tests.cluster.namespaces import Cluster, ClusterError, Node, run_tool

NUM_STEPS = 240
EVERY_STEPS = 40
LOST_AFTER_S = 8.0
DISK_MIB = 400
"""Size of each node's disk, a tmpfs, in MiB."""
RUN_FILE = """
name: campaign
model: {root}/resources/demo/model
data: {{train: {root}/resources/demo/train.jsonl, format: chat}}
adapter: {{kind: lora, rank: 4, alpha: 8, dropout: 0.0, targets: all-linear}}
sequence_tokens: 64
batch_sequences: 12
max_steps: {steps}
learning_rate: 1.0e-3
compile: "off"
rebalance: false
shares: [{shares}]
checkpoint: {{every_minutes: null, every_steps: {every}, keep: 3, copies: 2}}
"""


class Stuck(RuntimeError):
    """Raised when something that has to come does not come in time."""


def wait_until(condition: Callable[[], Any], what: str, limit_s: float) -> Any:
    """Return the condition's value as soon as it is true.

    Raises:
        Stuck: not within `limit_s`.
    """
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.1)
    raise Stuck(f"{what}: not within {limit_s:.0f} s")


class Site:
    """A cluster with a master that knows all nodes, a keeper, and one run file."""

    def __init__(self, folder: Path, num_nodes: int = 2, num_steps: int = NUM_STEPS) -> None:
        self.folder = folder
        self.num_steps = num_steps
        self._disks: list[Path] = []
        self.cluster = Cluster(folder / "cluster", num_nodes)
        self.master = Master(self.cluster, folder / "rackless")
        self.keeper = Keeper(self.master)
        self.delays = Delays(lambda: chain_of(self.cluster))
        self.run_file = folder / "run.yaml"
        try:
            self._prepare()
        except BaseException:
            self.down()
            raise

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *error: object) -> None:
        self.down()

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.cluster.nodes

    def _prepare(self) -> None:
        shares = ", ".join(["1"] * len(self.nodes))
        text = RUN_FILE.format(root=ROOT, steps=self.num_steps, every=EVERY_STEPS, shares=shares)
        self.run_file.write_text(text)
        self.mount(self.master.home)
        for node in self.nodes:
            self.mount(node.home)
            self.boot(node)
            self.add(self.master, node)
            self.master.answer("nodes", "setup", node.name, "--python", sys.executable)
        self.master.answer("settings", "set", "lost_after_s", f"{LOST_AFTER_S:.0f}")
        self.keeper.start()

    def add(self, master: Master, node: Node) -> None:
        """Add a node to a master, with the fingerprint that its owner would compare."""
        address, key = f"root@{node.address}", str(self.cluster.key)
        shown = self.cluster.fingerprint(node)
        master.answer(
            *("nodes", "add", node.name, "--ssh", address, "--key", key),
            *("--accept-host-key", shown),
        )

    def mount(self, folder: Path, mib: int = DISK_MIB) -> None:
        """Give a folder a disk of its own, before any process of its PC has started."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        run_tool("mount", "-t", "tmpfs", "-o", f"size={mib}m,mode=700", "tmpfs", str(folder))
        self._disks.append(folder)

    def down(self) -> None:
        """End everything and unmount the disks."""
        self.delays.stop()
        self.keeper.stop()
        self.cluster.down()
        for folder in reversed(self._disks):
            run_tool("umount", "-l", str(folder), check=False)
        self._disks.clear()

    # ---- nodes

    def boot(self, node: Node) -> None:
        """Start a node's sshd, whose sessions see a new boot id."""
        (node.folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        self.restart_sshd(node)

    def lose_power(self, node: Node) -> None:
        """Kill all of a node at once, its cable first: such a PC says no more goodbye."""
        self.cluster.cut(node)
        while pids := [pid for pid in self.cluster.pids(node) if is_running(pid)]:
            send(pids, signal.SIGKILL)
            time.sleep(0.05)

    def restart_sshd(self, node: Node) -> None:
        self.cluster.stop_sshd(node)
        boot_id = Path("/proc/sys/kernel/random/boot_id")
        self.cluster.start_sshd(node, {boot_id: node.folder / "boot_id"})

    def agent_home(self, node: Node) -> Path:
        return node.home / ".local/share/rackless-agent"

    def run_folder(self, node: Node, run_id: str) -> Path:
        return self.agent_home(node) / "runs" / run_id

    def in_node(self, node: Node, *argv: str) -> str:
        """Run a command in the mount namespace of a node's processes."""
        return run_tool("nsenter", "-t", str(self.cluster.sshd_pid(node)), "-m", *argv)

    # ---- runs

    def start(self, master: Master | None = None) -> str:
        """Start the run and return its id as soon as it is launched."""
        return str((master or self.master).answer("start", str(self.run_file))["run_id"])

    def steps(self, run_id: str) -> list[Step]:
        return read_steps(self.run_folder(node, run_id) for node in self.nodes)

    def wait_for_step(self, run_id: str, step: int, limit_s: float = 90.0) -> None:
        def reached() -> bool:
            return any(found.step >= step for found in self.steps(run_id))

        wait_until(reached, f"step {step} of {run_id}", limit_s)

    def wait_for_end(self, run_id: str, limit_s: float) -> str:
        """Wait until the run is done; return its state then, or at the limit."""

        # Stopped is no end: a run stops for a moment when a node joins it.
        def is_done() -> bool:
            return self.keeper.is_alive and self.keeper.state_of(run_id) == "done"

        with contextlib.suppress(Stuck):
            wait_until(is_done, "the end of the run", limit_s)
        return self.keeper.state_of(run_id) or "unknown"

    def run_state(self, run_id: str) -> str:
        """Return what the store says, asked anew."""
        answer = self.master.rackless("runs", "show", run_id)
        return str(json.loads(answer.output)["state"]) if answer.code == 0 else "unknown"

    def give_up(self, run_id: str) -> None:
        """Stop a run as a person would, twice, so that the next fault finds free nodes."""
        for _ in range(2):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.master.rackless("runs", "stop", run_id, timeout_s=60)

    def leftovers(self, run_id: str) -> list[str]:
        """Return what a finished and deleted run has left behind."""
        return sorted(self._find_leftovers(run_id))

    def _find_leftovers(self, run_id: str) -> Iterator[str]:
        for node in self.nodes:
            home = self.agent_home(node)
            if self.run_folder(node, run_id).exists():
                yield f"{node.name}: folder of the run"
            for pattern in ("**/.reserve*", "**/.partial*", "**/.incoming*"):
                yield from (f"{node.name}: {path.name}" for path in home.glob(pattern))
            with contextlib.suppress(ClusterError):
                for door in self.cluster.listeners(node):
                    if "sshd" not in door.process:
                        yield f"{node.name}: port {door.port} of {door.process}"
        if (self.master.home / "runs" / run_id).exists():
            yield "master: mirror of the run"
