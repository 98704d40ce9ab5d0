"""The process that watches an attempt beside its supervisor, and recovers it if nobody else does.

It listens for the other nodes of the attempt, at the node's one address, from the launch to the
attempt's end. While ranks train it only answers; ranks that have lost others and wait are brought
together with those of the other nodes, with or without a master (`regrouping`). Once the attempt
was lost, and no master has asked for the patience of the plan, it asks the other nodes now and then
and does what they agree on (`agents/contract/election.py`). It ends with the attempt, with a newer
one, on a stop, and after an hour in which too few nodes could be reached.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agents.contract.election import (
    MAX_LOSSES_AT_ONE_STEP,
    MAX_PARKED_S,
    NodeState,
    back_off_s,
    decide_election,
    recent_recoveries,
    stands_still,
)
from agents.contract.regroup import Regroup, decide_regroup
from agents.contract.run_layout import ELECTION_FILE
from agents.contract.wire import WireError, to_wire
from agents.election.channel import Listener, Peer, PeerError
from agents.election.part import Part
from agents.election.peer_states import Answers, PeerStates
from agents.election.proposal import Proposal, RefusedError
from agents.errors import ExpectedError
from agents.node.probes import choose_port
from agents.state import Home, identify, write_json
from agents.supervisor.attempt import AttemptFolder, is_confirmed, read_regroup
from agents.supervisor.election_process import close
from agents.supervisor.fence import read_fence
from agents.supervisor.ownership import OwnershipWatch
from agents.supervisor.regrouping import give_up

TICK_S = 0.5
REGROUP_TICK_S = 0.1
"""Time between two looks while ranks wait for other nodes to go on, in seconds."""
SETTLE_S = 2.0
"""Time for which the same nodes have to be reachable before one of them claims, in seconds."""
BIND_RETRY_S = 5.0
_RETRY_S = (2.0, 6.0)
"""Shortest and longest wait after a claim that failed, in seconds."""
PATIENCE_S = 20.0
"""Time for ranks that wait until they are together again, in seconds."""
LOOK_S = 0.5
"""Time for answers in one look, in seconds; a node that takes longer counts in a later one."""
REGROUP_SETTLE_S = 1.5
"""Time for which the same ranks have to wait before they go on without silent nodes, in seconds."""
ALONE_S = 5.0
"""Time for silent nodes without which the ranks cannot go on, in seconds."""
JOIN_TIMEOUT_S = 8.0
"""Time for a node's answer to the request to join, in seconds: more than it waits for a lock."""


def elect(folder: str) -> int:
    """Watch the attempt in `folder`; the calling process ends at once, its child at the end."""
    if os.fork():
        os._exit(0)
    os.setsid()
    path = Path(folder)
    attempt = AttemptFolder(Home(path.parents[3]), path.parents[1].name, int(path.name))
    intent, identity = attempt.read_intent(), identify(os.getpid())
    if intent is None or identity is None:
        raise SystemExit(f"{folder}: the intent or /proc cannot be read")
    write_json(attempt.file(ELECTION_FILE), identity.to_json())
    # Ranks that it launches are children of their own supervisors; SIGTERM ends this one alone.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ElectionWatch(Part(attempt, intent)).run()
    return 0


