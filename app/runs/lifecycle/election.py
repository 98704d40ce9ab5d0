"""Share the recovery of a run with its nodes, so that only one side starts it.

While a master watches one of its runs, it tells the nodes so every few seconds, and they leave a
loss to it. Once it has been silent for `patience_s`, they recover the run themselves
(`agents/election`). From then on both sides follow one rule: the side that continues needs a claim
that a majority of the attempt's nodes has granted, and each node grants a number once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import replace

from agents.contract.election import MAX_AHEAD, MAX_PARKED_S, is_majority
from agents.contract.mandate import MIN_NODES
from agents.contract.requests.attempts import KeepAttempt
from agents.contract.requests.probes import ChoosePort
from agents.contract.requests.runs import ClaimAttempt
from agents.contract.run import AttemptLoss, AttemptStatus, ElectionPlan
from app.errors import RacklessError, UserError
from app.events import ACTIVE_STATES
from app.nodes.endpoints import Endpoint
from app.runs.belief import believed_attempts, most_common
from app.runs.lifecycle.losses import per_hour
from app.runs.nodes.attempt_status import by_node, list_attempts
from app.runs.services import Services
from app.storage.recoveries import Loss
from app.storage.runs import RunRecord
from app.text import show_list

KEEPS_WITHIN_PATIENCE = 5
"""Number of messages to the nodes within the time after which they consider a master gone."""
_KEEP_TIMEOUT_S = 3.0
_MAX_CLAIMS = 5


async def plan_election(
    services: Services, run: RunRecord, endpoints: Mapping[str, Endpoint]
) -> ElectionPlan | None:
    """Return the nodes' plan for recovering the next attempt without a master, or None for none.

    Raises:
        UserError: a node does not answer.
    """
    if run.spec.recovery == "off" or per_hour(services) < 1 or len(endpoints) < MIN_NODES:
        return None
    chosen = await asyncio.gather(
        *(services.pool.agent(n).ask(ChoosePort(address=e.address)) for n, e in endpoints.items())
    )
    ports = {n: one.port for n, one in zip(endpoints, chosen, strict=True)}
    places = {(endpoints[n].address, port) for n, port in ports.items()}
    if len(places) < len(endpoints):  # two nodes of one PC chose the same port
        return None
    losses = services.recoveries.of_run(run.run_id)
    return ElectionPlan(
        ports=ports,
        patience_s=services.settings.number("lost_after_s"),
        per_hour=per_hour(services),
        losses=tuple(
            AttemptLoss(
                attempt=loss.attempt,
                step=loss.step,
                ended_s=loss.ended_s,
                resumed_s=loss.resumed_s,
                cause=loss.cause,
                reason=loss.reason,
            )
            for loss in losses
        ),
    )


def keep_interval_s(services: Services) -> float:
    """Return the interval of messages to a node, in seconds."""
    return services.settings.number("lost_after_s") / KEEPS_WITHIN_PATIENCE


async def close_parts(services: Services, run: RunRecord) -> None:
    """Tell the nodes of this master's run that it will not be recovered."""
    nodes = _find_own(services, run)
    await asyncio.gather(*(keep_part(services, run, node, is_closed=True) for node in nodes))


def _find_own(services: Services, run: RunRecord) -> list[str]:
    """Return the nodes of a run whose loss this master has to recover."""
    known = services.pool.names() if services.runs.is_ours(run) else ()
    return [node for node in run.nodes if node in known]


@contextlib.asynccontextmanager
async def keeping_parts(services: Services, run: RunRecord) -> AsyncGenerator[None]:
    """Tell the nodes of a run inside the block that this master recovers it."""
    # Stopping leftovers, saving and planning may take longer than the nodes' patience.
    nodes = _find_own(services, run)
    # One task per node: one that hangs must not make the others impatient.
    tasks = [asyncio.create_task(_keep_on(services, run, node)) for node in nodes]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _keep_on(services: Services, run: RunRecord, node: str) -> None:
    while True:
        await keep_part(services, run, node)
        await asyncio.sleep(keep_interval_s(services))


