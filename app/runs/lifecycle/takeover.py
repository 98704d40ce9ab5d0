"""Take a run over from the master that launched it, and notice a takeover by another one.

The nodes of a run remember who took it over, so its first master learns of it with its next request
and no longer resumes the run: two masters that both resume a run would end each other's attempts. A
takeover needs a request by the user.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace

from agents.contract.election import is_majority
from agents.contract.requests.attempts import OwnAttempt
from agents.contract.run import AttemptStatus, MasterIdentity
from app.errors import RacklessError, UserError
from app.runs.nodes.attempt_status import ask_parts
from app.runs.run import RunPart
from app.runs.services import Services
from app.storage.runs import RunRecord, Taken
from app.text import show_list


async def take_over_run(services: Services, run_id: str) -> None:
    """Make this master the one that resumes the run after losses.

    Raises:
        UserError: it is this master's already, or done, or too few of its nodes answer.
    """
    run = services.runs.get(run_id)
    parts = await ask_parts(services.pool, run.nodes, run_id, run.attempt)
    note_takeover(services, run, part_statuses(parts))
    if run.state == "done":
        raise UserError(f"run {run_id} is done; there is nothing to take over")
    if services.runs.is_ours(run):
        raise UserError(f"run {run_id} is this master's own", "There is nothing to take over.")
    services.runs.require_trusted(run)
    there = [part.node for part in parts if part.status is not None]
    _require_most(run, there)
    answers = await asyncio.gather(*(_tell(services, run, node) for node in there))
    informed = [node for node, error in zip(there, answers, strict=True) if error is None]
    _require_most(run, informed)
    _set_taken(services, run, "here")
    masters = {status.master for status in part_statuses(parts) if status.master}
    before = " and ".join(sorted(describe_master(services, one) for one in masters))
    services.runs.add_event(
        run_id,
        "taken_over",
        f"taken over from {before or 'another master'}: this master resumes it after a loss from "
        "now on",
    )
    if missed := [node for node in run.nodes if node not in informed]:
        services.runs.add_event(
            run_id, "warning", f"{show_list(missed)} could not be told that the run was taken over"
        )


def note_takeover(
    services: Services, run: RunRecord, statuses: Iterable[AttemptStatus]
) -> MasterIdentity | None:
    """Record that another master has taken the run over; return that master, if any."""
    told: dict[MasterIdentity, set[str]] = {}
    for s in statuses:
        if s.run_id == run.run_id and s.attempt == run.attempt and s.owner is not None:
            told.setdefault(s.owner, set()).add(s.node)
    # A takeover is told to a majority, and one node alone may name any master.
    owner = next((one for one, nodes in told.items() if is_majority(nodes, run.nodes)), None)
    if owner is None or owner == services.identity:
        return None
    # Recorded once: afterwards the run is no longer ours, and later reports change nothing.
    if services.runs.is_ours(run):
        _set_taken(services, run, "away")
        services.recoveries.close(run.run_id, "replaced")
        services.runs.add_event(
            run.run_id,
            "taken_over",
            f"taken over by {describe_master(services, owner)}: this master only watches it from "
            f"now on. To take it back: rackless runs take-over {run.run_id}",
        )
    return owner


def require_not_taken(
    services: Services, run: RunRecord, statuses: Sequence[AttemptStatus]
) -> None:
    """Raise UserError if another master has taken the run over."""
    owner = note_takeover(services, run, statuses)
    if owner is not None:
        raise UserError(
            f"run {run.run_id} was taken over by {describe_master(services, owner)}",
            f"Resume it there, or take it back first: rackless runs take-over {run.run_id}",
        )


def part_statuses(parts: Iterable[RunPart]) -> list[AttemptStatus]:
    return [replace(part.status, node=part.node) for part in parts if part.status is not None]


def describe_master(services: Services, master: MasterIdentity) -> str:
    """Return the user and host of a master, or its home if it is on this PC."""
    ours = services.identity
    if (master.host, master.user) == (ours.host, ours.user):
        return f"your home {master.home}"
    return f"{master.user} on {master.host}"


def _require_most(run: RunRecord, nodes: Sequence[str]) -> None:
    """Raise UserError unless these nodes may decide for the run, as in an election."""
    if is_majority(nodes, run.nodes):
        return
    reached = show_list(list(nodes)) if nodes else "none"
    raise UserError(
        f"run {run.run_id} cannot be taken over: of {show_list(run.nodes)}, {reached} can be told, "
        "and its first master may still resume it on the others",
        "Try again once most of them answer.",
    )


async def _tell(services: Services, run: RunRecord, node: str) -> RacklessError | None:
    try:
        agent = services.pool.agent(node)
        await agent.ask(
            OwnAttempt(run_id=run.run_id, attempt=run.attempt, master=services.identity)
        )
    except RacklessError as error:
        return error
    return None


def _set_taken(services: Services, run: RunRecord, taken: Taken) -> None:
    for attempt in services.runs.store.attempts(run.run_id):
        if attempt.attempt == run.attempt:
            services.runs.store.save_attempt(replace(attempt, taken=taken))
