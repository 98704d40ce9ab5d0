"""Decide how an attempt ended on this node, and which rank was the cause.

A lost connection to another rank is a consequence, so a rank that a signal killed, or that recorded
its own failure, takes precedence. If all failed ranks only lost a peer, the cause is on another
node, and `peer_lost` reports this to the master.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from typing import Any

from agents.contract.run import AttemptIntent, AttemptState, FailureCause
from agents.shared.files.bounded_work import KILLS
from agents.supervisor.attempt import EXIT_USER_ERROR
from agents.supervisor.clocks import Sleep
from agents.supervisor.process_signs import describe_state
from agents.supervisor.ranks import RankProcess, find_telling_line
from agents.supervisor.stalls import Stall
from agents.supervisor.sweep import describe_unkillable

_PART = "The part of node "

PEER_LOST_WORDS = ("lost its connection to", "timed out waiting for")
"""Phrases in the trainer's own messages about a lost rank."""
PEER_LOST_SIGNS = (
    "connection reset by peer",
    "connection closed by peer",
    "connection refused",
    "broken pipe",
    "remote process exited",
    "ncclremoteerror",
    "socket timeout",
    "timed out waiting",
    "failed to connect",
    "connectfullmesh failed",
    "no route to host",
    "software caused connection abort",
    "peer closed",
    *PEER_LOST_WORDS,
)
"""Phrases of Gloo, NCCL and the TCP store about a lost rank, in lower case."""
SIGNAL_CAUSES = {
    signal.SIGSEGV: "a crash inside a library or a driver",
    signal.SIGBUS: "a crash, most often /dev/shm or the disk is full",
    signal.SIGABRT: "aborted by a library",
    **{signal.Signals(number): reason for number, (reason, _) in KILLS.items()},
}

