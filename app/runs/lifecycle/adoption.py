"""Runs that nodes list and that are not known to be this home's: show, adopt and ignore them.

Only the user decides about them. An adopted run is watched like another master's; a takeover then
makes this master resume it.
"""

from __future__ import annotations

from collections.abc import Sequence

from agents.contract.run import AttemptStatus
from app.errors import UserError
from app.events import FoundRun
from app.runs.belief import judge_statuses, prove_attempt, read_listed
from app.runs.lifecycle.reconcile import add_run, adopt_attempt, search_nodes, take_in
from app.runs.nodes.attempt_status import by_node, list_attempts
from app.runs.run_repository import list_files
from app.runs.services import Services
from app.storage.runs import RunRecord
from app.text import show_list


async def find_runs(services: Services) -> tuple[FoundRun, ...]:
    """Ask all nodes, and return the runs that are not known to be this home's."""
    await search_nodes(services, services.pool.names())
    return services.runs.found()


async def adopt_run(services: Services, run_id: str, node: str, files: Sequence[str]) -> None:
    """Watch a run that `node` lists, and allow a resume to read the files that it names.

    Args:
        services: stores and nodes.
        run_id: whole id of the run.
        node: node whose description of the run counts.
        files: files that the user has agreed to.

    Raises:
        UserError: the node does not list it, or it names other files than the user agreed to, or
            it was deleted here.
    """
    known = services.runs.store.get(run_id)
    if known is not None and not services.runs.is_trusted(known):
        _require_agreed(run_id, list_files(known.spec), files)
        before = services.runs.found()
        services.runs.store.trust(run_id, "")
        services.runs.drop_found(run_id, services.pool.names(), before)
        return
    listed = by_node(await list_attempts(services.pool, services.pool.names()))
    doubted = judge_statuses(services, run_id, listed).doubted
    chosen = max(
        (one for one in doubted if one.node == node), key=lambda s: s.attempt, default=None
    )
    if chosen is None:
        raise UserError(
            f"node {node} lists no run {run_id} that is not yours already",
            "List such runs: rackless runs found",
            where=node,
        )
    spec, key = read_listed(services, chosen)
    if spec is None:
        raise UserError(
            f"node {node} cannot read the settings of run {run_id}",
            f"Stop it: rackless runs stop {run_id} --node {node}",
            where=node,
        )
    # Of a stored run, the settings stay as they are stored.
    _require_agreed(run_id, list_files(known.spec if known is not None else spec), files)
    same = [
        one
        for one in doubted
        if one.attempt == chosen.attempt and read_listed(services, one) == (spec, key)
    ]
    if services.runs.store.is_deleted(run_id):
        raise UserError(
            f"run {run_id} was deleted here and is not added again",
            f"Stop it: rackless runs stop {run_id} --node {node}",
        )
    before = services.runs.found()
    services.runs.store.trust(run_id, key)
    _store(services, known, chosen, same)
    services.runs.drop_found(run_id, [one.node for one in same], before)
    await take_in(services, run_id, same)


def _store(
    services: Services,
    known: RunRecord | None,
    chosen: AttemptStatus,
    same: Sequence[AttemptStatus],
) -> None:
    if known is not None:
        adopt_attempt(services, known, same)
        return
    spec, _ = read_listed(services, chosen)
    assert spec is not None
    text = f"adopted as {show_list([one.node for one in same])} lists it, and only watched here"
    add_run(services, spec, same, text, proved=prove_attempt(services, chosen))


def _require_agreed(run_id: str, named: Sequence[str], agreed: Sequence[str]) -> None:
    if tuple(named) != tuple(agreed):
        raise UserError(
            f"run {run_id} names {show_list(list(named))}, which is not what you agreed to",
            "List it again: rackless runs found",
        )


def ignore_run(services: Services, run_id: str, node: str) -> None:
    """Show a run of a node no more."""
    before = services.runs.found()
    services.runs.store.ignore(run_id, node)
    services.runs.publish_found(before)
