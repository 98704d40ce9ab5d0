"""Start the next attempt from the elected node.

The order is that of a resume by the master: claim the next number from a majority, choose a
checkpoint, copy it, launch on all nodes at once, confirm. A failure before the launch only uses up
the number. If the launch fails on one node, the attempt is never confirmed: its parts end, and
the nodes elect again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from agents.contract.election import ClaimAnswer, NodeState, Relaunch, is_majority, renumber
from agents.contract.run import (
    AttemptLoss,
    CheckpointInfo,
    ElectionPlan,
    FailureCause,
    choose_checkpoint_ranks,
)
from agents.contract.wire import WireError, from_wire, to_wire
from agents.election.channel import PeerError
from agents.election.part import Part
from agents.errors import ExpectedError

CLAIM_TIMEOUT_S = 30.0
VERIFY_TIMEOUT_S = 1800.0
FETCH_TIMEOUT_S = 3600.0
"""Maximum time to copy a checkpoint, in seconds; 100 GB need 15 minutes at 1 Gbit/s."""
LAUNCH_TIMEOUT_S = 180.0
T = TypeVar("T")


class RefusedError(Exception):
    """Raised when the next attempt cannot start now."""


class Proposal:
    """One try to start the next attempt on the nodes that grant it."""

    def __init__(self, part: Part, states: dict[str, NodeState]) -> None:
        self._part = part
        self._states = states

    def carry_out(self, members: Sequence[str]) -> int:
        """Start the next attempt on all `members` that grant it; return its number.

        Raises:
            RefusedError: no majority grants it, or no checkpoint is usable.
        """
        part = self._part
        # Above every number that any node has granted: each number is granted once per node.
        fences = [state.fence for state in self._states.values()]
        number = max(part.attempt.number, *fences) + 1
        answers = self._ask_all(members, "claim", ClaimAnswer, CLAIM_TIMEOUT_S, attempt=number)
        granted = {node: answer for node, answer in answers.items() if answer.is_granted}
        # The numbers granted so far are used up; another claim needs a higher one.
        if not is_majority(granted, part.nodes):
            raise RefusedError(f"attempt {number} was granted by {sorted(granted) or 'no node'}")
        step = self._prepare_checkpoint(granted)
        wanted = self._plan(number, granted, step)
        self._ask_each(granted, "launch", LAUNCH_TIMEOUT_S, **to_wire(wanted))
        # Only after all launches: an unconfirmed part ends by itself.
        self._ask_each(granted, "confirm", CLAIM_TIMEOUT_S, attempt=number)
        return number

    # ------------------------------------------------------------ checkpoint

    def _prepare_checkpoint(self, granted: dict[str, ClaimAnswer]) -> int | None:
        """Copy the newest intact checkpoint to all nodes; return its step, or None if none exists.

        The rule is that of a resume by the master: at most one newer, damaged checkpoint may be
        given up, because training repeats all steps since then.
        """
        self._require_writer(granted)
        saved = {step for answer in granted.values() for step in answer.saved_steps}
        found = {node: answer.checkpoints for node, answer in granted.items()}
        steps = {info.step for infos in found.values() for info in infos if not info.problem}
        for step in sorted(steps, reverse=True):
            holders = self._verify(step, found)
            if holders:
                if sum(newer > step for newer in saved) > 1:
                    break
                self._copy(step, holders, list(granted))
                return step
        if saved or steps:
            raise RefusedError(f"no intact copy of the checkpoint of step {max(saved | steps)}")
        return None

    def _require_writer(self, granted: dict[str, ClaimAnswer]) -> None:
        """Refuse if no node that saved checkpoints of this attempt takes part."""
        intent = self._part.intent
        chosen = intent.checkpoint_ranks
        # After a regroup the survivors chose new writers. Any majority includes a node of the
        # newest group, so the highest generation among the answers is the true one.
        newest = max(granted.values(), key=lambda answer: answer.generation)
        if newest.members:
            ranks = [place for place in intent.ranks if place.node in newest.members]
            chosen = choose_checkpoint_ranks(ranks, intent.spec.checkpoint.copies)
        writers = {intent.ranks[rank].node for rank in chosen}
        # Other nodes save only when a loss ends the attempt: nothing newer than their copy exists.
        writers.update(
            node
            for node, answer in granted.items()
            if any(info.attempt == intent.attempt for info in answer.checkpoints)
        )
        if not writers & set(granted):
            names = " and ".join(sorted(writers))
            raise RefusedError(f"the checkpoints are on {names}, which cannot be reached")

    def _verify(self, step: int, found: dict[str, tuple[CheckpointInfo, ...]]) -> list[str]:
        """Return the nodes with the newest intact copy of a step."""
        nodes = [node for node, infos in found.items() if any(i.step == step for i in infos)]
        checked = self._ask_all(nodes, "verify", CheckpointInfo, VERIFY_TIMEOUT_S, step=step)
        good = {node: info for node, info in checked.items() if info.verified}
        if not good:
            return []
        # Two attempts may have saved the same step; only one manifest may be used on all nodes.
        newest = max(good.values(), key=lambda info: (info.attempt, info.created_s))
        return [n for n, info in good.items() if info.manifest_sha256 == newest.manifest_sha256]

    def _copy(self, step: int, holders: list[str], nodes: list[str]) -> None:
        def fetch(node: str) -> None:
            # Holders are asked, too: they delete newer checkpoints.
            source = "" if node in holders else holders[0]
            self._ask(node, "fetch", FETCH_TIMEOUT_S, {"step": step, "node": source})

        _each(nodes, fetch)

    # ------------------------------------------------------------ launch

    def _plan(self, number: int, granted: dict[str, ClaimAnswer], step: int | None) -> Relaunch:
        part, now_s = self._part, time.time()
        ranks = renumber(part.intent.ranks, granted)
        first = ranks[0].node
        addresses = {node: part.intent.addresses[node] for node in granted}
        cause, reason = self._find_cause(granted)
        loss = AttemptLoss(
            attempt=part.attempt.number,
            step=self.newest_step(),
            ended_s=min((s.ended_s for s in self._states.values() if s.ended_s), default=now_s),
            resumed_s=now_s,
            cause=cause,
            reason=reason,
        )
        plan: ElectionPlan = replace(
            part.plan,
            ports={node: answer.peer_port for node, answer in granted.items()},
            losses=(*part.plan.losses, loss),
            started_by=part.node,
            reason=f"{reason}; no master asked for {part.plan.patience_s:g} s",
        )
        return Relaunch(
            attempt=number,
            ranks=ranks,
            master_address=addresses[first],
            master_port=granted[first].port,
            resume_step=step,
            checkpoint_ranks=choose_checkpoint_ranks(ranks, part.intent.spec.checkpoint.copies),
            addresses=addresses,
            plan=plan,
        )

    def newest_step(self) -> int:
        """Return the newest step that any answering node has finished."""
        return max(state.step for state in self._states.values())

    def _find_cause(self, members: Collection[str]) -> tuple[FailureCause, str]:
        """Return the cause that ended the attempt, and a sentence that explains it.

        A rank that lost a peer reports only the loss. The true cause is known to another node, or
        it is the loss of a node that does not answer.
        """
        away = [node for node in self._part.nodes if node not in members]
        verb = "was" if len(away) == 1 else "were"
        lost = f"{' and '.join(away)} {verb} lost" if away else ""
        known = [self._states[node] for node in self._part.nodes if node in self._states]
        own = [s for s in known if s.part == "lost" and s.reason and not s.is_peer_loss]
        if own:
            # The earliest failure may have caused the others.
            first = min(own, key=lambda state: state.ended_s or math.inf)
            also = f"; {lost}, too" if lost else ""
            return first.cause, f"{first.reason.rstrip('.')}{also}"
        if lost:
            return "", lost
        return "peer_lost", "the nodes lost their connection to each other"

    # ------------------------------------------------------------ requests

    def _ask(self, node: str, kind: str, timeout_s: float, args: dict[str, Any]) -> dict[str, Any]:
        try:
            # A node is not among its own peers.
            if node == self._part.node:
                return self._part.ask(kind, args)
            return self._part.peers[node].ask(kind, timeout_s, **args)
        except (PeerError, ExpectedError, WireError) as error:
            raise RefusedError(f"{kind}: {getattr(error, 'message', error)}") from error

    def _ask_each(
        self,
        nodes: Sequence[str] | dict[str, ClaimAnswer],
        kind: str,
        timeout_s: float,
        **args: Any,
    ) -> None:
        _each(list(nodes), lambda node: self._ask(node, kind, timeout_s, args))

    def _ask_all(
        self, nodes: Sequence[str], kind: str, cls: type[T], timeout_s: float, **args: Any
    ) -> dict[str, T]:
        """Return the answers by node, without nodes that failed or refused."""

        def ask(node: str) -> T | None:
            try:
                return from_wire(cls, self._ask(node, kind, timeout_s, args), kind)
            except (RefusedError, WireError):
                return None

        if not nodes:
            return {}
        with ThreadPoolExecutor(len(nodes)) as pool:
            answers = zip(nodes, pool.map(ask, nodes), strict=True)
            return {node: answer for node, answer in answers if answer is not None}


def _each(nodes: list[str], work: Callable[[str], object]) -> None:
    """Run `work` for all nodes in parallel; raise the first error once all have ended."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        for future in [pool.submit(work, node) for node in nodes]:
            future.result()