async def keep_part(
    services: Services, run: RunRecord, node: str, *, is_closed: bool = False
) -> None:
    """Tell one node; one that is unreachable or has an older version is skipped."""
    with contextlib.suppress(RacklessError, TimeoutError):
        async with asyncio.timeout(_KEEP_TIMEOUT_S):
            agent = services.pool.agent(node)
            closing = ""
            if is_closed:
                sign = services.key.sign_closing
                closing = await asyncio.to_thread(sign, run.run_id, run.attempt)
            await agent.ask(
                KeepAttempt(
                    run_id=run.run_id, attempt=run.attempt, is_closed=is_closed, closing=closing
                )
            )


async def close_replaced(
    services: Services, run: RunRecord, statuses: Sequence[AttemptStatus]
) -> None:
    """Tell nodes that wait to recover an older attempt that the run has continued."""
    for status in statuses:
        is_waiting = status.state in ("failed", "lost") and status.election is not None
        ended_s = status.ended_s or time.time()  # a lost attempt has no recorded end
        if is_waiting and status.attempt < run.attempt and time.time() - ended_s < MAX_PARKED_S:
            await keep_part(
                services, replace(run, attempt=status.attempt), status.node, is_closed=True
            )


def require_majority(run: RunRecord, nodes: Collection[str]) -> None:
    """Raise UserError if nodes must not decide for a run that the others may recover as well."""
    if not is_majority(nodes, run.nodes):
        away = [node for node in run.nodes if node not in nodes]
        raise UserError(
            f"{show_list(away)} cannot be reached and may continue without this PC, so the others "
            "alone do not",
            f"If they are off, resume it: rackless runs resume {run.run_id}",
        )


def most_believed(known: Mapping[str, int], run: RunRecord, attempt: int) -> int:
    """Return the highest attempt number that a node can honestly know after `attempt`.

    One node alone may name any, and one near the last number would be the run's last.
    """
    agreed = (
        number
        for number in sorted(known.values(), reverse=True)
        if is_majority([node for node, one in known.items() if one >= number], run.nodes)
    )
    return max(attempt, next(agreed, 0)) + MAX_AHEAD


async def claim_attempt(
    services: Services, run: RunRecord, chosen: Collection[str]
) -> tuple[int, tuple[str, ...]]:
    """Return the number of the next attempt, and the chosen nodes of the run that granted it.

    A node that claims a newer attempt without a proof, or a number far ahead, or that grants none,
    is left out.

    Raises:
        UserError: they are not a majority, or others have claimed it.
    """
    require_majority(run, chosen)
    nodes = [node for node in run.nodes if node in chosen]
    attempt = run.attempt + 1
    for left in reversed(range(_MAX_CLAIMS)):
        claimed = ClaimAttempt(run_id=run.run_id, attempt=attempt, replaces=run.attempt)
        claims = await asyncio.gather(*(services.pool.agent(n).ask(claimed) for n in nodes))
        later = [n for n, claim in zip(nodes, claims, strict=True) if claim.launched > run.attempt]
        if later and await _is_continued(services, run, later):
            services.recoveries.close(run.run_id, "replaced")
            raise UserError(f"run {run.run_id} is already running, started elsewhere")
        fences = {n: claim.fence for n, claim in zip(nodes, claims, strict=True)}
        most = most_believed(fences, run, attempt)
        later = later or [node for node, fence in fences.items() if fence > most]
        if later:
            text = f"{show_list(later)} is left out: it names a newer attempt without a proof"
            services.runs.add_event(run.run_id, "warning", text)
            nodes = [node for node in nodes if node not in later]
            require_majority(run, nodes)
            continue
        granted = [n for n, claim in zip(nodes, claims, strict=True) if claim.is_granted]
        if len(granted) == len(nodes):
            return attempt, tuple(nodes)
        # The others suffice: of two claims with a majority each, the older one is not launched.
        if left == 1 and is_majority(granted, run.nodes):
            refusing = [node for node in nodes if node not in granted]
            text = f"{show_list(refusing)} is left out: it grants no attempt number"
            services.runs.add_event(run.run_id, "warning", text)
            nodes = granted
        # A fence may have been raised by another master: try a higher number.
        attempt = max(attempt, *(claim.fence for claim in claims)) + 1
    raise UserError(f"the nodes of run {run.run_id} are starting it by themselves")


