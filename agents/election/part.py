"""One node's part of an attempt: its state, and its answers to requests of other nodes.

`RULES` says who may ask for what, and when. Everything that is done or refused on behalf of another
node is logged, and told as an event of the attempt.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, Literal, get_args

from agents.contract import election, run_layout
from agents.contract.mandate import AttemptProof, consent_bytes, prove
from agents.contract.regroup import Regroup, may_regroup
from agents.contract.run import (
    LOST_CAUSES,
    AttemptIntent,
    AttemptLoss,
    AttemptStatus,
    CheckpointInfo,
    FileEntry,
    choose_checkpoint_ranks,
)
from agents.contract.signatures import sign
from agents.contract.wire import WireError, from_wire, to_wire
from agents.election.beliefs import Beliefs
from agents.election.channel import MAX_LINE_BYTES, Peer, PeerError
from agents.election.grants import Grant, Grants
from agents.election.member import ElectionMember
from agents.errors import ExpectedError
from agents.node import checkpoints, files
from agents.node.probes import choose_port
from agents.state import Home, fsync_folder, read_json
from agents.supervisor.attempt import (
    AttemptFolder,
    is_confirmed,
    read_journal,
    read_regroup,
    read_status,
)
from agents.supervisor.confirmation import confirm
from agents.supervisor.election_process import close
from agents.supervisor.fence import claim_attempt, find_newest_launched, read_fence
from agents.supervisor.journal import AttemptJournal
from agents.supervisor.launch import launch
from agents.supervisor.proof import require_proved
from agents.supervisor.regrouping import join_group, read_local_ranks

MAX_SAVED_STEPS = 8
"""Maximum number of saved steps that a node reports, newest ones."""
MAX_REASON_CHARACTERS = 500
"""Maximum length of the reason why a part ended, which may quote a line of its log."""
MAX_TOLD = 200
"""Maximum number of events about requests of other nodes, so that none of them fills the disk."""
PACE_MARGIN = 2.0
"""How much faster than this node's ranks a group without it may have trained."""


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


Right = Literal["any", "holder", "first"]
"""Who may send a request, among the nodes of the attempt. `holder`: the one whose claim of the
attempt number in the request was granted here; `first`: the one that decides for a group."""


@dataclass(frozen=True)
class RequestRule:
    """Authorization of a kind of request."""

    right: Right
    needs_grant: bool = False
    """True if it serves a claim that was granted here."""
    parts: tuple[election.PartState, ...] = ("active", "lost", "closed")
    """States of this node's part in which it is allowed."""
    is_told: bool = True
    """True if it is told as an event when it was carried out."""


RULES: Mapping[str, RequestRule] = {
    "state": RequestRule("any", is_told=False),
    "close": RequestRule("any", is_told=False),  # told if it changes something
    "claim": RequestRule(
        "any", is_told=False
    ),  # told with its outcome; while the part trains, the answer is that it is not granted
    "verify": RequestRule("holder", needs_grant=True, parts=("lost",)),
    "fetch": RequestRule("holder", needs_grant=True, parts=("lost",)),
    "send": RequestRule("any", needs_grant=True, parts=("lost",)),
    "launch": RequestRule("holder", needs_grant=True, parts=("lost",)),
    # The new attempt has replaced this part, and it may train.
    "confirm": RequestRule("holder", needs_grant=True),
    "regroup": RequestRule("first", parts=("active",)),
}
"""RequestRule of each request; nothing else is answered."""


