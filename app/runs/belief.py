"""Tell attempts of this home's runs from others that nodes list.

A node may list any attempt, so its word alone starts, resumes, stops, reads and copies nothing.
An attempt counts if its proof carries the signature of this home, or of the master of a run that
the user has taken in; if this home has launched it, by its own store; or, for runs of earlier
versions, which signed nothing, if a majority of the run's nodes lists it. All others are shown as
found, see `RunRepository.set_found`, until the user decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from agents.contract.election import is_majority
from agents.contract.mandate import ProvedAttempt
from agents.contract.run import AttemptStatus, RankPlacement
from agents.contract.spec import RunSpec
from app.events import FoundRun
from app.runs.nodes.attempt_status import ACTIVE, active_attempts
from app.runs.run_repository import list_files
from app.runs.services import Services
from app.storage.runs import RunRecord

T = TypeVar("T")
MAX_CONSENTS = 200
"""Maximum number of consents to verify in the proof of another master; each takes milliseconds."""


@dataclass(frozen=True, slots=True)
class Belief:
    """Attempts of one run on the nodes, by the names that this master has for them."""

    believed: tuple[AttemptStatus, ...]
    doubted: tuple[AttemptStatus, ...]


def prove_attempt(services: Services, status: AttemptStatus) -> ProvedAttempt | None:
    """Return the attempt as signed by this home, or by a master that the user trusts for it."""
    trusted = services.runs.store.trusted_key(status.run_id)
    return services.key.prove(status, trusted or "")


def judge_statuses(services: Services, run_id: str, statuses: Iterable[AttemptStatus]) -> Belief:
    """Divide attempts of a run into those of this home's runs and others."""
    found = [status for status in statuses if status.run_id == run_id]
    run = services.runs.store.get(run_id)
    if run is None:
        # Of a deleted run, earlier versions left attempts without a proof.
        is_known = services.runs.store.is_deleted(run_id)
        counts = [
            (is_known and status.proof is None) or prove_attempt(services, status) is not None
            for status in found
        ]
    else:
        counts = _count_known(services, run, found)
    pairs = list(zip(found, counts, strict=True))
    return Belief(
        tuple(status for status, is_believed in pairs if is_believed),
        tuple(status for status, is_believed in pairs if not is_believed),
    )


def _count_known(services: Services, run: RunRecord, found: Sequence[AttemptStatus]) -> list[bool]:
    records = {one.attempt: one for one in services.runs.store.attempts(run.run_id)}
    newest = records.get(run.attempt)
    is_trusted = services.runs.is_trusted(run)
    is_signed = newest is not None and newest.is_signed

    def counts(status: AttemptStatus) -> bool:
        if prove_attempt(services, status) is not None:
            return True
        if not is_trusted:  # an earlier version stored it as nodes described it
            return False
        record = records.get(status.attempt)
        if record is not None:
            nodes = [place.node for place in record.placements]
            return status.node in (nodes or run.nodes)
        if is_signed or status.attempt < run.attempt:
            return False
        listing = {s.node for s in found if s.attempt == status.attempt and s.proof is None}
        return status.node in run.nodes and is_majority(listing, run.nodes)

    return [counts(status) for status in found]


def believed_attempts(
    services: Services, run_id: str, statuses: Iterable[AttemptStatus]
) -> tuple[AttemptStatus, ...]:
    return judge_statuses(services, run_id, statuses).believed


def place_ranks_of(
    proved: ProvedAttempt, statuses: Iterable[AttemptStatus]
) -> tuple[RankPlacement, ...]:
    """Return the ranks of a proved attempt: as a node lists them, if that is what was signed."""
    signed = [place for place in proved.mandate.places if place[0] in proved.nodes]
    for status in statuses:
        ranks = status.all_ranks
        if [(one.node, one.device_id) for one in ranks] == signed and [
            one.rank for one in ranks
        ] == list(range(len(signed))):
            return ranks
    local: Counter[str] = Counter()
    made = []
    for rank, (node, device_id) in enumerate(signed):
        device = "cpu" if device_id == "cpu" else f"cuda:{local[node]}"
        made.append(
            RankPlacement(
                rank=rank, local_rank=local[node], node=node, device=device, device_id=device_id
            )
        )
        local[node] += 1
    return tuple(made)


def most_common(statuses: Iterable[AttemptStatus], read: Callable[[AttemptStatus], T]) -> T:
    """Return the value that most nodes report; of equally many, the first."""
    values = [read(status) for status in statuses]
    counted = Counter(map(repr, values))
    return max(values, key=lambda value: counted[repr(value)])


def read_listed(services: Services, status: AttemptStatus) -> tuple[RunSpec | None, str]:
    """Return the settings of a listed attempt, and the key that signed them (empty: none did)."""
    proof = status.proof
    key = proof.mandate.key if proof is not None else ""
    num_consents = sum(len(one.consents) for one in proof.handovers) if proof is not None else 0
    proved = None
    if key and num_consents <= MAX_CONSENTS:
        proved = services.key.prove(status, key)
    return (status.spec, "") if proved is None else (proved.mandate.spec, key)


def _is_recorded(services: Services, status: AttemptStatus) -> bool:
    run = services.runs.store.get(status.run_id)
    records = services.runs.store.attempts(status.run_id)
    is_known = any(record.attempt == status.attempt for record in records)
    return is_known and run is not None and services.runs.is_trusted(run)


def find_foreign(services: Services, doubted: Sequence[AttemptStatus]) -> tuple[FoundRun, ...]:
    """Return the runs of one node to show: the newest attempt of each, and those with processes."""
    newest = {s.run_id: s.attempt for s in sorted(doubted, key=lambda s: s.attempt)}
    # Keys: comparing each status with all others takes seconds if a node lists thousands.
    active = {(one.run_id, one.attempt) for one in active_attempts(doubted)}
    shown = [
        one
        for one in doubted
        # An ended attempt of this home, on a node that was renamed since, needs no decision.
        if (one.run_id, one.attempt) in active
        or (one.attempt == newest[one.run_id] and not _is_recorded(services, one))
    ]
    stored = {one.run_id: services.runs.store.get(one.run_id) for one in shown}
    specs = [
        run.spec if (run := stored[one.run_id]) is not None else read_listed(services, one)[0]
        for one in shown
    ]
    return tuple(
        FoundRun(
            run_id=one.run_id,
            attempt=one.attempt,
            name=spec.name if spec is not None else "",
            node=one.node,
            state=one.state,
            is_active=one.state in ACTIVE or bool(one.num_processes),
            started_s=one.started_s,
            master=one.master,
            files=list_files(spec) if spec is not None else (),
        )
        for one, spec in zip(shown, specs, strict=True)
    )