async def _is_continued(services: Services, run: RunRecord, nodes: Collection[str]) -> bool:
    """Return whether one of these nodes has an attempt of this home after `run.attempt`."""
    listed = by_node(await list_attempts(services.pool, nodes))
    believed = believed_attempts(services, run.run_id, listed)
    return any(status.attempt > run.attempt for status in believed)


def find_self_started(
    services: Services, run: RunRecord, newest: Sequence[AttemptStatus]
) -> ElectionPlan | None:
    """Return the plan by which the nodes of this master's run started its newest attempt, or None.

    Args:
        services: stores and nodes.
        run: run as stored, before that attempt.
        newest: parts of the attempt that are believed.
    """
    if not newest or not services.runs.is_ours(run):
        return None
    plan = most_common(newest, lambda status: status.election)
    return plan if plan is not None and plan.started_by else None


def adopt_regrouped(services: Services, run: RunRecord, statuses: Sequence[AttemptStatus]) -> bool:
    """Watch an attempt again whose end was stored although a majority of its nodes still trains.

    A master that was cut off from them saw only the failure of the part that they left behind.

    Args:
        services: stores and nodes.
        run: run to recover.
        statuses: attempts on the nodes that answer, by the names that this master has for them.

    Returns:
        True if the attempt is watched again.
    """
    ours = [s for s in statuses if s.run_id == run.run_id and s.attempt == run.attempt]
    running = [s for s in ours if s.state == "running" and s.generation]
    # Not the highest generation: one node alone may name any.
    newest = most_common(running, lambda status: status.generation) if running else 0
    train = [s.node for s in running if s.generation == newest]
    if run.state in ACTIVE_STATES or not is_majority(train, run.nodes):
        return False
    services.recoveries.withdraw(run.run_id)
    services.runs.change(
        run.run_id, lambda old: replace(old, state="running", message="", hint="", ended_s=None)
    )
    text = f"{show_list(train)} continued meanwhile, so the run is not resumed. Nothing to do."
    services.runs.add_event(run.run_id, "recovery", text)
    return True


def record_election(services: Services, run: RunRecord, plan: ElectionPlan) -> None:
    """Record the recovery by a run's own nodes, once its attempt is stored."""
    known = {loss.attempt for loss in services.recoveries.of_run(run.run_id) if loss.resumed_s}
    following = [*(loss.attempt for loss in plan.losses[1:]), run.attempt]
    # Not strict: a node may name a plan without losses.
    for loss, resumed in zip(plan.losses, following, strict=False):
        if loss.attempt not in known:
            services.recoveries.put(
                Loss(
                    run_id=run.run_id,
                    attempt=loss.attempt,
                    cause=loss.cause or "lost",
                    step=loss.step,
                    ended_s=loss.ended_s,
                    state="resumed",
                    resumed_s=loss.resumed_s,
                    resumed_attempt=resumed,
                    # Nodes with an earlier version have a reason only for the last loss.
                    reason=loss.reason or (plan.reason if resumed == run.attempt else ""),
                )
            )
    services.runs.add_event(
        run.run_id,
        "recovery",
        f"{plan.started_by} started attempt {run.attempt} without this PC, on "
        f"{show_list(run.nodes)}: {plan.reason}. Nothing to do.",
    )
