"""Messages and rules by which the nodes of an attempt recover it without a master.

Each node listens at its own address for the duration of the attempt (`agents/election`). Both ends
of a connection prove by TLS 1.3 that they have the attempt's credential, and sign each request and
answer with the node's own key, so a node speaks only for itself. A request is one line of JSON with
a `kind`, and so is its answer. The third column is the sender who may ask that:

    state    {}                  any    -> NodeState
    close    Closing             any    -> {}; with the master's word, nodes do not recover it;
             without it, the sender alone takes no part
    claim    AttemptClaim        any    -> ClaimAnswer; at most one claim gets each number, and
             only a lost part without a master grants one
    verify   OfStep              holder -> CheckpointInfo, every file compared with its hash
    fetch    Fetch               holder -> {}; copy that checkpoint from another node
    launch   Relaunch            holder -> {}; start this node's part of the next attempt
    confirm  OfAttempt           holder -> {}; every part of it was launched
    send     OfStep              any    -> the files of that checkpoint, as bytes, while a claim of
             that number is granted
    regroup  Regroup             first  -> {}; see `agents.contract.regroup`

`holder` is the node whose claim of that attempt number this node has granted. It may do nothing
while this node's part trains. A part that is launched but never confirmed ends by itself, as after
a launch by the master. An answer `{"error": text}` is a refusal. Attempts of a master of an earlier
version have no keys of nodes; there the credential alone decides. The arithmetic of votes and
limits is here, too, because the master follows the same rules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from agents.contract.mandate import AttemptProof, Handover
from agents.contract.names import (
    MAX_ATTEMPT,
    MAX_STEP,
    check_name,
    check_number,
    check_text,
    check_time,
)
from agents.contract.run import (
    MAX_GENERATION,
    CheckpointInfo,
    ElectionPlan,
    FailureCause,
    RankPlacement,
)

MAX_LOSSES_AT_ONE_STEP = 3
MAX_PARKED_S = 3600.0
"""How long after a loss nodes may recover it, in seconds."""
MAX_AHEAD, AHEAD_PER_S = 1000, 100
"""Maximum distance of a claimed number from that of the lost attempt, and its growth per second
since the loss: a number near `MAX_ATTEMPT` would be the last one of the run, and one that another
node has used up must not be the last one of the attempt."""
HOUR_S = 3600.0
BACK_OFF_S = (0.0, 5.0, 15.0, 60.0, 120.0, 300.0)
"""Wait after a loss by the number of recoveries within the last hour, in seconds; the last value
applies to all further ones."""


def is_majority(present: Collection[str], nodes: Sequence[str]) -> bool:
    """Return whether `present` may decide for a run on `nodes`, given in rank order.

    Of two halves of equal size, the one with rank 0 decides. Two groups without a common node
    can never both decide.

    >>> is_majority({"b", "c"}, ["a", "b", "c"]), is_majority({"a"}, ["a", "b", "c"])
    (True, False)
    >>> is_majority({"a"}, ["a", "b"]), is_majority({"b"}, ["a", "b"])
    (True, False)
    """
    votes = sum(node in present for node in nodes)
    return 2 * votes > len(nodes) or (2 * votes == len(nodes) and nodes[0] in present)


def stands_still(steps: Sequence[int]) -> bool:
    """Return whether the newest losses came without progress beyond the step of the first one.

    Args:
        steps: newest finished step at each loss, oldest loss first.

    >>> stands_still([4, 7, 7, 7]), stands_still([7, 7]), stands_still([7, 7, 8])
    (True, False, False)
    """
    # A loss that repeats at one step is likely caused by that step, such as its data or memory.
    newest = steps[-MAX_LOSSES_AT_ONE_STEP:]
    if len(newest) < MAX_LOSSES_AT_ONE_STEP:
        return False
    return all(step <= newest[0] for step in newest[1:])


def back_off_s(num_recent: int) -> float:
    """Return the wait after a loss, in seconds, given the number of recoveries within an hour."""
    return BACK_OFF_S[min(num_recent, len(BACK_OFF_S) - 1)]


PartState = Literal["active", "lost", "closed"]
"""State of one node's part of an attempt. `active`: its ranks are alive; `lost`: it ended because a
rank or node was lost; `closed`: nodes must not recover it, since it is done, a user stopped it, it
failed by itself, a master closed it, or a newer attempt exists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Closing:
    """Why a part must not be recovered, with the master's word if it is the reason."""

    reason: str = ""
    signature: str = ""
    """Master's signature of `closing_bytes`; empty: a part closed by itself, or was replaced."""
    successor: AttemptProof | None = None
    """Proof of a newer attempt of the run, which replaced this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OfStep:
    """A checkpoint, and the claim for which it is asked."""

    step: int
    attempt: int = 0

    def check_foreign(self) -> None:
        check_number("step", self.step, 0, MAX_STEP)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetch:
    """A checkpoint to have, and where to get it."""

    step: int
    node: str = ""
    """Node to copy the checkpoint from; empty if this node has it."""
    attempt: int = 0
    """Number of the claim for which it is asked."""
    checkpoint: CheckpointInfo | None = None
    """The checkpoint, with its writer's signature; None: attempts without keys of nodes."""

    def check_foreign(self) -> None:
        check_number("step", self.step, 0, MAX_STEP)


