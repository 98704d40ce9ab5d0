"""One node's part of an attempt: its state, and its answers to requests of other nodes."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

from agents.contract import run_layout
from agents.contract.election import (
    AttemptClaim,
    ClaimAnswer,
    NodeState,
    Relaunch,
)
from agents.contract.regroup import Regroup, may_regroup
from agents.contract.run import LOST_CAUSES, AttemptIntent, AttemptStatus, CheckpointInfo
from agents.contract.wire import WireError, from_wire, to_wire
from agents.election.channel import MAX_LINE_BYTES, Peer
from agents.errors import ExpectedError
from agents.node import checkpoints, files
from agents.node.probes import choose_port
from agents.state import Home, read_json
from agents.supervisor.attempt import AttemptFolder, read_journal, read_regroup, read_status
from agents.supervisor.confirmation import confirm
from agents.supervisor.election_process import close
from agents.supervisor.fence import claim_attempt, find_newest_launched, read_fence
from agents.supervisor.launch import launch
from agents.supervisor.regrouping import join_group, read_local_ranks

MAX_SAVED_STEPS = 8
"""Maximum number of saved steps that a node reports, newest ones."""
MAX_REASON_CHARACTERS = 500
"""Maximum length of the reason why a part ended, which may quote a line of its log."""


@dataclass
class Patience:
    """Time since a master last asked for the attempt, by this process's monotonic clock.

    The clock of the file system may jump; so the mark is only compared, never subtracted.
    """

    patience_s: float
    _mark: float = 0.0
    _since_s: float = field(default_factory=time.monotonic)

    def is_over(self, mark: float, now_s: float) -> bool:
        """Return whether `mark`, which each request of a master changes, is too old."""
        if mark != self._mark:
            self._mark, self._since_s = mark, now_s
        return now_s - self._since_s >= self.patience_s


@dataclass(frozen=True)
class Fetch:
    """Arguments of `fetch`."""

    step: int
    node: str = ""
    """Node to copy the checkpoint from; empty if this node has it."""


@dataclass(frozen=True)
class OfStep:
    step: int


@dataclass(frozen=True)
class OfAttempt:
    attempt: int


@dataclass(frozen=True)
class Reason:
    reason: str


class Part:
    """This node's part of one attempt."""

    def __init__(self, attempt: AttemptFolder, intent: AttemptIntent) -> None:
        if intent.election is None:
            raise ValueError(f"attempt {intent.attempt} has no plan for an election")
        self.attempt = attempt
        self.intent = intent
        self.plan = intent.election
        self.nodes = tuple(dict.fromkeys(place.node for place in intent.ranks))
        self.peers = {
            node: Peer(node, intent.addresses[node], self.plan.ports[node], intent.credential)
            for node in self.nodes
            if node != intent.node and node in intent.addresses and node in self.plan.ports
        }
        self._patience = Patience(self.plan.patience_s)

    @property
    def home(self) -> Home:
        return self.attempt.home

    @property
    def node(self) -> str:
        return self.intent.node

    # ------------------------------------------------------------ state

    def state(self) -> NodeState:
        """Return this node's current state of the attempt."""
        known = replace(
            self._judge(),
            is_free=self._patience.is_over(self._read_mark(), time.monotonic()),
            fence=read_fence(self.home, self.attempt.run_id),
        )
        # Only an active part can regroup; reading its ranks would cost time for nothing.
        if known.part != "active" or not may_regroup(self.intent):
            return known
        ranks = read_local_ranks(self.attempt)
        return replace(
            known,
            step=ranks.step,
            generation=ranks.generation,
            waits=ranks.waits,
            has_lost_rank=ranks.has_lost_rank,
        )

    def _read_mark(self) -> float:
        # A master that watches the attempt touches this file every few seconds.
        try:
            return self.attempt.file(run_layout.KEPT_FILE).stat().st_mtime
        except OSError:
            return 0.0

    def _judge(self) -> NodeState:
        """Return the part's state, the newest step of its ranks, and the reason why they ended."""
        closed = read_json(self.attempt.file(run_layout.CLOSED_FILE))
        if closed is not None:
            return self._closed(str(closed.get("reason", "")))
        # Launched, not just granted: a granted attempt may never start.
        newest = find_newest_launched(self.home, self.attempt.run_id)
        if newest > self.attempt.number:
            return self._closed(f"attempt {newest} has replaced it")
        supervisor = self.attempt.read_supervisor()
        # The cheap check comes first: a status reads the environment of every process of this PC.
        has_ended = self.attempt.file(run_layout.EXIT_FILE).exists()
        if not has_ended and supervisor and supervisor.is_alive():
            return NodeState(node=self.node, part="active")
        status = read_status(self.attempt)
        step = max((rank.step or 0 for rank in status.ranks), default=0)
        if status.state in ("starting", "running", "stopping"):
            return NodeState(node=self.node, part="active", step=step)
        if not self._is_lost(status):
            return self._closed(status.message or f"it is {status.state} on {self.node}", step)
        return NodeState(
            node=self.node,
            part="lost",
            step=step,
            reason=status.message[:MAX_REASON_CHARACTERS],
            cause=status.cause,
            is_peer_loss=status.peer_lost,
            ended_s=status.ended_s,
        )

    def _closed(self, reason: str, step: int = 0) -> NodeState:
        return NodeState(node=self.node, part="closed", reason=reason, step=step)

    def _is_lost(self, status: AttemptStatus) -> bool:
        """Return whether an ended attempt was lost, and may therefore be recovered."""
        if status.state == "stopped":
            # A master sets `at_loss` when it stops the rest of a lost attempt to resume it.
            return (read_json(self.attempt.file(run_layout.STOP_FILE)) or {}).get("at_loss") is True
        if status.state != "failed" or status.cause in LOST_CAUSES:
            return status.state in ("lost", "failed")
        # If nodes started it and one of them was lost before all had started, the others retry.
        return not status.cause and bool(self.plan.started_by) and not status.is_confirmed

    # ------------------------------------------------------------ requests

    def answer(self, request: dict[str, Any], stream: BinaryIO) -> dict[str, Any] | None:
        """Answer a request of another node.

        Raises:
            ExpectedError: it is refused.
            WireError: it is malformed or of an unknown kind.
        """
        if request.get("kind") == "send":
            self._send(from_wire(OfStep, request, "send").step, stream)
            return None
        return self.ask(str(request.get("kind")), request)

    def ask(self, kind: str, args: dict[str, Any]) -> dict[str, Any]:
        """Answer a request of another node or of this one. Raises the errors of `answer`."""
        # `send` is missing here: it answers with bytes and is never sent by this node to itself.
        answers: dict[str, Callable[[dict[str, Any]], Any]] = {
            "state": lambda _: self.state(),
            "close": lambda a: self._close(from_wire(Reason, a, "close").reason),
            "claim": lambda a: self._claim(from_wire(AttemptClaim, a, "claim")),
            "verify": lambda a: self._verify(from_wire(OfStep, a, "verify").step),
            "fetch": lambda a: self._fetch(from_wire(Fetch, a, "fetch")),
            "launch": lambda a: self._launch(from_wire(Relaunch, a, "launch")),
            "regroup": lambda a: self._regroup(from_wire(Regroup, a, "regroup")),
            "confirm": lambda a: self._confirm(from_wire(OfAttempt, a, "confirm").attempt),
        }
        if kind not in answers:
            raise WireError(f"there is no request {kind[:40]!a}")
        result: dict[str, Any] = to_wire(answers[kind](args))
        return result

    def _close(self, reason: str) -> dict[str, Any]:
        close(self.attempt, reason[:MAX_REASON_CHARACTERS])
        return {}

    def _claim(self, claim: AttemptClaim) -> ClaimAnswer:
        # Checked again: a master may have returned, or the user may have stopped the run.
        if not self.state().is_ready:
            return ClaimAnswer(is_granted=False, fence=read_fence(self.home, self.attempt.run_id))
        found = claim_attempt(
            self.home, self.attempt.run_id, claim.attempt, replaces=self.attempt.number
        )
        if not found.is_granted:
            return ClaimAnswer(is_granted=False, fence=found.fence)
        # The claimant needs the newest group, because survivors may have chosen other writers.
        group = read_regroup(self.attempt)
        return ClaimAnswer(
            is_granted=True,
            fence=found.fence,
            port=choose_port(self.intent.address),
            peer_port=choose_port(self.intent.address),
            checkpoints=tuple(checkpoints.list_checkpoints(self.home, self.attempt.run_id)),
            saved_steps=self._find_saved_steps(),
            generation=group.generation if group else 0,
            members=group.nodes if group else (),
        )

    def _find_saved_steps(self) -> tuple[int, ...]:
        """Return the newest steps that the ranks of this node report as saved."""
        steps = {self.intent.resume_step} if self.intent.resume_step else set()
        for place in self.intent.ranks:
            lines = read_journal(self.attempt.file(run_layout.rank_journal(place.rank)))
            saved = [line.get("step") for line in lines if line.get("kind") == "checkpoint"]
            steps.update(step for step in saved if isinstance(step, int))
        return tuple(sorted(steps)[-MAX_SAVED_STEPS:])

    def _verify(self, step: int) -> CheckpointInfo:
        return checkpoints.verify(self.home, self.attempt.run_id, step)

    def _fetch(self, wanted: Fetch) -> dict[str, Any]:
        for info in checkpoints.list_checkpoints(self.home, self.attempt.run_id):
            # Later checkpoints are damaged on all nodes, or void once the next attempt starts.
            # The step itself is replaced, too, if another node's copy was chosen.
            if info.step > wanted.step or (info.step == wanted.step and wanted.node):
                checkpoints.delete(self.home, self.attempt.run_id, info.step)
        if wanted.node:
            if wanted.node not in self.peers:
                raise ExpectedError(f"{wanted.node} is not another node of this attempt.")
            with self.peers[wanted.node].receive("send", step=wanted.step) as stream:
                path = run_layout.checkpoint_path(self.attempt.run_id, wanted.step)
                files.receive(self.home, path, _with_manifest(stream))
        return {}

    def _send(self, step: int, stream: BinaryIO) -> None:
        path = run_layout.checkpoint_path(self.attempt.run_id, step)
        if not (self.home.path / path).is_dir():
            raise ExpectedError(f"Node {self.node} has no checkpoint of step {step}.")
        stream.write(b"{}\n")  # an empty answer: the files follow
        files.send(self.home, path, stream)

    def _launch(self, wanted: Relaunch) -> dict[str, Any]:
        # Two majorities overlap in a node; by its fence, that node launches only the newer attempt.
        if wanted.attempt != read_fence(self.home, self.attempt.run_id):
            raise ExpectedError(f"This node did not grant attempt {wanted.attempt}.")
        launch(self.home, self.next_intent(wanted))
        return {}

    def next_intent(self, wanted: Relaunch) -> AttemptIntent:
        """Return the intent of this node's part of the next attempt."""
        old = self.intent
        # Shares are stored by rank: with fewer ranks, the trainer balances them again.
        is_same = len(wanted.ranks) == len(old.ranks)
        return replace(
            old,
            attempt=wanted.attempt,
            # Another master may have taken over the run since the intent was written.
            master=read_status(self.attempt).master,
            spec=old.spec if is_same else replace(old.spec, shares=None),
            ranks=wanted.ranks,
            master_address=wanted.master_address,
            master_port=wanted.master_port,
            resume_step=wanted.resume_step,
            # Logged steps to compare with are known to the master only.
            replay=None,
            # Pipeline stages were planned for the old ranks.
            cut=old.cut if wanted.ranks == old.ranks else old.cut and old.cut.without_stages(),
            checkpoint_ranks=wanted.checkpoint_ranks,
            addresses=wanted.addresses,
            election=wanted.plan,
        )

    def _regroup(self, wanted: Regroup) -> dict[str, Any]:
        if self.node not in wanted.nodes:
            raise ExpectedError(f"{self.node} is not one of the nodes that regroup.")
        join_group(self.attempt, wanted)
        return {}

    def _confirm(self, number: int) -> dict[str, Any]:
        confirm(AttemptFolder(self.home, self.attempt.run_id, number), is_final=True)
        return {}


class _WithManifest:
    """Stream of `files.send` in the form that `files.receive` expects: with a manifest."""

    def __init__(self, line: bytes, rest: BinaryIO) -> None:
        self._line = line
        self._rest = rest

    def readline(self, limit: int = -1) -> bytes:
        del limit
        line, self._line = self._line, b""
        return line

    def read(self, size: int = -1) -> bytes:
        return self._rest.read(size)


def _with_manifest(stream: BinaryIO) -> BinaryIO:
    line = stream.readline(MAX_LINE_BYTES)
    # A malformed header is passed on: `files.receive` reports it.
    with contextlib.suppress(ValueError, KeyError, TypeError):
        header = json.loads(line)
        line = json.dumps({**header, "manifest": header["files"]}).encode("ascii") + b"\n"
    return _WithManifest(line, stream)  # type: ignore[return-value]
