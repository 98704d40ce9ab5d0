"""Beliefs of a node about what other nodes of its attempt say: they speak only for themselves.

A node may lie about itself, and is left out then. It cannot end, delete or start anything of the
others: a closed part counts with the master's word, a checkpoint with the signature of the node
that wrote it, and a step only if the ranks of this node have come that far, because all ranks of an
attempt train in step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from agents.contract.election import ClaimAnswer, Closing, NodeState, is_majority
from agents.contract.mandate import (
    Handover,
    ProvedAttempt,
    checkpoint_bytes,
    closing_bytes,
    consent_bytes,
    prove,
)
from agents.contract.run import AttemptIntent, CheckpointInfo
from agents.contract.signatures import verify
from agents.errors import ExpectedError
from agents.node import checkpoints
from agents.supervisor.attempt import AttemptFolder, find_attempts

STEPS_AHEAD = 1
"""Number of steps that a rank of another node can be ahead of those here."""


class Beliefs:
    """Checks of what other nodes say about one attempt, whose nodes have keys of their own."""

    def __init__(
        self, attempt: AttemptFolder, intent: AttemptIntent, proved: ProvedAttempt
    ) -> None:
        self._attempt = attempt
        self._intent = intent
        self._proved = proved
        self._nodes = proved.nodes
        self.keys = {node: proved.mandate.node_keys.get(node, "") for node in proved.nodes}
        """Public key of each node of the attempt."""
        self._older_keys = _find_older_keys(attempt, proved.master_key)
        self._resumed = _read_resumed(attempt, intent)

    def is_closing(self, closing: Closing | None) -> bool:
        """Return whether the master has ended the attempt, or a newer one has replaced it."""
        if closing is None:
            return False
        mandate, number = self._proved.mandate, self._intent.attempt
        if closing.signature:
            message = closing_bytes(mandate.run_id, number)
            return verify(self._proved.master_key, message, closing.signature)
        if closing.successor is None:
            return False
        newer = prove(closing.successor, is_majority)
        return (
            newer is not None
            and newer.master_key == self._proved.master_key
            and newer.mandate.run_id == mandate.run_id
            and newer.attempt > number
        )

    def judge(
        self, states: Mapping[str, NodeState], most_fence: int, generation: int | None = None
    ) -> dict[str, NodeState]:
        """Return the states of other nodes that count, without what only the master may say.

        Args:
            states: states by the node that gave them.
            most_fence: highest number that a node can have granted.
            generation: generation of this node's ranks if they wait to regroup. A part that has
                closed by itself is then a lost one; for a recovery (None), its node is not there.
        """
        found = {}
        for node, state in states.items():
            # Of another node, or one that claims numbers which would be the run's last.
            if state.node != node or state.fence > most_fence:
                continue
            is_gone = state.part == "closed" and not self.is_closing(state.closing)
            if is_gone and generation is None:
                continue
            found[node] = _leave_out(state) if is_gone else state
        if generation is None:
            return found
        # Whoever has gone on without this node, or has promised a newer attempt, joins no group of
        # this generation. That is no reason for the others to end: a majority has one group.
        return {n: self._left_out_if_ahead(s, generation) for n, s in found.items()}

    def _left_out_if_ahead(self, state: NodeState, generation: int) -> NodeState:
        is_ahead = state.generation > generation or state.fence > self._intent.attempt
        return _leave_out(state) if is_ahead and state.part != "closed" else state

    def is_proved(self, info: CheckpointInfo) -> bool:
        """Return whether a node of the run has signed a checkpoint, or the master brought it."""
        if info.run_id != self._attempt.run_id or not info.manifest_sha256:
            return False
        if (info.step, info.manifest_sha256) == self._resumed:
            return True
        about = info.run_id, info.attempt, info.step, info.manifest_sha256, info.signer
        keys = {self.keys.get(info.signer), self._proved.mandate.node_keys.get(info.signer)}
        keys.update(known.get(info.signer) for known in self._older_keys)
        return any(verify(key, checkpoint_bytes(*about), info.signature) for key in keys if key)

    def is_usable(self, info: CheckpointInfo, step: int) -> bool:
        """Return whether a run at `step` can continue from a checkpoint that somebody signed."""
        started = self._intent.resume_step or 0
        if info.attempt == self._intent.attempt:
            # This attempt writes only steps after the one from which it started.
            return started < info.step <= max(step, started) + STEPS_AHEAD
        # It has continued from an earlier attempt's checkpoint: later ones of those are void.
        return info.attempt < self._intent.attempt and info.step <= started

    def age(self, info: CheckpointInfo) -> tuple[int, int]:
        """Return the sort key of checkpoints: a later attempt is newer than any earlier step."""
        return info.attempt, info.step

    def consents(self, answer: ClaimAnswer, attempt: int, node: str) -> bool:
        """Return whether an answer has the node's consent to an attempt."""
        message = consent_bytes(self._attempt.run_id, attempt, self._intent.attempt, node)
        return verify(self.keys.get(node, ""), message, answer.consent)

    def hand_over(self, attempt: int, granted: Mapping[str, ClaimAnswer]) -> Handover:
        """Return the proof that the nodes of the next attempt have granted it."""
        consents = {node: answer.consent for node, answer in granted.items()}
        return Handover(attempt=attempt, replaces=self._intent.attempt, consents=consents)


def _leave_out(state: NodeState) -> NodeState:
    """Return the state of a node that takes no part in a group."""
    return NodeState(node=state.node, part="lost", step=state.step, reason=state.reason)


def _find_older_keys(attempt: AttemptFolder, master_key: str) -> list[dict[str, str]]:
    """Return the public keys of nodes of the run's earlier attempts, which wrote checkpoints."""
    found: list[dict[str, str]] = []
    for older in find_attempts(attempt.home):
        if older.run_id != attempt.run_id or older.number >= attempt.number:
            continue
        intent = older.read_intent()
        mandate = intent.proof.mandate.read() if intent is not None and intent.proof else None
        if intent is None or intent.proof is None or mandate is None:
            continue
        is_fitting = mandate.run_id == attempt.run_id and intent.proof.mandate.key == master_key
        if is_fitting and mandate.node_keys not in found:
            found.append(mandate.node_keys)
    return found


def _read_resumed(attempt: AttemptFolder, intent: AttemptIntent) -> tuple[int, str]:
    """Return step and manifest of the checkpoint with which the attempt was launched here."""
    with contextlib.suppress(ExpectedError):
        for info in checkpoints.list_checkpoints(attempt.home, attempt.run_id):
            if info.step == intent.resume_step:
                return info.step, info.manifest_sha256
    return -1, ""
