"""The process that watches an attempt and recovers it if no master does.

It listens for the other nodes of the attempt, at one address of this node, from launch to end.

- While ranks load, it tells their supervisor if the part of another node has ended.
- While ranks train, it only answers requests.
- When ranks wait because they lost peers, it regroups them with those of the other nodes, with or
  without a master: see `Regrouping`.
- When the attempt was lost and no master has asked for longer than the plan's patience, it polls
  the other nodes and carries out the common decision (`agents/contract/election.py`).

It ends with the attempt, when a newer attempt starts, on a stop, and after an hour in which too few
nodes were reachable.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from agents.contract import election
from agents.contract.regroup import Regroup, decide_regroup
from agents.contract.run_layout import CLOSED_FILE, ELECTION_FILE, ENDED_PEER_FILE
from agents.contract.wire import WireError, to_wire
from agents.election.channel import Listener, Peer, PeerError
from agents.election.grants import DECIDE_S
from agents.election.part import Part
from agents.election.peer_states import Answers, PeerStates
from agents.election.proposal import Proposal, RefusedError
from agents.errors import ExpectedError
from agents.node.probes import choose_port
from agents.state import Home, identify, read_json, write_json
from agents.supervisor.attempt import AttemptFolder, is_confirmed, read_regroup
from agents.supervisor.election_process import close
from agents.supervisor.fence import read_fence
from agents.supervisor.ownership import OwnershipWatch
from agents.supervisor.regrouping import give_up, read_local_ranks

FAILED_FILE = "failed-nodes.json"
"""Nodes that granted an attempt and did not start it, with the attempt of their master."""
TICK_S = 0.5
REGROUP_TICK_S = 0.1
"""Time between two polls while ranks wait to regroup, in seconds."""
SETTLE_S = 2.0
"""Time for which the set of reachable nodes must not change before a claim, in seconds."""
PEERS_PAUSE_S = 2.0
"""Time between two polls while ranks load, in seconds."""
CLOSED_POLLS = 5
"""Number of these polls that must find a part ended on purpose or by its own error."""
HELD_BACK_S = 120.0
"""Maximum time for which a node that still trains, or has a master, keeps a majority from
recovering, in seconds."""
FENCE_LAG_S = 10.0
"""Upper bound of the difference between the times at which two nodes notice a loss, in seconds."""
BIND_RETRY_S = 5.0
_RETRY_S = (2.0, 6.0)
"""Shortest and longest wait after a failed claim, in seconds."""
PATIENCE_S = 20.0
"""Maximum time for waiting ranks to regroup, in seconds."""
LOOK_S = 0.5
"""Maximum time for answers per poll, in seconds; later answers count in a later poll."""
REGROUP_SETTLE_S = 1.5
"""Time for which the same ranks must wait before silent nodes are left out, in seconds."""
ALONE_S = 5.0
"""Maximum wait for silent nodes when there is no majority without them, in seconds."""
JOIN_TIMEOUT_S = 8.0
"""Maximum time for the answer to a join request, in seconds; above a node's wait for a lock."""


def elect(folder: str) -> int:
    """Watch the attempt in `folder` from a child process; the calling process exits at once."""
    if os.fork():
        os._exit(0)
    os.setsid()  # the end of the server's SSH session must not end this process
    path = Path(folder)
    attempt = AttemptFolder(Home(path.parents[3]), path.parents[1].name, int(path.name))
    intent, identity = attempt.read_intent(), identify(os.getpid())
    if intent is None or identity is None:
        raise SystemExit(f"{folder}: the intent or /proc cannot be read")
    write_json(attempt.file(ELECTION_FILE), identity.to_json())
    # SIGTERM ends this process alone: ranks that it launches are children of their supervisors.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ElectionWatch(Part(attempt, intent)).run()
    return 0


