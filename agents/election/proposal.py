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

from agents.contract.election import ClaimAnswer, Fetch, NodeState, Relaunch, is_majority, renumber
from agents.contract.run import (
    AttemptLoss,
    CheckpointInfo,
    ElectionPlan,
    FailureCause,
    choose_checkpoint_ranks,
)
from agents.contract.wire import WireError, from_wire, to_wire
from agents.election.beliefs import Beliefs
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
        self._number = 0
        self.failed: dict[str, str] = {}
        """Why nodes that granted the attempt took no part in it, by name."""

    def carry_out(self, members: Sequence[str]) -> int:
        """Start the next attempt on all `members` that grant it; return its number.

        Raises:
            RefusedError: no majority grants it, or no checkpoint is usable.
        """
        part = self._part
        # Above every number that any node has granted: each number is granted once per node.
        fences = [state.fence for state in self._states.values()]
        self._number = number = max(part.attempt.number, *fences) + 1
        answers = self._ask_all(members, "claim", ClaimAnswer, CLAIM_TIMEOUT_S, attempt=number)
        granted = {
            node: answer
            for node, answer in answers.items()
            if answer.is_granted and self._has_consent(node, answer)
        }
        # The numbers granted so far are used up; another claim needs a higher one.
        self._require_majority(granted)
        if part.beliefs is None:
            step = self._prepare_checkpoint(granted)
        else:
            step = self._prepare_proved(granted, part.beliefs)
        wanted = self._plan(number, granted, step)
        self._ask_each(granted, "launch", LAUNCH_TIMEOUT_S, **to_wire(wanted))
        # Only after all launches: an unconfirmed part ends by itself.
        self._ask_each(granted, "confirm", CLAIM_TIMEOUT_S, attempt=number)
        return number

    def _has_consent(self, node: str, answer: ClaimAnswer) -> bool:
        beliefs = self._part.beliefs
        return beliefs is None or beliefs.consents(answer, self._number, node)

    def _require_majority(self, granted: Collection[str]) -> None:
        if not is_majority(granted, self._part.nodes):
            names = sorted(granted) or "no node"
            raise RefusedError(f"attempt {self._number} was granted by {names}")

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

    def _prepare_proved(self, granted: dict[str, ClaimAnswer], beliefs: Beliefs) -> int | None:
        """Have the newest signed checkpoint on all nodes; return its step, or None for the start.

        Nodes that do not take it are left out, as long as a majority is left.
        """
        part = self._part
        believed = {node: _drop_lies(part, node, granted) for node in granted}
        self._require_writer(believed)
        found = [
            (node, info)
            for node, answer in granted.items()
            for info in answer.checkpoints
            if not part.refuse_checkpoint(info)
        ]
        steps = [step for answer in believed.values() for step in answer.saved_steps]
        choices: dict[tuple[int, int, str], list[tuple[str, CheckpointInfo]]] = {}
        for node, info in found:
            choices.setdefault((*beliefs.age(info), info.manifest_sha256), []).append((node, info))

        def order(choice: tuple[int, int, str]) -> tuple[int, int, int, int]:
            signers = {info.signer for _, info in choices[choice]}
            ranks = [part.nodes.index(node) for node in signers if node in part.nodes]
            # Of unlike ones of one step, the one that more nodes signed, else the first node.
            return choice[0], choice[1], len(signers), -min(ranks, default=len(part.nodes))

        for choice in sorted(choices, key=order, reverse=True):
            if len({step for step in steps if step > choice[1] and steps.count(step) > 1}) > 1:
                break
            holders, info = [node for node, _ in choices[choice]], choices[choice][0][1]
            if self._spread(info, holders, granted):
                return info.step
        if choices:
            newest = max(choice[1] for choice in choices)
            raise RefusedError(f"no intact copy of the checkpoint of step {newest}")
        return None

    def _spread(
        self, info: CheckpointInfo, holders: list[str], granted: dict[str, ClaimAnswer]
    ) -> bool:
        """Copy a checkpoint to all nodes; return whether this node and a majority have it now."""
        me, about = self._part.node, {"step": info.step, "attempt": self._number}
        checked = self._ask_all(holders, "verify", CheckpointInfo, VERIFY_TIMEOUT_S, **about)
        same = info.manifest_sha256
        has = [n for n, one in checked.items() if one.verified and one.manifest_sha256 == same]
        # From the first node that has it; a node that lies about that is followed by the next.
        missing, sources = [node for node in granted if node not in has], list(has)
        why: dict[str, str] = {}
        while missing and sources:
            source = sources.pop(0)
            wanted = Fetch(step=info.step, node=source, attempt=self._number, checkpoint=info)
            why = self._try_each(missing, "fetch", FETCH_TIMEOUT_S, **to_wire(wanted))
            came = [node for node in missing if node not in why]
            has, sources = [*has, *came], [*sources, *came]
            missing = [node for node in missing if node in why]
        # The holders as well: they give up what is newer.
        here = Fetch(step=info.step, attempt=self._number, checkpoint=info)
        why |= self._try_each(has, "fetch", FETCH_TIMEOUT_S, **to_wire(here))
        has = [node for node in has if node not in why]
        if me not in has or not is_majority(has, self._part.nodes):
            return False
        for node in [node for node in granted if node not in has]:
            self._leave_out(node, why.get(node, "it has no copy of the checkpoint"))
            del granted[node]
        return True

    def _leave_out(self, node: str, why: str) -> None:
        self.failed[node] = why

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
            # An attempt that nodes never confirmed did not train: it is no sign of a standstill.
            losses=(*part.plan.losses, loss) if part.counts_loss else part.plan.losses,
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
            handover=part.beliefs.hand_over(number, granted) if part.beliefs else None,
        )

    def newest_step(self) -> int:
        """Return the newest step that the answering nodes have finished."""
        steps = sorted(state.step for state in self._states.values())
        # Ranks train in step, so what a single node says counts for nothing.
        is_corroborated = self._part.beliefs is not None and len(steps) > 1
        return steps[-2] if is_corroborated else steps[-1]

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
        failed = self._try_each(list(nodes), kind, timeout_s, **args)
        for node, why in failed.items():
            self._leave_out(node, why)
        for why in failed.values():
            raise RefusedError(why)

    def _try_each(
        self, nodes: Sequence[str], kind: str, timeout_s: float, **args: Any
    ) -> dict[str, str]:
        """Ask all nodes at once; return why they refused, by name."""

        def ask(node: str) -> str:
            try:
                self._ask(node, kind, timeout_s, args)
            except RefusedError as error:
                return str(error)
            return ""

        if not nodes:
            return {}
        with ThreadPoolExecutor(len(nodes)) as pool:
            answers = zip(nodes, pool.map(ask, nodes), strict=True)
            return {node: why for node, why in answers if why}

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


def _drop_lies(part: Part, node: str, granted: dict[str, ClaimAnswer]) -> ClaimAnswer:
    """Return a node's answer without a group that its own members do not know of."""
    answer = granted[node]
    agree = all(
        (granted[other].generation, granted[other].members) == (answer.generation, answer.members)
        for other in answer.members
        if other in granted
    )
    if agree and is_majority(answer.members, part.nodes):
        return answer
    return replace(answer, generation=0, members=())
