"""Choose the checkpoint that a resume starts from, and bring it to every node of the attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from agents.contract.requests.runs import DeleteCheckpoint
from app.errors import RacklessError, UserError
from app.runs.checkpoints import Copy, find_copies, verify_copies
from app.runs.lifecycle.resume_verification import choose_starts
from app.runs.lifecycle.rollback_guard import require_newest, require_no_checkpoint
from app.runs.services import Services
from app.text import show_list


async def prepare_checkpoint(
    services: Services,
    run_id: str,
    wanted: int | None,
    nodes: Sequence[str],
    answering: Sequence[str],
    verify_steps: int | None,
) -> tuple[int | None, list[Copy]]:
    """Choose the step to resume from and copy its checkpoint to all `nodes`.

    Args:
        services: stores and nodes.
        run_id: run to resume.
        wanted: step that a person named; None for the newest intact one.
        nodes: nodes of the next attempt.
        answering: nodes that answer, whose copies are considered.
        verify_steps: least number of logged steps after it; None where none are repeated.

    Returns:
        The step (None when no checkpoint was ever saved), and the copies of later steps, which the
        next attempt makes void.

    Raises:
        UserError: there is none, none is intact, or newer ones are out of reach.
    """
    copies = await find_copies(services, run_id, answering)
    fitting = copies
    known = {copy.info.step for copy in copies}
    # A step that does not exist is left to `choose_checkpoint`, which lists the available ones.
    if verify_steps is not None and (wanted is None or wanted in known):
        steps = known if wanted is None else {wanted}
        starts = choose_starts(services, run_id, steps, verify_steps, is_wanted=wanted is not None)
        fitting = tuple(copy for copy in copies if copy.info.step in starts)
    good = await choose_checkpoint(services, run_id, fitting, wanted)
    if not good:
        require_no_checkpoint(services, run_id, fitting, answering, verify_steps)
        services.runs.add_event(
            run_id, "warning", "there is no checkpoint yet: the run starts from the beginning"
        )
        return None, []
    step = good[0].info.step
    # A person who names a step accepts that later ones are discarded.
    if wanted is None:
        require_newest(services, run_id, step, answering)
    holders = {copy.node for copy in good}
    # A node has one folder per step: a damaged copy must go before an intact one arrives.
    damaged = [c for c in copies if c.info.step == step and c.node not in holders]
    await delete_copies(services, damaged)
    lacking = [node for node in nodes if node not in holders]
    if lacking:
        services.runs.add_event(
            run_id,
            "checkpoint_copied",
            f"copying the checkpoint of step {step} from {good[0].node} to {show_list(lacking)}",
        )
        for note in await services.pool.copy(good[0].node, lacking, good[0].info.path):
            services.runs.add_event(run_id, "warning", note)
    return step, [copy for copy in copies if copy.info.step > step]


async def choose_checkpoint(
    services: Services, run_id: str, copies: Sequence[Copy], wanted: int | None
) -> tuple[Copy, ...]:
    """Return the intact copies of step `wanted`, or of the newest step that has any.

    Raises:
        UserError: there is no checkpoint of step `wanted`, or none of its copies is intact.
    """
    steps = sorted({copy.info.step for copy in copies}, reverse=True)
    if wanted is not None:
        if wanted not in steps:
            raise UserError(
                f"there is no checkpoint of step {wanted} of run {run_id} on the nodes that answer",
                f"Available steps: {', '.join(map(str, steps)) or 'none'}",
            )
        steps = [wanted]
    for step in steps:
        # Verifying hashes all files, so older steps are verified only when newer ones fail.
        checked = await verify_copies(services.pool, [c for c in copies if c.info.step == step])
        for copy in checked:
            if not copy.info.verified:
                services.runs.add_event(
                    run_id,
                    "checkpoint_damaged",
                    f"the checkpoint of step {step} on {copy.node} is damaged: "
                    f"{copy.info.problem or 'its files do not match their hashes'}",
                )
        good = [copy for copy in checked if copy.info.verified]
        if good:
            # Intact copies may still differ when a fenced attempt has written the same step.
            newest = max(good, key=_age)
            return tuple(c for c in good if c.info.manifest_sha256 == newest.info.manifest_sha256)
    if wanted is not None:
        raise UserError(
            f"every copy of the checkpoint of step {wanted} is damaged",
            f"Leave out --checkpoint to use the newest intact one: rackless runs resume {run_id}",
            topic="checkpoint-damaged",
        )
    return ()


def _age(copy: Copy) -> tuple[int, float]:
    return copy.info.attempt, copy.info.created_s


async def delete_copies(services: Services, copies: Sequence[Copy]) -> None:
    """Delete copies of checkpoints; one that cannot be deleted becomes an event of its run."""
    await asyncio.gather(*(_delete(services, copy) for copy in copies))


async def _delete(services: Services, copy: Copy) -> None:
    try:
        await services.pool.agent(copy.node).ask(
            DeleteCheckpoint(run_id=copy.info.run_id, step=copy.info.step)
        )
    except RacklessError as error:
        services.runs.add_event(
            copy.info.run_id,
            "checkpoint_failed",
            f"the checkpoint of step {copy.info.step} on {copy.node} could not be removed: {error}",
        )
