"""Continue without lost ranks, in the running process, with the model in memory.

Between two optimizer steps the state of a data parallel run is the same on all ranks and does not
change. So ranks that lose another one leave their group and wait until their node says which nodes
continue (`agents.contract.regroup`). They form a new group, check that all of them are at the same
place, and repeat the interrupted work. If that is impossible, or takes too long, the fallback is to
save, end, and be resumed.
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


class RankRegrouping:
    """Replaces the group of one rank after losses."""

    def __init__(self, context: RankContext, strategy: Strategy) -> None:
        intent = context.attempt.intent
        self._context = context
        self._strategy = strategy
        self.is_allowed = may_regroup(intent)
        """True if the nodes of this attempt decide on new groups."""

    def is_possible(self) -> bool:
        """Return whether this rank holds everything that it needs to continue."""
        is_whole = self._context.guard.is_usable and not self._strategy.find_gap()
        return self.is_allowed and is_whole and not self._context.control.stop_requested

    def regroup(self, loss: PeerLost, place: str, step: int) -> tuple[int, ...]:
        """Join the remaining ranks; return their positions in the old group.

        Args:
            loss: error that ended the old group.
            place: current work of this rank; it is repeated, so all ranks must be at it.
            step: latest finished step.

        Raises:
            PeerLost: they do not continue; this rank has to save its state.
        """
        context, group = self._context, self._context.group
        began_s, before = time.monotonic(), group.members
        # Other ranks that wait for this one only notice the loss when its connections close.
        group.dissolve()
        context.enter_phase("regrouping", step)
        # Nodes decide, not ranks: two halves of a network must not both continue.
        decision = self._await_decision(loss)
        ranks = context.attempt.intent.ranks
        members = [number for number in before if ranks[number].node in decision.nodes]
        # The first rank polls for requests; it may be another one now.
        context.control.rank = members.index(context.attempt.rank)
        group.remake(
            members,
            generation=decision.generation,
            place=(decision.address, decision.port),
            credential=context.attempt.intent.credential,
            backend=choose_backend(context.device, context.attempt.intent.parallel),
            device=context.device,
        )
        # One rank may already be a step ahead; then their next collectives would not match.
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
        except WireError:  # no decision yet
            return None

    def _require_same(self, place: str, loss: PeerLost) -> None:
        """Reject a group whose ranks would not do the same next."""
        report = {"place": place}
        reports = self._context.group.exchange("regrouped", report, timeout_s=REMAKE_TIMEOUT_S)
        if any(other != report for other in reports):
            places = ", ".join(sorted({str(other.get("place")) for other in reports}))
            raise PeerLost(f"{loss.message} The remaining ranks are at {places}.", loss.hint)