class ElectionWatch:
    """The loop of the process."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._listener: Listener | None = None
        self._bind_due_s = 0.0
        self._lost_since_s: float | None = None
        self._members: tuple[str, ...] = ()
        self._members_since_s = 0.0
        self._not_before_s = 0.0
        self._said = ""
        # Where the recorder was killed, too, nobody else on this node looks.
        self._ownership = OwnershipWatch(part.home)
        self._others = PeerStates(part.peers)
        self._regrouping = Regrouping(part, self._others, self._say)

    def run(self) -> None:
        """Return when there is nothing more to do."""
        try:
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
        """Listen, unless that was tried moments ago: another program may use the port."""
        part, now_s = self._part, time.monotonic()
        if self._listener is not None or not part.peers or now_s < self._bind_due_s:
            return
        intent, port = part.intent, part.plan.ports[part.node]
        try:
            self._listener = Listener(intent.address, port, intent.credential, part.answer)
        except OSError as error:
            self._bind_due_s = now_s + BIND_RETRY_S
            self._say(f"cannot listen at {intent.address} port {port}: {error}")

    def _look(self, now_s: float) -> bool:
        """Do what is due; return whether to go on."""
        try:
            own = self._part.state()
        except ExpectedError:  # the run is being deleted
            return False
        if own.part == "closed":
            self._await_confirmation()
            self._tell_others(own.reason)
            return False
        if own.part == "active":
            self._ownership.look()
            self._lost_since_s = None
            self._regrouping.look(own, now_s)
            return True
        if self._lost_since_s is None:
            self._lost_since_s = now_s
        if now_s - self._lost_since_s > MAX_PARKED_S:
            self._say("parked for an hour: a master or a person has to resume it")
            return False
        return not own.is_free or self._decide(own, now_s)

    def _await_confirmation(self) -> None:
        """Answer on until the attempt that this node has granted instead is confirmed.

        The node that starts it asks this process for the launch and for that, since the new
        attempt has a process of its own that knows nothing of the old ports.
        """
        part = self._part
        deadline = time.monotonic() + (part.intent.confirm_s or 0.0)
        while time.monotonic() < deadline and part.attempt.folder.is_dir():
            # A number is granted before it is launched here, which may come later than elsewhere.
            number = read_fence(part.home, part.attempt.run_id)
            following = AttemptFolder(part.home, part.attempt.run_id, number)
            intent = following.read_intent()
            if number <= part.attempt.number or (intent and is_confirmed(following, intent)):
                return
            time.sleep(0.1)

    def _decide(self, own: NodeState, now_s: float) -> bool:
        part = self._part
        states = {part.node: own, **self._others.look().states}
        found = decide_election(part.node, part.nodes, states)
        if found.act == "close":
            self._await_confirmation()
            self._close(found.reason)
            return False
        if found.members != self._members:
            self._members, self._members_since_s = found.members, now_s
        if found.act == "wait":
            self._say(f"waiting: {found.reason}")
            return True
        proposal = Proposal(part, states)
        if now_s < max(self._members_since_s + SETTLE_S, self._not_before_s):
            return True
        if not self._is_within_limits(proposal.newest_step(), now_s):
            return True
        try:
            number = proposal.carry_out(found.members)
        except RefusedError as error:
            self._say(f"not started: {error}")
            # Two nodes that claim against each other must not do so in step.
            self._not_before_s = time.monotonic() + random.uniform(*_RETRY_S)
            return True
        self._say(f"started attempt {number} on {', '.join(found.members)}")
        return False

    def _is_within_limits(self, step: int, now_s: float) -> bool:
        """Return whether the run may be recovered now; close it for good where it may not."""
        losses, per_hour = self._part.plan.losses, self._part.plan.per_hour
        if stands_still([*(loss.step for loss in losses), step]):
            times = MAX_LOSSES_AT_ONE_STEP
            self._close(f"it was lost {times} times at step {step} without getting further")
            return False
        recent = recent_recoveries((loss.resumed_s for loss in losses), time.time())
        since_s = now_s - (self._lost_since_s if self._lost_since_s is not None else now_s)
        if len(recent) >= per_hour or since_s < back_off_s(len(recent)):
            self._say(f"waiting: {len(recent)} recoveries within an hour")
            return False
        return True

    def _tell_others(self, reason: str) -> None:
        """Tell the other nodes once that the attempt is none of theirs to recover."""

        def tell(peer: Peer) -> None:
            with contextlib.suppress(PeerError):
                peer.ask("close", reason=reason or "it has ended")

        if peers := list(self._part.peers.values()):
            with ThreadPoolExecutor(len(peers)) as pool:
                list(pool.map(tell, peers))

    def _close(self, reason: str) -> None:
        self._say(f"closed: {reason}")
        with contextlib.suppress(ExpectedError):
            close(self._part.attempt, reason)
        self._tell_others(reason)

    def _say(self, text: str) -> None:
        """Write a line to the log, the same one once."""
        if text != self._said:
            self._said = text
            print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


class Regrouping:
    """What one node does while its ranks wait."""

    def __init__(
        self,
        part: Part,
        others: PeerStates,
        say: Callable[[str], None],
    ) -> None:
        self._part = part
        self._others = others
        self._say = say
        self._since_s: float | None = None
        self._members: tuple[str, ...] = ()
        self._members_since_s = 0.0

    @property
    def is_under_way(self) -> bool:
        """Whether ranks of this node wait."""
        return self._since_s is not None

    def look(self, own: NodeState, now_s: float) -> None:
        """Do what is due for ranks in the state `own`."""
        if not own.waits:
            self._since_s, self._members = None, ()
            return
        if self._since_s is None:
            self._since_s = now_s
            self._others.forget()
        joined = read_regroup(self._part.attempt)
        if joined is not None and joined.generation > own.generation:
            return  # the ranks are on their way, or fail and end
        part, answers = self._part, self._others.look(LOOK_S)
        states = {own.node: own, **answers.states}
        found = decide_regroup(own.node, part.nodes, states, part.attempt.number)
        if found.nodes != self._members:
            self._members, self._members_since_s = found.nodes, now_s
        lacks_others = found.act == "wait" and not found.is_certain
        patience_s = ALONE_S if lacks_others else PATIENCE_S
        if found.act == "give_up" or now_s - self._since_s >= patience_s:
            self._say(f"the ranks do not regroup: {found.reason or 'it took too long'}")
            self._give_up()
        elif found.act == "wait":
            self._say(f"regrouping waits: {found.reason}")
        elif found.is_certain or self._are_away(states, answers, now_s):
            self._carry_out(found.nodes, own.generation + 1)

    def _are_away(self, states: dict[str, NodeState], answers: Answers, now_s: float) -> bool:
        """Return whether the nodes that have not answered can be left out."""
        missing = set(self._part.nodes) - states.keys()
        return missing <= answers.silent and now_s - self._members_since_s >= REGROUP_SETTLE_S

    def _carry_out(self, nodes: tuple[str, ...], generation: int) -> None:
        """Ask all nodes to join, this one last; none joins if one refuses that was asked before."""
        part = self._part
        wanted = Regroup(
            generation=generation,
            nodes=nodes,
            address=part.intent.address,
            port=choose_port(part.intent.address),
        )
        others = [part.peers[node] for node in nodes if node != part.node]
        try:
            with ThreadPoolExecutor(len(others)) as pool:
                asked = [
                    pool.submit(peer.ask, "regroup", JOIN_TIMEOUT_S, **to_wire(wanted))
                    for peer in others
                ]
            for one in asked:
                one.result()
            part.ask("regroup", to_wire(wanted))
        except (PeerError, ExpectedError, WireError) as error:
            self._say(f"not regrouped: {getattr(error, 'message', error)}")
            self._give_up()
            return
        self._say(f"generation {generation} goes on with {', '.join(nodes)}")

    def _give_up(self) -> None:
        with contextlib.suppress(ExpectedError):  # a full disk: they end after a while
            give_up(self._part.attempt)
