"""Regrouping on this node: state of ranks that lost others, and their requests to join or give up.

The election processes decide (`agents.contract.regroup`). A node joins a new group only under the
launch lock, and never after it has granted a newer attempt, so a claimed recovery and a continuing
group exclude each other.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from agents.contract import run_layout
from agents.contract.regroup import Regroup, may_regroup
from agents.contract.run import AttemptIntent
from agents.contract.wire import to_wire
from agents.errors import ExpectedError
from agents.state import boot_id, identity_from, locked, read_json, write_json
from agents.supervisor.attempt import (
    AttemptFolder,
    find_group,
    read_generation,
    read_rank_end,
    read_regroup,
)
from agents.supervisor.fence import find_newest_launched, read_fence
from agents.supervisor.stalls import LOOP_PHASES

PHASE = "regrouping"
"""Phase of a rank that has left its group and waits for a new one."""
LOCK_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalRanks:
    """State of this node's ranks, as far as a new group depends on it."""

    step: int = 0
    """Newest completed step of any rank."""
    generation: int = 0
    waits: bool = False
    """True if all ranks are alive and wait at the same step."""
    has_lost_rank: bool = False
    """True if a rank has ended without a record, by a kill or a crash."""
    has_begun: bool = False
    """True if a rank has reached the training loop."""


def read_local_ranks(attempt: AttemptFolder) -> LocalRanks:
    """Return the current state of this node's ranks."""
    rows = (read_json(attempt.file(run_layout.STARTED_FILE)) or {}).get("ranks") or []
    beats, alive = [], []
    for row in rows:
        identity = identity_from({**row, "boot_id": boot_id()})
        beats.append(read_json(attempt.file(run_layout.rank_heartbeat(row["rank"]))) or {})
        alive.append(identity is not None and identity.is_alive())
    if not rows:
        return LocalRanks()
    steps = [int(beat.get("step") or 0) for beat in beats]
    # All ranks of a node must be at the same point, or their states would differ.
    places = {(beat.get("phase"), beat.get("step"), beat.get("generation", 0)) for beat in beats}
    # Ranks that were asked to end will not join a group, even if they still wait.
    is_asked_to_end = any(
        attempt.file(name).exists() for name in (run_layout.STOP_FILE, run_layout.LOSS_FILE)
    )
    return LocalRanks(
        step=max(steps),
        generation=max(read_generation(attempt, row["rank"]) for row in rows),
        waits=all(alive)
        and len(places) == 1
        and beats[0].get("phase") == PHASE
        and not is_asked_to_end,
        has_begun=any(beat.get("phase") in LOOP_PHASES for beat in beats),
        has_lost_rank=any(
            not is_alive and read_rank_end(attempt, row["rank"]).exit_code is None
            for row, is_alive in zip(rows, alive, strict=True)
        ),
    )


def join_group(attempt: AttemptFolder, wanted: Regroup) -> None:
    """Let the ranks of this node join a new group.

    Raises:
        ExpectedError: they do not wait for it, or this node has granted a newer attempt.
    """
    run = attempt.home.run(attempt.run_id)
    with locked(run / "launch.lock", LOCK_TIMEOUT_S, f"Run {attempt.run_id} is being launched."):
        newest = max(
            read_fence(attempt.home, attempt.run_id),
            find_newest_launched(attempt.home, attempt.run_id),
        )
        if newest > attempt.number:
            raise ExpectedError(f"This node has already granted attempt {newest}.")
        known, ranks = read_regroup(attempt), read_local_ranks(attempt)
        # Each generation is joined once: a repeated or late request must not form a second group.
        is_next = wanted.generation == ranks.generation + 1
        if not ranks.waits or not is_next or (known and known.generation >= wanted.generation):
            raise ExpectedError(f"The ranks do not wait for generation {wanted.generation}.")
        write_json(attempt.file(run_layout.REGROUP_FILE), to_wire(wanted))


def give_up(attempt: AttemptFolder) -> None:
    """Let the ranks of this node save their state and end.

    Raises:
        ExpectedError: the disk is full; the ranks then end by their own timeout.
    """
    # The same file as in `loss`: a thread of each rank saves and ends it.
    if not attempt.file(run_layout.LOSS_FILE).exists():
        write_json(attempt.file(run_layout.LOSS_FILE), {"requested_s": time.time()})


class RegroupWatch:
    """Watch of the supervisor over the group of its ranks."""

    def __init__(self, attempt: AttemptFolder, intent: AttemptIntent) -> None:
        self._attempt = attempt
        self._generation = 0
        self._interrupted = -1
        self._may_regroup = may_regroup(intent)
        self.intent = intent
        """Intent with the addresses of only those nodes that are still in the group."""

    def look(self) -> bool:
        """Return whether the ranks have joined another group since the last call."""
        if not self._may_regroup or not self._attempt.file(run_layout.REGROUP_FILE).exists():
            return False
        generation = read_local_ranks(self._attempt).generation
        group = find_group(self._attempt, generation)
        if group is None or generation == self._generation:
            return False
        self._generation = generation
        # Nodes that were left out must not be probed any more: they do not answer.
        kept = {name: a for name, a in self.intent.addresses.items() if name in group.nodes}
        self.intent = replace(self.intent, addresses=kept, master_port=group.port)
        return True

    def waits(self) -> bool:
        """Return whether the ranks have lost others and wait for a new group."""
        return self._may_regroup and read_local_ranks(self._attempt).waits

    def interrupt(self) -> bool:
        """Ask the ranks, once per generation, to leave their group; return whether it did."""
        # Once per generation: if the ranks do not react, they hang and are ended.
        if not self._may_regroup or self._interrupted == self._generation:
            return False
        try:
            asked = {"generation": self._generation, "requested_s": time.time()}
            write_json(self._attempt.file(run_layout.INTERRUPT_FILE), asked)
        except ExpectedError:  # the disk is full
            return False
        self._interrupted = self._generation
        return True