@dataclass(frozen=True, kw_only=True, slots=True)
class OfAttempt:
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeState:
    """State of an attempt, as one node knows it."""

    node: str
    part: PartState
    is_free: bool = False
    """True if no master has contacted the attempt for the plan's patience."""
    fence: int = 0
    """Newest attempt number that this node has granted."""
    step: int = 0
    """Newest step that its ranks have finished."""
    reason: str = ""
    """Reason why the part is lost or closed, as a sentence."""
    cause: FailureCause = ""
    """Cause of the end of its ranks; empty: nothing failed, or the cause is unknown."""
    is_peer_loss: bool = False
    """True if its ranks only lost ranks of another node, whose state has the cause."""
    ended_s: float | None = None
    """End of its ranks, in seconds since the epoch; None: not known."""
    generation: int = 0
    """Number of times that the ranks of its group have regrouped; see `agents.contract.regroup`."""
    waits: bool = False
    """True if all of its ranks are alive, have lost others, and wait to regroup after `step`."""
    has_lost_rank: bool = False
    """True if one of its ranks was killed or crashed, so that the part will end soon."""
    closing: Closing | None = None
    """Master's word that closed the part; None: it closed by itself."""

    @property
    def is_ready(self) -> bool:
        return self.part == "lost" and self.is_free

    def check_foreign(self) -> None:
        check_name("node", self.node)
        check_number("fence", self.fence, 0, MAX_ATTEMPT)
        check_number("step", self.step, 0, MAX_STEP)
        check_number("generation", self.generation, 0, MAX_GENERATION)
        check_text("reason", self.reason)
        check_time("ended_s", self.ended_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptClaim:
    """A request for the right to start an attempt."""

    attempt: int

    def check_foreign(self) -> None:
        check_number("attempt", self.attempt, 1, MAX_ATTEMPT)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimAnswer:
    """Answer to a claim, with the facts of the node that the next attempt needs."""

    is_granted: bool
    fence: int
    """Newest attempt number that this node has granted; the next claim must exceed it."""
    port: int = 0
    """Free port at its address for the ranks' store, in case rank 0 is placed there."""
    peer_port: int = 0
    """Free port at its address for the messages of this module."""
    checkpoints: tuple[CheckpointInfo, ...] = ()
    saved_steps: tuple[int, ...] = ()
    """Newest steps at which this node saved or received a checkpoint, even if it was deleted
    since."""
    generation: int = 0
    members: tuple[str, ...] = ()
    """Nodes of the newest group of survivors that this node was in; empty: no group."""
    consent: str = ""
    """This node's signature of `consent_bytes`; empty: attempts without keys of nodes."""

    def check_foreign(self) -> None:
        check_number("fence", self.fence, 0, MAX_ATTEMPT)
        check_number("generation", self.generation, 0, MAX_GENERATION)
        for node in self.members:
            check_name("members", node)
        for step in self.saved_steps:
            check_number("saved_steps", step, 0, MAX_STEP)


@dataclass(frozen=True, kw_only=True, slots=True)
class Relaunch:
    """Parameters of the next attempt that all nodes share; each node's intent has the rest."""

    attempt: int
    ranks: tuple[RankPlacement, ...]
    master_address: str
    master_port: int
    resume_step: int | None
    checkpoint_ranks: tuple[int, ...]
    addresses: dict[str, str]
    plan: ElectionPlan
    handover: Handover | None = None
    """Consents of its nodes; None: attempts without keys of nodes."""

    def check_foreign(self) -> None:
        # A step is None for a start from the beginning, hence `or 0`.
        check_number("attempt", self.attempt, 1, MAX_ATTEMPT)
        check_number("resume_step", self.resume_step or 0, 0, MAX_STEP)


# ------------------------------------------------------------------------------------- election


@dataclass(frozen=True, kw_only=True, slots=True)
class ElectionDecision:
    """Next action of one node. `wait` is also how a minority stays parked until nodes return."""

    act: Literal["wait", "close", "propose"]
    members: tuple[str, ...] = ()
    """Nodes of the next attempt, in rank order."""
    reason: str = ""
    decider: str = ""
    """Other node that starts the next attempt, for which this one waits; empty: for none."""


def decide_election(
    me: str, nodes: Sequence[str], states: dict[str, NodeState], passed_over: Collection[str] = ()
) -> ElectionDecision:
    """Decide how a node handles a lost attempt. Pure.

    Safety does not depend on this decision: a claim without a majority starts nothing. It only
    keeps nodes from competing claims.

    Args:
        me: name of the node.
        nodes: all nodes of the attempt, in rank order.
        states: state of each reachable node, its own included.
        passed_over: nodes that had their time to start the attempt and did not.
    """
    # One closed part closes the attempt: its node may know of a user's stop that others missed.
    for state in states.values():
        if state.part == "closed":
            return ElectionDecision(act="close", reason=state.reason)
    # In rank order, so all nodes choose the same first one.
    ready = tuple(node for node in nodes if node in states and states[node].is_ready)
    if len(ready) < len(states):
        return ElectionDecision(act="wait", reason="another node still trains or has a master")
    if not is_majority(ready, nodes):
        return ElectionDecision(act="wait", reason="too few of the run's nodes can be reached")
    decider = next((node for node in ready if node not in passed_over), ready[0])
    if decider != me:
        return ElectionDecision(act="wait", reason=f"{decider} decides", decider=decider)
    return ElectionDecision(act="propose", members=ready)


def renumber(ranks: Sequence[RankPlacement], members: Collection[str]) -> tuple[RankPlacement, ...]:
    """Return the ranks on `members`, numbered from 0 in their old order."""
    kept = [place for place in ranks if place.node in members]
    return tuple(
        RankPlacement(
            rank=rank,
            local_rank=place.local_rank,
            node=place.node,
            device=place.device,
            device_id=place.device_id,
        )
        for rank, place in enumerate(kept)
    )


def recent_recoveries(resumed_s: Iterable[float | None], now_s: float) -> list[float]:
    """Return the times of recoveries within the last hour, oldest first.

    Args:
        resumed_s: time of the relaunch after each loss; None: no relaunch.
        now_s: current time, in seconds since the epoch.
    """
    # A clock that was set back must not block a run for long, hence `<= now_s`.
    times = (time_s for time_s in resumed_s if time_s is not None)
    return sorted(time_s for time_s in times if now_s - HOUR_S < time_s <= now_s)