KILL_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that other processes send to a rank."""


@dataclass(frozen=True)
class AttemptOutcome:
    state: AttemptState
    message: str = ""
    hint: str = ""
    peer_lost: bool = False
    lost_nodes: tuple[str, ...] = ()
    """Other nodes that do not answer."""
    cause: FailureCause = ""


def name_lost_nodes(outcome: AttemptOutcome, silent: tuple[str, ...]) -> AttemptOutcome:
    """Return the outcome with the names of the nodes that do not answer."""
    if not silent:
        return outcome
    return replace(
        outcome, message=f"{outcome.message} {describe_silence(silent)}.", lost_nodes=silent
    )


def describe_silence(silent: tuple[str, ...]) -> str:
    """Return a clause about nodes that do not answer.

    >>> describe_silence(("b", "c"))
    'Node b and c do not answer'
    """
    return f"Node {' and '.join(silent)} {'does' if len(silent) == 1 else 'do'} not answer"


def judge_away(
    ranks: list[RankProcess], intent: AttemptIntent, silent: tuple[str, ...], away_s: float
) -> AttemptOutcome:
    """Return the outcome of ranks that load while other nodes have not answered for too long."""
    places = [f"rank {rank.rank} in phase {_read_phase(rank)}" for rank in ranks]
    return AttemptOutcome(
        state="failed",
        message=f"Node {' and '.join(silent)} {'has' if len(silent) == 1 else 'have'} not answered "
        f"for {away_s:.0f} s while the ranks on node {intent.node} load ({', '.join(places)}).",
        peer_lost=True,
        lost_nodes=silent,
        cause="peer_lost",
    )


def judge_ended_peer(node: str, reason: str) -> AttemptOutcome:
    """Return the outcome of ranks that load while the part of another node has ended."""
    return AttemptOutcome(
        state="failed",
        # A node that ended because of another one names that one.
        message=reason if reason.startswith(_PART) else f"{_PART}{node} has ended: {reason}",
        peer_lost=True,
        cause="peer_lost",
    )


def name_stuck(outcome: AttemptOutcome, pids: list[int], node: str) -> AttemptOutcome:
    """Return the outcome of an attempt with processes that no signal ends."""
    message = f"{outcome.message} {describe_unkillable(pids, node)}".strip()
    # The cause is kept: it decides whether the run continues without this PC.
    return replace(outcome, state="failed", message=message, hint="Restart that PC")


def judge_end(
    ranks: list[RankProcess], intent: AttemptIntent, is_stop: bool = False
) -> AttemptOutcome:
    """Return the outcome of ranks that ended by themselves or after a stop request (`is_stop`)."""
    failed = [rank for rank in ranks if rank.has_failed]
    # After a stop, failures are expected: ranks lose each other as they end.
    if failed and not is_stop:
        return judge_failure(ranks, intent)
    reasons = {rank.read_last("finished").get("reason") for rank in ranks}
    # One stopped rank is enough; if all completed before the stop arrived, the run is done.
    if "stopped" in reasons or (is_stop and reasons != {"completed"}):
        late = [rank for rank in failed if not rank.was_ended]
        return AttemptOutcome(state="stopped", message=_describe_late(late, intent))
    return AttemptOutcome(state="done")


def judge_outside(
    outcome: AttemptOutcome, ranks: list[RankProcess], intent: AttemptIntent, *, is_node: bool
) -> AttemptOutcome:
    """Return the outcome of ranks that stopped without a request by the user or a master.

    Args:
        outcome: outcome with state "stopped".
        ranks: ranks of this node.
        intent: intent of the attempt.
        is_node: True if the supervisor itself got SIGTERM, as when the PC shuts down.
    """
    asked = [rank for rank in ranks if rank.read_last("finished").get("is_outside") is True]
    if not is_node and not asked:
        return outcome  # the signal went to ranks of another node
    whom = "the run" if is_node else f"rank {asked[0].rank}"
    # Ranks save after SIGTERM, too, so the user learns what was kept.
    saved = [line["step"] for rank in ranks if (line := rank.read_last("checkpoint"))]
    kept = f" Step {max(saved)} is saved." if saved else ""
    return AttemptOutcome(
        state="failed",
        message=f"The system of node {intent.node} asked {whom} to end (SIGTERM), as a PC does "
        f"that shuts down.{kept}",
        hint="If that PC was not shut down, see there what ended it: journalctl -b -n 200",
        cause="killed",
    )


def _describe_late(failed: list[RankProcess], intent: AttemptIntent) -> str:
    if not failed:
        return ""
    return f"While stopping, {_describe_exit(failed[0], intent)}"


def judge_failure(ranks: list[RankProcess], intent: AttemptIntent) -> AttemptOutcome:
    """Return the outcome for the rank that most likely caused the other failures."""
    failed = [rank for rank in ranks if rank.has_failed]
    # False sorts first: a rank with its own failure comes before those that lost a peer.
    cause = min(failed, key=lambda rank: (is_peer_lost(rank), rank.ended_s or 0.0))
    recorded = _read_failure(cause)
    message = _describe_exit(cause, intent)
    peer_lost = is_peer_lost(cause)
    if peer_lost and PEER_LOST_WORDS[0] not in message:
        message += " It lost its connection to another rank."
    if peer_lost:
        message += " Another node may have failed: check it first."
    return AttemptOutcome(
        state="failed",
        message=message,
        hint=str(recorded.get("hint", ""))
        or f"Read its log: rackless runs logs {intent.run_id} --rank {cause.rank}",
        peer_lost=peer_lost,
        cause="peer_lost" if peer_lost else _classify_exit(cause),
    )


def _classify_exit(rank: RankProcess) -> FailureCause:
    """Return the cause of a failure other than a lost peer."""
    code = rank.exit_code
    if _read_failure(rank).get("cause") == "diverged":
        return "diverged"
    # SIGVTALRM is sent by our own limit on computing time (`bounded_work`).
    if _read_failure(rank) or (code is not None and code >= 0) or code == -signal.SIGVTALRM:
        return "error"
    # No exit code: the supervisor was replaced. A rank that fails by itself leaves a record.
    if code is None or -code in KILL_SIGNALS:
        return "killed"
    return "crashed"


def describe_stall(
    stall: Stall, intent: AttemptIntent, silent: tuple[str, ...] = (), *, has_ended: bool = True
) -> str:
    """Return a sentence about a rank that stands still, with time, place and cause.

    Args:
        stall: rank that stands still.
        intent: intent of the attempt.
        silent: other nodes that do not answer, for which it waits.
        has_ended: False for a rank that may still continue.
    """
    place = "" if stall.step is None else f" after step {stall.step}"
    cause = describe_state(stall.process_state, stall.usage)
    if silent and stall.maybe_remote:
        patience = f"; this run waits up to {intent.outage_s:.0f} s for that to end"
        cause = f" {describe_silence(silent)}{'' if has_ended else patience}."
    elif stall.maybe_remote:
        cause = " It may be waiting for a rank on another node: check that one too."
    verb = "stood still" if has_ended else "has stood still"
    return (
        f"Rank {stall.rank.rank} on node {intent.node} ({stall.rank.device}) {verb} for "
        f"{stall.age_s:.0f} s in phase {stall.phase}{place}.{cause}"
    )


def judge_stall(
    stall: Stall, intent: AttemptIntent, silent: tuple[str, ...] = ()
) -> AttemptOutcome:
    """Return the outcome of a rank that hangs, given the other nodes that do not answer."""
    return AttemptOutcome(
        state="failed",
        message=describe_stall(stall, intent, silent),
        hint=f"Resume from the newest checkpoint: rackless runs resume {intent.run_id}",
        peer_lost=stall.maybe_remote,
        lost_nodes=silent if stall.maybe_remote else (),
        cause="stalled",
    )


def judge_sleep(sleep: Sleep, node: str, outcome: AttemptOutcome) -> AttemptOutcome:
    """Return the outcome of ranks that lost others because this PC slept."""
    return replace(
        outcome,
        message=f"{sleep.describe(node)} The other ranks did not wait that long.",
        peer_lost=False,
        cause="slept",
    )


def is_peer_lost(rank: RankProcess) -> bool:
    """Return whether a rank failed because it lost another rank."""
    # A lost peer raises an error or aborts the rank; it never ends it by these signals.
    if not rank.has_ended or rank.exit_code in (-signal.SIGKILL, -signal.SIGSEGV):
        return False
    recorded = str(_read_failure(rank).get("message", "")).lower()
    # The trainer explained the failure itself, so its log need not be searched.
    if rank.exit_code == EXIT_USER_ERROR and recorded:
        return any(words in recorded for words in PEER_LOST_WORDS)
    # Only the end of the log: an earlier reconnect that succeeded is not the cause.
    text = "\n".join([recorded, *rank.read_log_tail()[-12:]]).lower()
    return any(sign in text for sign in PEER_LOST_SIGNS)


def _read_failure(rank: RankProcess) -> dict[str, Any]:
    """Return the failure that the rank recorded, or an empty dict."""
    # A rank killed by a signal could not record it; an entry would be about something else.
    return rank.read_last("failed") if rank.exit_code and rank.exit_code > 0 else {}


def _describe_exit(rank: RankProcess, intent: AttemptIntent) -> str:
    where = f"Rank {rank.rank} on node {intent.node} ({rank.device})"
    phase = _read_phase(rank)
    recorded = str(_read_failure(rank).get("message", ""))
    if recorded:
        return f"{where} failed in phase {phase}: {recorded}"
    if rank.exit_code is not None and -rank.exit_code in KILL_SIGNALS:
        return f"{where} {explain_exit(rank)}."  # its log has no line about it
    last = find_telling_line(rank.read_log_tail())
    said = f"Its last line: {last}" if last else "Its log does not say why."
    if rank.exit_code is None:
        how = f"was ended in phase {phase} and left no record of it; its exit code is not known, "
        return f"{where} {how}since its supervisor was replaced. {said}"
    return f"{where} {explain_exit(rank)}. {said}"


def explain_exit(rank: RankProcess) -> str:
    """Return how and in which phase a rank ended, as a predicate for its name."""
    how = _name_exit(rank.exit_code or 0, rank.kill_cause)
    return f"{how} in phase {_read_phase(rank)}"


def _read_phase(rank: RankProcess) -> str:
    return str(rank.read_heartbeat().get("phase") or "starting")


def _name_exit(exit_code: int, kill_cause: str) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        number = signal.Signals(-exit_code)
    except ValueError:
        return f"was ended by signal {-exit_code}"
    # The kernel logs out-of-memory kills only; other signals have typical causes.
    cause = kill_cause if number == signal.SIGKILL else SIGNAL_CAUSES.get(number)
    return f"was ended by {number.name}" + (f" ({cause})" if cause else "")
