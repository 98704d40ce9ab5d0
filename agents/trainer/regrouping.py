"""Go on without the ranks that were lost, in the process that lives, with the model in memory.

Between two optimizer steps the state of a data parallel run is the same on all ranks and changes
nowhere. So ranks that lose another one leave their group and wait, until their node says which
nodes go on (`agents.contract.regroup`). They meet in a new group, make sure that all of them stand
at the same place, and repeat what the loss had broken off. What is impossible, or takes too long,
is left to the way that is always open: save, end, and be resumed.
"""

from __future__ import annotations

import time

from agents.contract.regroup import Regroup, may_regroup
from agents.contract.run_layout import CLOSED_FILE, LOSS_FILE, REGROUP_FILE
from agents.contract.wire import WireError, from_wire
from agents.state import read_json
from agents.trainer.parallel.strategy import Strategy
from agents.trainer.rank.context import RankContext
from agents.trainer.rank.device import choose_backend
from agents.trainer.rank.group import REMAKE_TIMEOUT_S, PeerLost

WAIT_S = 30.0
"""Time to wait for the decision of the nodes, in seconds; they give up sooner."""
POLL_S = 0.05


class Regrouping:
    """Replaces the group of one rank after losses."""

    def __init__(self, context: RankContext, strategy: Strategy) -> None:
        intent = context.attempt.intent
        self._context = context
        self._strategy = strategy
        self.is_allowed = may_regroup(intent)
        """Whether the nodes of this attempt decide on new groups at all."""

    def is_possible(self) -> bool:
        """Return whether this rank holds all that it takes to go on."""
        is_whole = self._context.guard.is_usable and not self._strategy.find_gap()
        return self.is_allowed and is_whole and not self._context.control.stop_requested

    def regroup(self, loss: PeerLost, place: str, step: int) -> tuple[int, ...]:
        """Meet the ranks that are left; return the positions that they had in the old group.

        Args:
            loss: what ended the old group.
            place: what this rank was doing; it is repeated, so all have to stand there.
            step: newest step that is done.

        Raises:
            PeerLost: they do not go on; this rank has to save what it holds.
        """
        context, group = self._context, self._context.group
        began_s, before = time.monotonic(), group.members
        group.dissolve()
        context.enter_phase("regrouping", step)
        decision = self._await_decision(loss)
        ranks = context.attempt.intent.ranks
        members = [number for number in before if ranks[number].node in decision.nodes]
        context.control.rank = members.index(context.attempt.rank)
        group.remake(
            members,
            generation=decision.generation,
            place=(decision.address, decision.port),
            credential=context.attempt.intent.credential,
            backend=choose_backend(context.device, context.attempt.intent.parallel),
            device=context.device,
        )
        self._require_same(place, loss)
        context.heartbeat.join_generation(decision.generation)
        lost = [number for number in before if number not in members]
        context.journal.write(
            "regrouped",
            step=step,
            generation=decision.generation,
            nodes=decision.nodes,
            lost_nodes=list(dict.fromkeys(ranks[number].node for number in lost)),
            lost_ranks=lost,
            seconds=time.monotonic() - began_s,
        )
        return tuple(before.index(number) for number in members)

    def _await_decision(self, loss: PeerLost) -> Regroup:
        context = self._context
        folder, deadline = context.attempt.folder, time.monotonic() + WAIT_S
        while time.monotonic() < deadline and not context.control.stop_requested:
            if any((folder / name).exists() for name in (LOSS_FILE, CLOSED_FILE)):
                break
            decision = self._read_decision()
            if decision is not None and decision.generation > context.group.generation:
                if context.attempt.placement.node in decision.nodes:
                    return decision
                break
            time.sleep(POLL_S)
        raise loss

    def _read_decision(self) -> Regroup | None:
        try:
            return from_wire(Regroup, read_json(self._context.attempt.folder / REGROUP_FILE))
        except WireError:  # none yet
            return None

    def _require_same(self, place: str, loss: PeerLost) -> None:
        """Refuse a group whose ranks would not do the same next."""
        report = {"place": place}
        reports = self._context.group.exchange("regrouped", report, timeout_s=REMAKE_TIMEOUT_S)
        if any(one != report for one in reports):
            places = ", ".join(sorted({str(one.get("place")) for one in reports}))
            raise PeerLost(f"{loss.message} The ranks that are left are at {places}.", loss.hint)
