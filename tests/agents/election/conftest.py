"""Nodes of one PC that share an attempt of fake ranks, each with its own home and address."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from agents.contract.mandate import AttemptProof, Mandate, checkpoint_bytes, sign_mandate
from agents.contract.run import AttemptIntent, AttemptStatus, ElectionPlan, RankPlacement
from agents.contract.run_layout import ELECTION_FILE
from agents.contract.signatures import make_seed, public_key, sign
from agents.contract.spec import CheckpointSpec, DataSpec, RunSpec
from agents.contract.wire import to_wire
from agents.election.channel import Peer
from agents.election.member import ElectionMember
from agents.node.checkpoints import hash_entries
from agents.node.files import describe_file
from agents.node.manifest import write_manifest
from agents.node.probes import choose_port
from agents.state import Home, identity_from, read_json
from agents.supervisor.attempt import AttemptFolder, read_status
from agents.supervisor.confirmation import confirm
from agents.supervisor.launch import launch
from agents.supervisor.stop import stop
from agents.supervisor.sweep import find_processes
from app.nodes.credential import make_credential
from tests.agents.supervisor.conftest import FAKE_RANK

RUN = "run-1"


@dataclass
class Nodes:
    """Nodes `a`, `b`, `c`, ... at 127.0.0.1, 127.0.0.2, ..., one rank each."""

    folder: Path
    names: tuple[str, ...]
    patience_s: float = 1.0
    confirm_s: float = 20.0
    credential: str = field(default_factory=make_credential)
    plan: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    behaviour: str = "train_together"
    """What the fake ranks do."""
    is_signed: bool = True
    """False: a master of an earlier version launches, so that nodes have no keys of their own."""
    master_seed: str = field(default_factory=make_seed)
    seeds: dict[str, str] = field(default_factory=dict)

    def home(self, name: str) -> Home:
        return Home(self.folder / name)

    def address(self, name: str) -> str:
        return f"127.0.0.{1 + self.names.index(name)}"

    def attempt(self, name: str, number: int) -> AttemptFolder:
        return AttemptFolder(self.home(name), RUN, number)

    @property
    def cut(self) -> Path:
        """A file that ends all ranks, as the loss of another rank does."""
        return self.folder / "cut"

    def __post_init__(self) -> None:
        self.seeds = {name: make_seed() for name in self.names}

    def member(self, name: str, number: int = 1) -> ElectionMember | None:
        """Return the signer of a node, as a program on it has it."""
        if not self.is_signed:
            return None
        keys = {node: public_key(seed) for node, seed in self.seeds.items()}
        return ElectionMember(RUN, number, name, self.seeds[name], keys)

    def peer(self, sender: str, receiver: str, number: int = 1) -> Peer:
        """Return `receiver` as `sender` asks it."""
        intent = self.attempt(receiver, number).read_intent()
        assert intent is not None
        assert intent.election is not None
        place = intent.address, intent.election.ports[receiver]
        return Peer(receiver, *place, self.credential, self.member(sender, number))

    def sign_as_master(self, message: bytes) -> str:
        return sign(self.master_seed, message)

    def prove(self, intent: AttemptIntent) -> AttemptIntent:
        """Return the intent with the proof of its master and the key of its node."""
        if not self.is_signed:
            return intent
        mandate = Mandate(
            run_id=RUN,
            attempt=intent.attempt,
            spec=intent.spec,
            places=tuple((place.node, place.device_id) for place in intent.ranks),
            node_keys={node: public_key(seed) for node, seed in self.seeds.items()},
        )
        signed = sign_mandate(mandate, public_key(self.master_seed), self.sign_as_master)
        return replace(
            intent, proof=AttemptProof(mandate=signed), node_seed=self.seeds[intent.node]
        )

    def intents(self) -> list[AttemptIntent]:
        python = self.folder / "fake-python"
        python.write_text(f"#!{sys.executable}\n{FAKE_RANK.read_text()}")
        python.chmod(0o755)
        addresses = {name: self.address(name) for name in self.names}
        ports: deque[socket.socket] = deque()
        plan = ElectionPlan(
            ports={name: choose_port(address, ports) for name, address in addresses.items()},
            patience_s=self.patience_s,
            per_hour=6,
            **self.plan,
        )
        first = AttemptIntent(
            run_id=RUN,
            attempt=1,
            node="",
            spec=RunSpec(
                model="org/tiny", data=DataSpec(train="x.jsonl"), checkpoint=CheckpointSpec()
            ),
            python=str(python),
            ranks=tuple(
                RankPlacement(rank=rank, local_rank=0, node=name, device="cpu")
                for rank, name in enumerate(self.names)
            ),
            master_address=addresses[self.names[0]],
            master_port=choose_port(addresses[self.names[0]], ports),
            address="",
            interface="lo",
            credential=self.credential,
            model_path="org/tiny",
            train_path="x.jsonl",
            checkpoint_ranks=(0, 1),
            environ={
                "FAKE_RANKS": json.dumps([self.behaviour] * len(self.names)),
                "FAKE_CUT": str(self.cut),
                **self.environ,
            },
            addresses=addresses,
            confirm_s=self.confirm_s,
            election=plan,
        )
        return [self.prove(replace(first, node=n, address=addresses[n])) for n in self.names]

    def launch(self, least_step: int = 2) -> None:
        """Launch attempt 1 on all nodes, as a master does that then goes away; await a step."""
        for intent in self.intents():
            for folder in (self.home(intent.node).leases, self.home(intent.node).runs):
                folder.mkdir(parents=True)
            launch(self.home(intent.node), intent)
            confirm(self.attempt(intent.node, 1), is_final=True)
        for name in self.names:
            self.wait(
                name, 1, lambda status: any((rank.step or 0) >= least_step for rank in status.ranks)
            )

    def add_checkpoint(
        self, name: str, step: int, *, writer: str = "", content: str = "", attempt: int = 1
    ) -> Path:
        """Save a checkpoint as the trainer does; `writer` is the node that wrote it."""
        folder = self.home(name).checkpoints(RUN) / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(content or json.dumps({"step": step}))
        entries = [describe_file(folder, folder / "state.json")]
        about = {"run_id": RUN, "attempt": attempt, "step": step, "created_s": 1.0}
        about["files"] = to_wire(entries)
        if self.is_signed:
            about["node"] = node = writer or name
            message = checkpoint_bytes(RUN, attempt, step, hash_entries(entries), node)
            about["signature"] = sign(self.seeds[node], message)
        write_manifest(folder, about)
        return folder

    def lose(self, *names: str) -> None:
        """Let nodes lose power; the ranks of the others fail for that."""
        for name in names:
            attempt = self.attempt(name, 1)
            helper = identity_from(read_json(attempt.file(ELECTION_FILE)))
            for pid in [*find_processes(attempt.tag), *([helper.pid] if helper else [])]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.cut.touch()
        for name in self.names:
            self.wait(name, 1, lambda status: status.state in ("failed", "lost"))
        self.cut.unlink()

    def wait(
        self,
        name: str,
        number: int,
        until: Callable[[AttemptStatus], bool],
        timeout_s: float = 20.0,
    ) -> AttemptStatus:
        """Return the first status that fits, also of an attempt that does not exist yet."""
        attempt, deadline = self.attempt(name, number), time.monotonic() + timeout_s
        status: AttemptStatus | None = None
        while True:
            if attempt.file("intent.json").exists():
                status = read_status(attempt)
                if until(status):
                    return status
            assert time.monotonic() < deadline, f"{name}: {status}; {self.say(name)}"
            time.sleep(0.05)

    def say(self, name: str) -> str:
        """Return what the election processes of a node have written."""
        logs = sorted(self.home(name).runs.glob("*/attempts/*/election.log"))
        return "\n".join(log.read_text() for log in logs)

    def helper(self, name: str, number: int = 1) -> int | None:
        """Return the living election process of an attempt."""
        found = identity_from(read_json(self.attempt(name, number).file(ELECTION_FILE)))
        return found.pid if found and found.is_alive() else None

    def wait_gone(self, *names: str, number: int = 1) -> None:
        """Wait until the election processes of an attempt have ended."""
        deadline = time.monotonic() + 12
        while left := [name for name in names if self.helper(name, number)]:
            assert time.monotonic() < deadline, [self.say(name) for name in left]
            time.sleep(0.1)

    def end(self) -> None:
        for name in self.names:
            for path in self.home(name).runs.glob("*/attempts/*/intent.json"):
                stop(self.attempt(name, int(path.parent.name)), 0.0)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path, ("a", "b", "c"))
    yield made
    made.end()
