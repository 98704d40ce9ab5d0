"""Let nodes that came back join a run again, at a requested checkpoint.

The process that watches the run does it. Files that the nodes lack are sent while training
continues. Then a rejoin is stored as the permission to resume, like a loss: a stop by the user
cancels it, and another process of this home continues it if this one ends. The run stops as if by
the user, with a checkpoint of its newest step, and `recovery` resumes it on all of its nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace

from agents.contract.requests.node import ReadFacts
from agents.contract.spec import list_named
from app.errors import NodeUnreachable, RacklessError, UserError
from app.runs.inputs.run_inputs import recall_inputs, send_inputs
from app.runs.lifecycle.losses import per_hour
from app.runs.nodes.attempt_status import stop_parts
from app.runs.placement import keep_listed, place_ranks
from app.runs.preflight import LaunchPlan, add_forecast, find_fit
from app.runs.rejoin import REJOIN, STEADY_S, find_absent, find_end_of_pause, is_worthwhile
from app.runs.services import Services
from app.storage.recoveries import Loss
from app.storage.runs import RunRecord
from app.text import show_list

POLL_INTERVAL_S = 1.0


async def rejoin_nodes(services: Services, run_id: str, attempt: int) -> None:
    """Watch for nodes that can join attempt `attempt`, and stop it at a checkpoint for them.

    Returns once it has stopped; is cancelled if the attempt ends otherwise.
    """
    fit_since_s: dict[str, float] = {}
    while True:
        await asyncio.sleep(POLL_INTERVAL_S)
        # A node may vanish at any moment, and the disk of this PC may be full for a while.
        with contextlib.suppress(RacklessError):
            run = services.runs.get(run_id)
            if run.attempt != attempt:
                return
            if _is_promised(services, run):
                await _stop(services, run)  # another process ended before it did
                return
            steady = await _find_steady(services, run, fit_since_s)
            if steady and await _stop_for(services, run, steady):
                return


def _is_promised(services: Services, run: RunRecord) -> bool:
    """Return True if nodes are to join this attempt."""
    # While a process launches this attempt, a loss of an older attempt may be pending, too.
    return any(
        (loss.attempt, loss.cause, loss.state) == (run.attempt, REJOIN, "pending")
        for loss in services.recoveries.of_run(run.run_id)
    )


async def _find_steady(
    services: Services, run: RunRecord, fit_since_s: dict[str, float]
) -> tuple[str, ...]:
    """Return the nodes that may join now; `fit_since_s` has the time since each has been fit."""
    # Nodes whose ranks were lost in this attempt, while the others train on, may come back, too.
    training = services.runs.history(run.run_id).attempt(run.attempt).members or run.nodes
    absent = find_absent(run.spec, training, services.pool.names())
    is_open = run.state == "running" and not run.stop_asked and services.runs.is_ours(run)
    if not absent or not is_open or per_hour(services) < 1:
        return ()
    fit = await find_fit(services, absent, run.run_id)
    now_s = time.monotonic()
    for node in absent:
        if node in fit:
            fit_since_s.setdefault(node, now_s)
        else:
            fit_since_s.pop(node, None)
    steady = tuple(node for node in fit if now_s - fit_since_s[node] >= STEADY_S)
    return steady if _is_time(services, run) else ()


def _is_time(services: Services, run: RunRecord) -> bool:
    """Return True if the run can save its progress, and nodes may join by now."""
    history = services.runs.history(run.run_id).attempt(run.attempt)
    first, saved = history.first, max(history.checkpoints, default=0)
    # A run that is still starting would load everything twice before it trains again.
    if first is None or max(history.failed_saves, default=0) > saved:
        return False
    launched = next(
        (one for one in services.runs.store.attempts(run.run_id) if one.attempt == run.attempt),
        None,
    )
    start_s = first.time_s - launched.launched_s if launched else None
    remaining_s = services.runs.full_snapshot(run.run_id).remaining_s
    if not is_worthwhile(run.spec, remaining_s, start_s):
        return False
    now_s = time.time()
    return find_end_of_pause(services.recoveries.of_run(run.run_id), now_s) <= now_s


async def _stop_for(services: Services, run: RunRecord, nodes: Sequence[str]) -> bool:
    """Stop the run so that `nodes` can join; return False if another process does, or it ended."""
    # While training continues: sending a model may take minutes.
    inputs = await asyncio.to_thread(recall_inputs, services, run)
    plan = await _plan_with(services, run, nodes)
    # In a divided model, other nodes may need files of layers that the joining nodes take over.
    await send_inputs(services, plan.nodes if plan is not None else nodes, inputs, plan=plan)
    now = services.runs.get(run.run_id)
    if (now.state, now.attempt, now.stop_asked) != ("running", run.attempt, False):
        return False
    reason = f"{show_list(nodes)} {'answers' if len(nodes) == 1 else 'answer'} and can train"
    step = services.runs.full_snapshot(run.run_id).step or 0
    rejoin = Loss(
        run_id=run.run_id,
        attempt=run.attempt,
        cause=REJOIN,
        step=step,
        ended_s=time.time(),
        state="pending",
        reason=reason,
    )
    # Only one of the processes that watch the run stores it.
    is_new = services.recoveries.add(rejoin, run.last_stop.number)
    if not services.recoveries.is_pending(run.run_id):
        return False  # the user has stopped the run
    if is_new:
        text = f"{reason}: the run saves a checkpoint, stops, and continues with all of its nodes"
        services.runs.add_event(run.run_id, "recovery", text)
    await _stop(services, run)
    return True


async def _plan_with(services: Services, run: RunRecord, nodes: Sequence[str]) -> LaunchPlan | None:
    """Return the plan of the run with `nodes`, or None; the resume will report the reason."""
    order = services.pool.names() if run.spec.nodes == "all" else list_named(run.spec.nodes)
    every = [node for node in order if node in (*run.nodes, *nodes)]
    try:
        answers = await asyncio.gather(
            *(services.pool.agent(node).ask(ReadFacts()) for node in every)
        )
        facts = dict(zip(every, answers, strict=True))
        # Not `plan_launch`, which refuses the busy nodes of a training run.
        ranks = keep_listed(place_ranks(facts), run.spec.nodes)
        plan = LaunchPlan(ranks=ranks, endpoints={}, pythons={}, facts=facts)
        return await add_forecast(services, replace(run.spec, shares=None), plan)
    except UserError:
        return None


async def _stop(services: Services, run: RunRecord) -> None:
    services.runs.move(run.run_id, run.attempt, "stopping", "", "")
    grace_s = services.settings.number("stop_grace_s")
    left = await stop_parts(services.pool, run.nodes, run.run_id, run.attempt, grace_s)
    # A node that vanishes meanwhile is judged as in any other attempt.
    for error in left.values():
        if isinstance(error, UserError) and not isinstance(error, NodeUnreachable):
            services.runs.add_event(run.run_id, "warning", f"the stop was refused: {error.message}")