class ElectionWatch:
    """Main loop of the process."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._listener: Listener | None = None
        self._bind_due_s = 0.0
        self._lost_since_s: float | None = None
        self._members: tuple[str, ...] = ()
        self._members_since_s = 0.0
        self._not_before_s = 0.0
        self._decider: tuple[str, float] = ("", 0.0)
        """Other node that decides, and since when this one waits for it."""
        self._has_passed = False
        self._held_back_s: float | None = None
        """Since when a majority is ready, but another node is not."""
        self._said = ""
        # Time of the next poll while ranks load; None: they have begun to train.
        self._peers_due_s: float | None = 0.0
        # Number of consecutive polls that found a part ended.
        self._num_ended = 0
        # Normally the recorder replaces a killed supervisor; it may have been killed as well.
        self._ownership = OwnershipWatch(part.home)
        self._others = PeerStates(part.peers)
        self._regrouping = Regrouping(part, self._others, self._say)

    def run(self) -> None:
        """Watch the attempt until nothing is left to do."""
        try:
            # A deleted run ends the watch.
            while self._part.attempt.folder.is_dir():
                self._listen()
                if not self._look(time.monotonic()):
                    return
                time.sleep(REGROUP_TICK_S if self._regrouping.is_under_way else TICK_S)
        finally:
            self._others.close()
            if self._listener is not None:
                self._listener.close()

    def _listen(self) -> None:
        """Start listening unless a try failed recently: another program may use the port."""
        part, now_s = self._part, time.monotonic()
        if self._listener is not None or not part.peers or now_s < self._bind_due_s:
            return
        intent, port = part.intent, part.plan.ports[part.node]
        try:
            self._listener = Listener(
                intent.address, port, intent.credential, part.answer, part.member, part.tell
            )
        except OSError as error:
            self._bind_due_s = now_s + BIND_RETRY_S
            self._say(f"cannot listen at {intent.address} port {port}: {error}")

    def _look(self, now_s: float) -> bool:
        """Do the due work; return whether to continue."""
        try:
            own = self._part.state()
        except ExpectedError:  # the run is being deleted
            return False
        if own.part == "closed":
            # Perhaps closed by the next attempt, whose confirmation arrives through this process.
            self._await_confirmation()
            self._notify_others(own.reason, own.closing)
            return False
        if own.part == "active":
            self._ownership.look()
            self._lost_since_s = None
            self._regrouping.look(own, now_s)
            self._watch_peers(now_s)
            return True
        if self._lost_since_s is None:
            self._lost_since_s = now_s
        if now_s - self._lost_since_s > election.MAX_PARKED_S:
            self._say("parked for an hour: resume the run from a master")
            return False
        return not own.is_free or self._decide(own, now_s)

    def _watch_peers(self, now_s: float) -> None:
        """Name a node whose part has ended to the supervisor, while ranks load.

        Ranks that train notice it by their connections, which do not exist yet.
        """
        attempt = self._part.attempt
        if self._peers_due_s is None or now_s < self._peers_due_s:
            return
        self._peers_due_s = now_s + PEERS_PAUSE_S
        if read_local_ranks(attempt).has_begun or attempt.file(ENDED_PEER_FILE).exists():
            self._peers_due_s = None
            return
        ended = [s for s in self._others.look(0.0).states.values() if s.part != "active"]
        self._num_ended = self._num_ended + 1 if ended else 0
        for state in sorted(ended, key=lambda state: state.part != "lost")[:1]:
            # A stop reaches the nodes one after the other, and then ends the ranks here as well.
            if state.part == "closed" and self._num_ended < CLOSED_POLLS:
                break
            self._say(f"the part of {state.node} has ended: {state.reason}")
            with contextlib.suppress(ExpectedError):  # disk full: tried again
                named = {"node": state.node, "reason": state.reason}
                write_json(attempt.file(ENDED_PEER_FILE), named)

    def _await_confirmation(self) -> None:
        """Keep answering until the next attempt, which this node granted, is confirmed.

        The elected node sends `launch` and `confirm` to this process: the new attempt has its own
        process, which listens on other ports.
        """
        part = self._part
        deadline = time.monotonic() + (part.intent.confirm_s or 0.0)
        while time.monotonic() < deadline and part.attempt.folder.is_dir():
            # The fence rises when a number is granted; the launch here may follow much later.
            number = read_fence(part.home, part.attempt.run_id)
            following = AttemptFolder(part.home, part.attempt.run_id, number)
            intent = following.read_intent()
            if number <= part.attempt.number or (intent and is_confirmed(following, intent)):
                return
            time.sleep(0.1)

    def _decide(self, own: election.NodeState, now_s: float) -> bool:
        part = self._part
        # No time limit: a claim needs the state of every node that can answer.
        states = {part.node: own, **self._believe(self._others.look().states)}
        if part.beliefs is not None:
            self._pass_over_starter()
            states = self._leave_out(states, now_s)
        found = election.decide_election(
            part.node, part.nodes, states, part.grants.passed_over if part.beliefs else ()
        )
        if found.act == "close":
            self._await_confirmation()
            closing = next(s.closing for s in states.values() if s.part == "closed")
            self._close(found.reason, closing)
            return False
        if found.members != self._members:
            self._members, self._members_since_s = found.members, now_s
        proposal = Proposal(part, states)
        if found.act == "wait":
            self._say(f"waiting: {found.reason}")
            if part.beliefs is not None:
                self._wait_for(found.decider, proposal, now_s)
            return not part.attempt.file(CLOSED_FILE).exists()
        if now_s < max(self._members_since_s + SETTLE_S, self._not_before_s):
            return True
        if not self._is_within_limits(proposal.newest_step(), now_s):
            return True
        try:
            number = proposal.carry_out(found.members)
        except RefusedError as error:
            self._say(f"not started: {error}")
            if part.beliefs is not None:
                self._remember_failed(proposal.failed)
                part.grants.withdraw(part.node)
            # Random, so that two competing nodes do not block each other's claims forever.
            self._not_before_s = time.monotonic() + random.uniform(*_RETRY_S)
            return True
        self._say(f"started attempt {number} on {', '.join(found.members)}")
        return False

    def _believe(self, states: dict[str, election.NodeState]) -> dict[str, election.NodeState]:
        """Return the states of the others that count; see `Beliefs`."""
        part = self._part
        if part.beliefs is not None:
            states = part.beliefs.judge(states, part.last_claimable(FENCE_LAG_S))
        part.known = states
        return states

    def _leave_out(
        self, states: dict[str, election.NodeState], now_s: float
    ) -> dict[str, election.NodeState]:
        """Return the states without nodes that keep a ready majority from continuing."""
        part, failed = self._part, read_json(self._failed_file) or {}
        fit = {
            node: state
            for node, state in states.items()
            if node == part.node or failed.get(node) != part.first_attempt
        }
        if election.is_majority(fit, part.nodes):
            states = fit
        ready = {node: state for node, state in states.items() if state.is_ready}
        if len(ready) == len(states) or not election.is_majority(ready, part.nodes):
            self._held_back_s = None
            return states
        if self._held_back_s is None:
            self._held_back_s = now_s
        # One that still trains, or has a master, is waited for, but not for ever: it may lie.
        return ready if now_s - self._held_back_s >= HELD_BACK_S else states

    def _pass_over_starter(self) -> None:
        """Let another node try, once, if the one that started this attempt did not confirm it."""
        part, starter = self._part, self._part.plan.started_by
        if not self._has_passed and not part.was_started and starter != part.node:
            part.grants.pass_over(starter)
            part.tell(starter, "confirm", "it did not confirm this attempt", is_refused=True)
        self._has_passed = True

    def _wait_for(self, decider: str, proposal: Proposal, now_s: float) -> None:
        """Wait for another node that decides; pass it over once it had its time."""
        if decider != self._decider[0]:
            self._decider = decider, now_s
        # Limits hold for all nodes alike, so that none of them has to be believed.
        if not decider or not self._is_within_limits(proposal.newest_step(), now_s):
            self._decider = decider, now_s
            return
        grants = self._part.grants
        # A granted claim has a longer time of its own.
        if grants.holder != decider and now_s - self._decider[1] >= DECIDE_S:
            grants.pass_over(decider)
            self._part.tell(decider, "claim", "it did not start the attempt", is_refused=True)

    @property
    def _failed_file(self) -> Path:
        part = self._part
        return part.home.run(part.attempt.run_id) / FAILED_FILE

    def _remember_failed(self, failed: Mapping[str, str]) -> None:
        """Leave out nodes that granted an attempt and did not start it, until a master resumes."""
        others = {node: why for node, why in failed.items() if node != self._part.node}
        for node, why in others.items():
            self._part.tell(node, "launch", f"it is left out: {why}", is_refused=True)
        if others:
            known = read_json(self._failed_file) or {}
            known.update(dict.fromkeys(others, self._part.first_attempt))
            with contextlib.suppress(ExpectedError):  # a full disk: it is asked again
                write_json(self._failed_file, known)

    def _is_within_limits(self, step: int, now_s: float) -> bool:
        """Return whether the run may be recovered now; close it if it makes no progress."""
        losses, per_hour = self._part.plan.losses, self._part.plan.per_hour
        steps = [loss.step for loss in losses]
        if election.stands_still([*steps, step] if self._part.counts_loss else steps):
            times = election.MAX_LOSSES_AT_ONE_STEP
            self._close(f"it was lost {times} times at step {step} without progress")
            return False
        # Each attempt carries its earlier losses, so limits hold across attempts and nodes.
        recent = election.recent_recoveries((loss.resumed_s for loss in losses), time.time())
        since_s = now_s - (self._lost_since_s if self._lost_since_s is not None else now_s)
        if len(recent) >= per_hour or since_s < election.back_off_s(len(recent)):
            self._say(f"waiting: {len(recent)} recoveries within an hour")
            return False
        return True

    def _notify_others(self, reason: str, closing: election.Closing | None = None) -> None:
        """Notify the other nodes once that this one takes no part, or that none of them need to."""
        said = replace(closing or election.Closing(), reason=reason or "it has ended")

        def notify(peer: Peer) -> None:
            with contextlib.suppress(PeerError):
                peer.ask("close", **to_wire(said))

        if peers := list(self._part.peers.values()):
            with ThreadPoolExecutor(len(peers)) as pool:
                list(pool.map(notify, peers))

    def _close(self, reason: str, closing: election.Closing | None = None) -> None:
        self._say(f"closed: {reason}")
        with contextlib.suppress(ExpectedError):
            close(self._part.attempt, reason, closing)
        self._notify_others(reason, closing)

    def _say(self, text: str) -> None:
        """Write a line to the log unless it repeats the last one."""
        if text != self._said:
            self._said = text
            print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


class Regrouping:
    """Regrouping of the surviving ranks after a loss, while their processes are alive.

    Each node with waiting ranks polls the others. Once all remaining ranks wait at the same step,
    the node with the lowest rank asks the others to join a new group of the same attempt. A silent
    node is left out once it missed its time for an answer and the others have not changed for
    `REGROUP_SETTLE_S`. After `PATIENCE_S` the ranks save and end; then the attempt is recovered
    like any other.
    """

    def __init__(self, part: Part, others: PeerStates, say: Callable[[str], None]) -> None:
        self._part = part
        self._others = others
        self._say = say
        self._since_s: float | None = None
        self._members: tuple[str, ...] = ()
        self._members_since_s = 0.0

    @property
    def is_under_way(self) -> bool:
        """True while ranks of this node wait for other nodes."""
        return self._since_s is not None

    def look(self, own: election.NodeState, now_s: float) -> None:
        """Regroup, wait or give up, as the states of this node (`own`) and the others require."""
        if not own.waits:
            self._since_s, self._members = None, ()
            self._part.waiting = frozenset()
            return
        if self._since_s is None:
            self._since_s = now_s
            # Answers from before the loss would show nodes that are gone now.
            self._others.forget()
        joined = read_regroup(self._part.attempt)
        if joined is not None and joined.generation > own.generation:
            return  # the ranks are joining the new group, or they fail and end
        part, answers = self._part, self._others.look(LOOK_S)
        others = answers.states
        if part.beliefs is not None:
            others = part.beliefs.judge(others, part.last_claimable(), own.generation)
        states = {own.node: own, **others}
        part.waiting = frozenset(
            node for node, s in states.items() if s.waits and s.generation == own.generation
        )
        found = decide_regroup(own.node, part.nodes, states, part.attempt.number)
        if found.nodes != self._members:
            self._members, self._members_since_s = found.nodes, now_s
        # Without a majority, waiting longer only delays saving and recovery.
        lacks_others = found.act == "wait" and not found.is_certain
        patience_s = ALONE_S if lacks_others else PATIENCE_S
        if found.act == "give_up" or now_s - self._since_s >= patience_s:
            self._say(f"the ranks do not regroup: {found.reason or 'it took too long'}")
            self._give_up()
        elif found.act == "wait":
            self._say(f"regrouping waits: {found.reason}")
        elif found.is_certain or self._are_away(states, answers, now_s):
            self._carry_out(found.nodes, own.generation + 1)

    def _are_away(
        self, states: dict[str, election.NodeState], answers: Answers, now_s: float
    ) -> bool:
        """Return whether all nodes without an answer can be left out."""
        # A node whose request is still pending is neither silent nor known: wait for it.
        missing = set(self._part.nodes) - states.keys()
        return missing <= answers.silent and now_s - self._members_since_s >= REGROUP_SETTLE_S

    def _carry_out(self, nodes: tuple[str, ...], generation: int) -> None:
        """Ask all nodes to join the new group, this one last."""
        part = self._part
        wanted = Regroup(
            generation=generation,
            nodes=nodes,
            address=part.intent.address,
            port=choose_port(part.intent.address, part.ports),
        )
        others = [part.peers[node] for node in nodes if node != part.node]
        try:
            with ThreadPoolExecutor(len(others)) as pool:
                asked = [
                    pool.submit(peer.ask, "regroup", JOIN_TIMEOUT_S, **to_wire(wanted))
                    for peer in others
                ]
            for answer in asked:
                answer.result()
            # Last, because this node hosts the new group: if another refused, none can form.
            part.ask("regroup", to_wire(wanted))
        except (PeerError, ExpectedError, WireError) as error:
            self._say(f"not regrouped: {getattr(error, 'message', error)}")
            self._give_up()
            return
        self._say(f"generation {generation} continues on {', '.join(nodes)}")

    def _give_up(self) -> None:
        with contextlib.suppress(ExpectedError):  # disk full: the ranks end by their own timeout
            give_up(self._part.attempt)