class Part:
    """This node's part of one attempt."""

    def __init__(self, attempt: AttemptFolder, intent: AttemptIntent) -> None:
        if intent.election is None:
            raise ValueError(f"attempt {intent.attempt} has no plan for an election")
        self.attempt = attempt
        self.intent = intent
        self.plan = intent.election
        self.nodes = tuple(dict.fromkeys(place.node for place in intent.ranks))
        self.member: ElectionMember | None = None
        self.beliefs: Beliefs | None = None
        self.first_attempt = intent.attempt
        """Attempt that its master launched; nodes may have recovered it since."""
        if intent.proof is not None:  # else a master of an earlier version launched it
            proved = prove(intent.proof, election.is_majority)
            if proved is None or proved.attempt != intent.attempt:
                raise ValueError(f"attempt {intent.attempt} has no valid proof")
            self.beliefs = Beliefs(attempt, intent, proved)
            self.member = ElectionMember(
                intent.run_id, intent.attempt, intent.node, intent.node_seed, self.beliefs.keys
            )
            self.first_attempt = proved.mandate.attempt
        self.grants = Grants(self.nodes)
        self.known: Mapping[str, election.NodeState] = {}
        """Newest states of the other nodes that answer."""
        self.waiting: frozenset[str] = frozenset()
        """Nodes whose ranks wait for the same group as those here, as far as this node knows."""
        self.ports: deque[socket.socket] = deque()
        """Sockets that hold ports which this node has chosen for later listeners."""
        self._lost_since_s: float | None = None
        self._told: set[tuple[str, str, str]] = set()
        self._lock = threading.Lock()
        self.peers = {
            node: Peer(
                node, intent.addresses[node], self.plan.ports[node], intent.credential, self.member
            )
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

    def state(self) -> election.NodeState:
        """Return this node's current state of the attempt."""
        known = replace(
            self._judge(),
            is_free=self._patience.is_over(self._read_mark(), time.monotonic()),
            fence=read_fence(self.home, self.attempt.run_id),
        )
        if known.part == "lost" and self._lost_since_s is None:
            self._lost_since_s = time.monotonic()
        if known.part == "lost" and self.beliefs is not None:
            group = read_regroup(self.attempt)
            return replace(known, generation=group.generation if group else 0)
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

    @property
    def was_started(self) -> bool:
        """True unless nodes launched this attempt and never confirmed it: it has not trained."""
        return not self.plan.started_by or is_confirmed(self.attempt, self.intent)

    @property
    def counts_loss(self) -> bool:
        """True if the end of this attempt counts for the limits of recoveries."""
        return self.beliefs is None or self.was_started

    def last_claimable(self, lag_s: float = 0.0) -> int:
        """Return the highest attempt number that may be claimed, or that was `lag_s` ago."""
        since_s = self._lost_since_s
        lost_s = 0.0 if since_s is None else max(0.0, time.monotonic() - since_s - lag_s)
        return self.attempt.number + election.MAX_AHEAD + int(lost_s * election.AHEAD_PER_S)

    def _read_mark(self) -> float:
        # A master that watches the attempt touches this file every few seconds.
        try:
            return self.attempt.file(run_layout.KEPT_FILE).stat().st_mtime
        except OSError:
            return 0.0

    def _judge(self) -> election.NodeState:
        """Return the part's state, the newest step of its ranks, and the reason why they ended."""
        closed = read_json(self.attempt.file(run_layout.CLOSED_FILE))
        if closed is not None:
            try:
                closing = from_wire(election.Closing, closed)
            except WireError:  # damaged, or of another version
                closing = None
            return self._closed(str(closed.get("reason", "")), closing=closing)
        # Launched, not just granted: a granted attempt may never start.
        newest = find_newest_launched(self.home, self.attempt.run_id)
        if newest > self.attempt.number:
            intent = AttemptFolder(self.home, self.attempt.run_id, newest).read_intent()
            successor = election.Closing(successor=intent.proof if intent else None)
            return self._closed(f"attempt {newest} has replaced it", closing=successor)
        supervisor = self.attempt.read_supervisor()
        # The cheap check comes first: a status reads the environment of every process of this PC.
        has_ended = self.attempt.file(run_layout.EXIT_FILE).exists()
        if not has_ended and supervisor and supervisor.is_alive():
            return election.NodeState(node=self.node, part="active")
        status = read_status(self.attempt)
        step = max((rank.step or 0 for rank in status.ranks), default=0)
        if status.state in ("starting", "running", "stopping"):
            return election.NodeState(node=self.node, part="active", step=step)
        if not self._is_lost(status):
            return self._closed(status.message or f"it is {status.state} on {self.node}", step)
        return election.NodeState(
            node=self.node,
            part="lost",
            step=step,
            reason=status.message[:MAX_REASON_CHARACTERS],
            cause=status.cause,
            is_peer_loss=status.peer_lost,
            ended_s=status.ended_s,
        )

    def _closed(
        self, reason: str, step: int = 0, closing: election.Closing | None = None
    ) -> election.NodeState:
        return election.NodeState(
            node=self.node, part="closed", reason=reason, step=step, closing=closing
        )

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
        """Answer a request of another node, whose signature the listener has checked.

        Raises:
            ExpectedError: it is refused.
            PeerError: a third node, from which a checkpoint is to be copied, refuses.
            WireError: it is malformed or of an unknown kind.
        """
        kind, sender = str(request.get("kind")), str(request.get("sender", ""))
        if kind == "send":
            with self._authorized(sender, kind, request):
                self._send(from_wire(election.OfStep, request, "send").step, request, stream)
            return None
        return self.ask(kind, request, sender)

    def ask(self, kind: str, args: dict[str, Any], sender: str | None = None) -> dict[str, Any]:
        """Answer a request of `sender`, or of this node (None). Raises the errors of `answer`."""
        # `send` is missing here: it answers with bytes and is never sent by this node to itself.
        answers: dict[str, Callable[[dict[str, Any], str], Any]] = {
            "state": lambda _, __: self.state(),
            "close": lambda a, who: self._close(from_wire(election.Closing, a, "close"), who),
            "claim": lambda a, who: self._claim(from_wire(election.AttemptClaim, a, "claim"), who),
            "verify": lambda a, _: self._verify(from_wire(election.OfStep, a, "verify")),
            "fetch": lambda a, _: self._fetch(from_wire(election.Fetch, a, "fetch")),
            "launch": lambda a, who: self._launch(from_wire(election.Relaunch, a, "launch"), who),
            "regroup": lambda a, who: self._regroup(from_wire(Regroup, a, "regroup"), who),
            "confirm": lambda a, _: self._confirm(from_wire(election.OfAttempt, a, "confirm")),
        }
        if kind not in answers:
            raise WireError(f"there is no request {kind[:40]!a}")
        who = self.node if sender is None else sender
        with self._authorized(who, kind, args):
            result: dict[str, Any] = to_wire(answers[kind](args, who))
        return result

    @contextlib.contextmanager
    def _authorized(self, sender: str, kind: str, args: dict[str, Any]) -> Iterator[None]:
        """Refuse a request unless its rule allows it, and tell what was done or refused."""
        if self.member is None:  # a master of an earlier version: the credential alone decides
            yield
            return
        rule = RULES[kind]
        try:
            grant = self._require_right(rule, sender, args)
            with self.grants.using(grant):
                yield
        except (ExpectedError, PeerError, WireError) as error:
            self.tell(sender, kind, str(getattr(error, "message", error)), is_refused=True)
            raise
        if rule.is_told:
            about = args.get("attempt") if rule.needs_grant else self.attempt.number
            self.tell(sender, kind, f"for attempt {about}")

    def _require_right(self, rule: RequestRule, sender: str, args: dict[str, Any]) -> Grant | None:
        """Return the grant that a request serves, if its rule needs one.

        Raises:
            ExpectedError: the sender may not ask that, or not now.
        """
        if sender not in self.nodes:
            raise ExpectedError("The sender is not a node of this attempt.")
        if len(rule.parts) < len(get_args(election.PartState)):
            part = self.state().part
            if part not in rule.parts:
                raise ExpectedError(f"The part of {self.node} is {part}.")
        if not rule.needs_grant:
            return None
        number = args.get("attempt")
        grant = self.grants.find(number) if isinstance(number, int) else None
        if grant is None:
            raise ExpectedError(f"{self.node} has granted no claim of that attempt.")
        if rule.right == "holder" and grant.holder != sender:
            raise ExpectedError(f"{self.node} has granted the attempt to {grant.holder}.")
        return grant

    def tell(self, sender: str, kind: str, text: str, *, is_refused: bool = False) -> None:
        """Log a request of another node, and tell it as an event of the attempt, once."""
        known = (sender, kind, text)
        with self._lock:
            if sender == self.node or known in self._told or len(self._told) >= MAX_TOLD:
                return
            self._told.add(known)
        verb = "refused" if is_refused else "done"
        now = time.strftime("%H:%M:%S")
        print(f"{now} {kind} of {sender} {verb}: {text}", file=sys.stderr, flush=True)
        AttemptJournal(self.attempt.file(run_layout.SUPERVISOR_JOURNAL)).write(
            "peer_request", sender=sender, request=kind, is_refused=is_refused, message=text
        )

    def _close(self, closing: election.Closing, sender: str) -> dict[str, Any]:
        # A node speaks for itself alone: with another reason it takes no part, and no more.
        if self.beliefs is None or self.beliefs.is_closing(closing):
            reason = closing.reason[:MAX_REASON_CHARACTERS]
            if close(self.attempt, reason, closing):
                self.tell(sender, "close", reason)
        elif sender in self.known:
            self.known = {node: s for node, s in self.known.items() if node != sender}
        return {}

    def _claim(self, claim: election.AttemptClaim, sender: str) -> election.ClaimAnswer:
        # Checked again: a master may have returned, or the user may have stopped the run.
        own = self.state()
        refusal = "" if own.is_ready else f"the part is {own.part}"
        if self.member is not None and not refusal:
            refusal = self.grants.refuse(sender)
            if claim.attempt > self.last_claimable():
                refusal = "the number is too high"
        if not refusal:
            found = claim_attempt(
                self.home, self.attempt.run_id, claim.attempt, replaces=self.attempt.number
            )
            refusal = "" if found.is_granted else f"attempt {found.fence} was granted before"
        if refusal:
            if self.member is not None:
                self.tell(sender, "claim", f"attempt {claim.attempt}: {refusal}", is_refused=True)
            fence = read_fence(self.home, self.attempt.run_id)
            return election.ClaimAnswer(is_granted=False, fence=fence)
        listed = self._list_checkpoints()
        size_bytes = max((info.size_bytes for info in listed), default=0)
        grant = self.grants.grant(sender, claim.attempt, size_bytes)
        grant.port = choose_port(self.intent.address, self.ports)
        grant.peer_port = choose_port(self.intent.address, self.ports)
        if self.member is not None:
            self.tell(sender, "claim", f"attempt {claim.attempt}")
        # The claimant needs the newest group, because survivors may have chosen other writers.
        group = read_regroup(self.attempt)
        return election.ClaimAnswer(
            is_granted=True,
            fence=claim.attempt,
            port=grant.port,
            peer_port=grant.peer_port,
            checkpoints=tuple(listed),
            saved_steps=self._find_saved_steps(),
            generation=group.generation if group else 0,
            members=group.nodes if group else (),
            consent=self._consent(claim.attempt),
        )

    def _consent(self, attempt: int) -> str:
        if self.member is None:
            return ""
        about = self.attempt.run_id, attempt, self.attempt.number, self.node
        return sign(self.intent.node_seed, consent_bytes(*about))

    def _list_checkpoints(self) -> list[CheckpointInfo]:
        """Return the checkpoints here from which the run may continue."""
        found = checkpoints.list_checkpoints(self.home, self.attempt.run_id)
        return [info for info in found if self.refuse_checkpoint(info) == ""]

    def refuse_checkpoint(self, info: CheckpointInfo) -> str:
        """Return why the run cannot continue from a checkpoint of any node; empty: it can."""
        if self.beliefs is None:
            return ""
        if not self.beliefs.is_usable(info, self._find_last_step()):
            return f"Attempt {self.attempt.number} cannot have saved step {info.step}."
        if not self.beliefs.is_proved(info):
            return f"No node of the run has signed the checkpoint of step {info.step}."
        return ""

    def _find_last_step(self) -> int:
        """Return the newest step that the attempt can have finished, as far as this node knows."""
        own, others = self.state(), self.known.values()
        went_on = bool(others) and all(s.generation > own.generation for s in others)
        if not may_regroup(self.intent) or own.ended_s is None or not went_on:
            return own.step
        # The others trained without this node, for longer than its own ranks.
        gone_s = max(0.0, time.time() - own.ended_s)
        return own.step + int(PACE_MARGIN * self._read_pace() * gone_s)

    def _read_pace(self) -> float:
        """Return the steps per second of this node's ranks before their end."""
        for place in self.intent.ranks:
            lines = read_journal(self.attempt.file(run_layout.rank_journal(place.rank)))
            steps = [line for line in lines if line.get("kind") == "step"]
            if place.node == self.node and len(steps) >= 2:
                with contextlib.suppress(KeyError, TypeError, ZeroDivisionError):
                    first, last = steps[0], steps[-1]
                    took_s = float(last["time_s"]) - float(first["time_s"])
                    return float(last["step"] - first["step"]) / took_s
        return 0.0

    def _find_saved_steps(self) -> tuple[int, ...]:
        """Return the newest steps that the ranks of this node report as saved."""
        steps = {self.intent.resume_step} if self.intent.resume_step else set()
        for place in self.intent.ranks:
            lines = read_journal(self.attempt.file(run_layout.rank_journal(place.rank)))
            saved = [line.get("step") for line in lines if line.get("kind") == "checkpoint"]
            steps.update(step for step in saved if isinstance(step, int))
        return tuple(sorted(steps)[-MAX_SAVED_STEPS:])

    def _verify(self, wanted: election.OfStep) -> CheckpointInfo:
        found = checkpoints.verify(self.home, self.attempt.run_id, wanted.step)
        grant = self.grants.find(wanted.attempt)
        if grant is not None and found.verified:
            grant.intact.add((found.step, found.manifest_sha256))
        return found

    def _fetch(self, wanted: election.Fetch) -> dict[str, Any]:
        grant = self.grants.find(wanted.attempt)
        if self.beliefs is not None and grant is not None:
            self._fetch_proved(wanted, grant)
            return {}
        for info in checkpoints.list_checkpoints(self.home, self.attempt.run_id):
            # Later checkpoints are damaged on all nodes, or void once the next attempt starts.
            # The step itself is replaced, too, if another node's copy was chosen.
            if info.step > wanted.step or (info.step == wanted.step and wanted.node):
                checkpoints.delete(self.home, self.attempt.run_id, info.step)
        if wanted.node:
            with self._require_peer(wanted.node).receive("send", step=wanted.step) as stream:
                path = run_layout.checkpoint_path(self.attempt.run_id, wanted.step)
                files.receive(self.home, path, _with_manifest(stream))
        return {}

    def _fetch_proved(self, wanted: election.Fetch, grant: Grant) -> None:
        """Have a signed checkpoint; whatever is later is given up only once it is here.

        Raises:
            ExpectedError: it is not proved, or this node has a newer intact one.
            PeerError: the other node does not send it.
        """
        chosen = wanted.checkpoint
        if chosen is None or (chosen.run_id, chosen.step) != (self.attempt.run_id, wanted.step):
            raise WireError("fetch names no checkpoint")
        if refusal := self.refuse_checkpoint(chosen):
            raise ExpectedError(refusal)
        newer = self._find_newer(chosen, grant)
        if newer is not None:
            raise ExpectedError(
                f"{self.node} has an intact checkpoint of step {newer.step}, which is newer."
            )
        if not self._has(chosen, grant):
            if not wanted.node:
                raise ExpectedError(f"{self.node} has no intact copy of step {chosen.step}.")
            self._copy(chosen, wanted.node, grant.attempt)
            grant.intact.add((chosen.step, chosen.manifest_sha256))
        for info in checkpoints.list_checkpoints(self.home, self.attempt.run_id):
            if info.step <= chosen.step:
                continue
            # A usable one was found damaged above; others are void once the next attempt starts.
            is_damaged = self.refuse_checkpoint(info) == ""
            give_up = checkpoints.delete if is_damaged else checkpoints.set_aside
            give_up(self.home, self.attempt.run_id, info.step)
        grant.fetched = chosen.step

    def _find_newer(self, chosen: CheckpointInfo | None, grant: Grant) -> CheckpointInfo | None:
        """Return an intact checkpoint here that is newer than `chosen` (None: than the start)."""
        assert self.beliefs is not None
        for info in reversed(self._list_checkpoints()):
            is_newer = chosen is None or self.beliefs.age(info) > self.beliefs.age(chosen)
            if is_newer and self._is_intact(info, grant):
                return info
        return None

    def _has(self, chosen: CheckpointInfo, grant: Grant) -> bool:
        return any(
            (info.step, info.manifest_sha256) == (chosen.step, chosen.manifest_sha256)
            and self._is_intact(info, grant)
            for info in checkpoints.list_checkpoints(self.home, self.attempt.run_id)
        )

    def _is_intact(self, info: CheckpointInfo, grant: Grant) -> bool:
        if (info.step, info.manifest_sha256) in grant.intact:
            return True  # verified for this claim: hashing gigabytes takes minutes
        is_intact = self._verify(election.OfStep(step=info.step, attempt=grant.attempt)).verified
        return is_intact is True

    def _copy(self, chosen: CheckpointInfo, node: str, number: int) -> None:
        """Copy a checkpoint from another node, and place it once it is what was signed."""
        run_id = self.attempt.run_id
        final = self.home.path / run_layout.checkpoint_path(run_id, chosen.step)
        # The trainer removes such a folder if this process ends before it is complete.
        folder = final.with_name(f".deleted-fetched-{final.name}")
        shutil.rmtree(folder, ignore_errors=True)
        arguments = {"step": chosen.step, "attempt": number}
        with self._require_peer(node).receive("send", **arguments) as stream:
            path = folder.relative_to(self.home.path).as_posix()
            files.receive(self.home, path, _with_manifest(stream, chosen))
        found = checkpoints.describe_folder(self.home, folder, chosen.step)
        about = found.run_id, found.attempt, found.manifest_sha256
        if about != (chosen.run_id, chosen.attempt, chosen.manifest_sha256):
            shutil.rmtree(folder, ignore_errors=True)
            raise ExpectedError(f"{node} has sent another manifest than the one that was signed.")
        if final.exists():
            checkpoints.set_aside(self.home, run_id, chosen.step)
        os.rename(folder, final)
        fsync_folder(final.parent)

    def _require_peer(self, node: str) -> Peer:
        if node not in self.peers:
            raise ExpectedError(f"{node} is not another node of this attempt.")
        return self.peers[node]

    def _send(self, step: int, request: dict[str, Any], stream: BinaryIO) -> None:
        path = run_layout.checkpoint_path(self.attempt.run_id, step)
        if not (self.home.path / path).is_dir():
            raise ExpectedError(f"Node {self.node} has no checkpoint of step {step}.")
        # An empty answer: the files follow.
        answer = self.member.sign_answer(request, {}) if self.member is not None else {}
        stream.write(json.dumps(answer).encode("ascii") + b"\n")
        files.send(self.home, path, stream)

    def _launch(self, wanted: election.Relaunch, sender: str) -> dict[str, Any]:
        # Two majorities overlap in a node; by its fence, that node launches only the newer attempt.
        if wanted.attempt != read_fence(self.home, self.attempt.run_id):
            raise ExpectedError(f"This node did not grant attempt {wanted.attempt}.")
        grant = self.grants.find(wanted.attempt)
        if self.member is not None and grant is not None:
            self._require_expected(wanted, grant, sender)
        intent = self.next_intent(wanted)
        require_proved(intent)
        launch(self.home, intent)
        return {}

    def _require_expected(self, wanted: election.Relaunch, grant: Grant, sender: str) -> None:
        """Refuse parameters that the holder of the claim may not choose.

        Raises:
            ExpectedError: one of them differs from what this node knows or has prepared.
        """
        old, plan = self.intent, self.plan
        members = [node for node in self.nodes if any(r.node == node for r in wanted.ranks)]
        first = members[0] if members else ""
        consents = wanted.handover.consents if wanted.handover is not None else {}
        checks = {
            "nodes": self.node in members and election.is_majority(members, self.nodes),
            "consents": consents.keys() == set(members),
            "ranks": wanted.ranks == election.renumber(old.ranks, members),
            "addresses": wanted.addresses == {node: old.addresses[node] for node in members},
            "first node": wanted.master_address == old.addresses.get(first),
            "port of the ranks": first != self.node or wanted.master_port == grant.port,
            "writers": wanted.checkpoint_ranks
            == choose_checkpoint_ranks(wanted.ranks, old.spec.checkpoint.copies),
            "ports": wanted.plan.ports.keys() == set(members)
            and wanted.plan.ports.get(self.node) == grant.peer_port,
            "plan": (wanted.plan.patience_s, wanted.plan.per_hour, wanted.plan.started_by)
            == (plan.patience_s, plan.per_hour, sender),
            "losses": self._are_known(wanted.plan.losses),
            "checkpoint": wanted.resume_step == grant.fetched,
        }
        for what, is_expected in checks.items():
            if not is_expected:
                raise ExpectedError(
                    f"Attempt {wanted.attempt} is not started on {self.node}: its {what} must be "
                    "chosen as the attempt before says."
                )
        newer = self._find_newer(None, grant) if wanted.resume_step is None else None
        if newer is not None:
            raise ExpectedError(
                f"{self.node} has an intact checkpoint of step {newer.step}, and attempt "
                f"{wanted.attempt} would start from the beginning."
            )

    def _are_known(self, losses: tuple[AttemptLoss, ...]) -> bool:
        """Return whether these are the losses so far and that of this attempt."""
        known = self.plan.losses
        if not self.was_started and losses == known:
            return True
        return losses[:-1] == known and [one.attempt for one in losses[-1:]] == [
            self.attempt.number
        ]

    def next_intent(self, wanted: election.Relaunch) -> AttemptIntent:
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
            proof=self._hand_over(wanted),
        )

    def _hand_over(self, wanted: election.Relaunch) -> AttemptProof | None:
        """Return the proof of the next attempt: that of this one and the consents to the next."""
        proof = self.intent.proof
        if proof is None or wanted.handover is None:
            return proof
        return replace(proof, handovers=(*proof.handovers, wanted.handover))

    def _regroup(self, wanted: Regroup, sender: str) -> dict[str, Any]:
        if self.node not in wanted.nodes:
            raise ExpectedError(f"{self.node} is not one of the nodes that regroup.")
        if self.member is not None:
            self._require_group(wanted, sender)
        join_group(self.attempt, wanted)
        return {}

    def _require_group(self, wanted: Regroup, sender: str) -> None:
        """Refuse a group that its first node may not form.

        Raises:
            ExpectedError: it is not a majority, leaves out ranks that wait, or meets elsewhere.
        """
        in_order = tuple(node for node in self.nodes if node in wanted.nodes)
        if wanted.nodes != in_order or not election.is_majority(in_order, self.nodes):
            raise ExpectedError("The group is not a majority of the attempt's nodes.")
        if wanted.nodes[0] != sender or wanted.address != self.intent.addresses[sender]:
            raise ExpectedError("A group is formed by its first node, at its own address.")
        if left_out := self.waiting.difference(wanted.nodes):
            raise ExpectedError(f"The group leaves out {' and '.join(sorted(left_out))}.")

    def _confirm(self, wanted: election.OfAttempt) -> dict[str, Any]:
        confirm(AttemptFolder(self.home, self.attempt.run_id, wanted.attempt), is_final=True)
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


def _with_manifest(stream: BinaryIO, chosen: CheckpointInfo | None = None) -> BinaryIO:
    """Return the stream of `files.send` in the form that `files.receive` expects.

    Raises:
        ExpectedError: its files are not those of the `chosen` checkpoint.
    """
    line = stream.readline(MAX_LINE_BYTES)
    # A malformed header is passed on: `files.receive` reports it.
    with contextlib.suppress(ValueError, KeyError, TypeError):
        header = json.loads(line)
        line = json.dumps({**header, "manifest": header["files"]}).encode("ascii") + b"\n"
    if chosen is not None:
        # Before a byte is stored: nothing comes that the writer has not signed.
        try:
            entries = [from_wire(FileEntry, value) for value in json.loads(line)["files"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ExpectedError("The transfer does not begin with its files.") from error
        signed = [entry for entry in entries if entry.path != run_layout.MANIFEST_FILE]
        if checkpoints.hash_entries(signed) != chosen.manifest_sha256:
            raise ExpectedError("The files are not those of the checkpoint that was signed.")
    return _WithManifest(line, stream)  # type: ignore[return-value]
