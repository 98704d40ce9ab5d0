"""Runs on our nodes that this master did not start, or has forgotten: name them, and stop them.

Nodes may have several masters. Another master's runs are not in our store, so a message that only
says "stop run X" would point the user to a command that does not know the run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from agents.contract.requests.attempts import ListAttempts, StopAttempt
from agents.contract.run import AttemptStatus, MasterIdentity
from app.errors import UserError
from app.events import ACTIVE_STATES
from app.runs.belief import judge_statuses
from app.runs.nodes.attempt_status import ACTIVE, active_attempts, by_node
from app.runs.services import Services
from app.shell_words import posix_command
from app.text import show_moment


def busy_attempts(statuses: Iterable[AttemptStatus], own: str = "") -> tuple[AttemptStatus, ...]:
    """Return the attempts that hold a node's devices, including those without a supervisor.

    Of the run `own` only active ones count: a launch ends leftovers of its earlier attempts.
    """
    return tuple(s for s in active_attempts(statuses) if s.state in ACTIVE or s.run_id != own)


def refuse_busy(services: Services, node: str, status: AttemptStatus) -> UserError:
    """Return the error for a node that trains another run: its master, and how to free the node."""
    run_id = status.run_id
    known = services.runs.store.get(run_id)
    # A higher number is not an attempt of this home, and stopping the run would stop the wrong one.
    if known is not None and known.state in ACTIVE_STATES and status.attempt <= known.attempt:
        return UserError(
            f"node {node} is already busy: run {run_id} is {status.state} there",
            f"Wait until it ends, stop it: rackless runs stop {run_id}, or choose other "
            "nodes in the run file.",
            where=node,
            topic="gpu-in-use",
        )
    ours = services.identity
    named = f"{status.spec.name} ({run_id})" if status.spec and status.spec.name else run_id
    since = f" since {show_moment(status.started_s, time.time())}" if status.started_s else ""
    left = " and left processes" if status.state == "lost" else ""
    return UserError(
        f"node {node} is already busy: run {named}{_of(status.master, ours)} is {status.state}"
        f"{left} there{since}",
        f"{_how_to_stop(status, node, ours)} Or wait, or choose other nodes in the run file.",
        where=node,
    )


def _of(master: MasterIdentity | None, ours: MasterIdentity) -> str:
    if master is None or master == ours:
        return ""
    if (master.host, master.user) == (ours.host, ours.user):
        return f" of your other home {master.home}"
    return f" of {master.user} on {master.host}"


def _how_to_stop(status: AttemptStatus, node: str, ours: MasterIdentity) -> str:
    stop, master = f"rackless runs stop {status.run_id}", status.master
    here = f"{stop} --node {node}"
    if master is None or master == ours:
        return f"Stop it: {here}."
    if (master.host, master.user) == (ours.host, ours.user):
        there = f"RACKLESS_HOME={posix_command(master.home)} {stop}"
        return f"Stop it there: {there}. If that home is gone: {here}."
    return f"Stop it on {master.host}: {stop}. If that PC is gone, stop it from here: {here}."


async def has_foreign_attempt(services: Services, run_id: str, node: str) -> bool:
    """Return whether the node trains an attempt of the run that is not this home's."""
    listed = by_node({node: (await services.pool.agent(node).ask(ListAttempts())).attempts})
    return bool(active_attempts(judge_statuses(services, run_id, listed).doubted))


async def stop_on_node(
    services: Services, run_id: str, node: str, *, only_foreign: bool = False
) -> AttemptStatus:
    """Stop a node's part of a run of any master; return its newest status.

    The other nodes notice the lost peer, and end as well. With `only_foreign`, attempts of this
    home's own run are left alone.

    Raises:
        UserError: the node cannot be reached, or has nothing of that run to stop.
    """
    # By id on the node itself: the run may be missing in our store.
    agent = services.pool.agent(node)
    known = (await agent.ask(ListAttempts())).attempts
    found = [status for status in by_node({node: known}) if status.run_id == run_id]
    if only_foreign:
        found = list(judge_statuses(services, run_id, found).doubted)
    if not found:
        raise UserError(
            f"node {node} knows no run {run_id}",
            "Copy the whole id from the message that named it, and check the node's name.",
            where=node,
        )
    busy = [one for one in found if one.state in ACTIVE or one.num_processes]
    if not busy:
        newest = max(found, key=lambda status: status.attempt)
        raise UserError(
            f"run {run_id} is {newest.state} on node {node}",
            "There is nothing to stop.",
            where=node,
        )
    grace_s = services.settings.number("stop_grace_s")
    return [
        await agent.ask(StopAttempt(run_id=run_id, attempt=one.attempt, grace_s=grace_s))
        for one in busy
    ][-1]
