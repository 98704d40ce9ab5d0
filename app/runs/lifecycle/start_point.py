"""Choose the checkpoint that a resume starts from, and copy it to every node of the attempt.

Nodes that are off, or damaged copies, are no reason to repeat training: a new attempt makes all
checkpoints after its start void. So a run starts from the beginning only if no checkpoint was ever
saved, and skips at most one unless the user names the step. The mirrored journals and the stored
attempts show the saved checkpoints, even while the nodes with the copies are off.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from agents.contract.election import is_majority
from agents.contract.requests.runs import DeleteCheckpoint
from agents.contract.run import choose_checkpoint_ranks
from app.errors import RacklessError, UserError
from app.runs.checkpoints import Copy, find_copies, is_current, resume_steps, verify_copies
from app.runs.lifecycle.reconcile import sync_attempts
from app.runs.lifecycle.resume_verification import choose_starts
from app.runs.services import Services
from app.storage.runs import RunRecord
from app.text import capitalize, show_list


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
        wanted: step that the user named; None for the newest intact one.
        nodes: nodes of the next attempt.
        answering: nodes that answer, whose copies are considered.
        verify_steps: minimum number of logged steps after it; None without verification.

    Returns:
        The step (None if no checkpoint was ever saved), and the copies of later steps, which the
        next attempt makes void.

    Raises:
        UserError: there is no checkpoint, none is intact, or newer ones are out of reach.
    """
    copies = await find_genuine(services, run_id, answering, wanted)
    fitting = copies
    known = {copy.info.step for copy in copies}
    # A missing step is left to `choose_checkpoint`, which lists the available ones.
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
    # A user who names a step accepts that later ones are discarded.
    if wanted is None:
        require_newest(services, run_id, step, answering)
    holders = {copy.node for copy in good}
    # A node has one folder per step: a damaged copy must be removed before an intact one arrives.
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


async def find_genuine(
    services: Services, run_id: str, answering: Sequence[str], wanted: int | None
) -> tuple[Copy, ...]:
    """Return the copies on these nodes: all, or if the user named no step, those of saved steps."""
    copies = await find_copies(services, run_id, answering)
    if wanted is not None:
        return copies
    return await _leave_out_planted(services, run_id, copies, answering)


async def _leave_out_planted(
    services: Services, run_id: str, copies: tuple[Copy, ...], answering: Sequence[str]
) -> tuple[Copy, ...]:
    """Return the copies that the run can have saved; an event names each other one.

    All ranks do each step together, so a majority of the nodes has to have reached a saved step.
    """
    run = services.runs.get(run_id)
    if any(_is_planted(services, run, copy, answering) for copy in copies):
        # The mirrored journals may end before the last steps.
        await sync_attempts(services, run)
        services.runs.refresh(run_id)
    planted = [copy for copy in copies if _is_planted(services, run, copy, answering)]
    for copy in planted:
        text = (
            f"the checkpoint of step {copy.info.step} on {copy.node} is left out: by their "
            "journals, the nodes of the run did not get that far"
        )
        services.runs.add_event(run_id, "checkpoint_damaged", text)
    return tuple(copy for copy in copies if copy not in planted)


def _is_planted(services: Services, run: RunRecord, copy: Copy, answering: Collection[str]) -> bool:
    if copy.info.attempt > run.attempt:
        return True
    starts = {one.attempt: one for one in services.runs.store.attempts(run.run_id)}
    saved_in = starts.get(copy.info.attempt)
    # An attempt saves steps after its start only.
    if saved_in is not None and saved_in.inputs and copy.info.step <= (saved_in.resume_step or 0):
        return True
    ranks = services.runs.history(run.run_id).attempt(copy.info.attempt).ranks
    steps: dict[str, int] = {}
    for rank, node in services.runs.rank_nodes(run.run_id, copy.info.attempt).items():
        step = ranks[rank].step if rank in ranks else None
        if step is not None:
            steps[node] = max(steps.get(node, 0), step)
    nodes = list(dict.fromkeys(services.runs.rank_nodes(run.run_id, copy.info.attempt).values()))
    # A node that is away may have got further than its mirrored journal.
    behind = {n for n in nodes if n in answering and steps.get(n, copy.info.step) < copy.info.step}
    return bool(behind) and not is_majority([n for n in nodes if n not in behind], nodes)


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
        # Verifying hashes all files, so older steps are verified only if newer ones fail.
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
            manifest = _choose_manifest(good, services.runs.get(run_id).nodes)
            return tuple(c for c in good if c.info.manifest_sha256 == manifest)
    if wanted is not None:
        raise UserError(
            f"every copy of the checkpoint of step {wanted} is damaged",
            f"Leave out --checkpoint to use the newest intact one: rackless runs resume {run_id}",
            topic="checkpoint-damaged",
        )
    return ()


def _choose_manifest(good: Sequence[Copy], nodes: Sequence[str]) -> str:
    """Return the manifest of the newest attempt's copies, if they differ that of most nodes.

    A fenced attempt may have written the same step. Within one attempt all copies are equal, unless
    a node has another one of its own; of equally many, the copy on the earliest rank's node counts.
    """
    attempt = max(copy.info.attempt for copy in good)
    newest = [copy for copy in good if copy.info.attempt == attempt]
    counts = Counter(copy.info.manifest_sha256 for copy in newest)
    order = {node: place for place, node in enumerate(nodes)}

    def weight(copy: Copy) -> tuple[int, int]:
        return counts[copy.info.manifest_sha256], -order.get(copy.node, len(order))

    return max(newest, key=weight).info.manifest_sha256


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


# ---------------------------------------------------------------- checkpoints out of reach


@dataclass(frozen=True, slots=True)
class _Saved:
    step: int
    nodes: frozenset[str]
    """Nodes that saved it or received a copy."""


def require_no_checkpoint(
    services: Services,
    run_id: str,
    copies: Sequence[Copy],
    answering: Collection[str],
    verify_steps: int | None = None,
) -> None:
    """Refuse to start a run from the beginning if it has, or may have, a checkpoint.

    Args:
        services: stores and nodes.
        run_id: run to resume.
        copies: copies found, all of them damaged.
        answering: nodes that answer.
        verify_steps: number of logged steps by which `copies` were chosen, or None.

    Raises:
        UserError: the message names the newest known step and its nodes, or the damaged copies.
    """
    if verify_steps is not None and copies:
        raise UserError(
            f"run {run_id} has no intact checkpoint with {verify_steps} logged steps after it: "
            f"{_show_copies(copies)} cannot be used",
            "Resume without verification: the newest intact checkpoint is then used.",
        )
    saved = _find_newest(services, run_id)
    # If no journal names the holders, the ranks that write checkpoints may have one.
    holders = sorted(saved.nodes) if saved and saved.nodes else _find_writers(services, run_id)
    silent = [name for name in holders if name not in answering]
    reasons = _list_reasons(saved, holders, silent, copies)
    if not reasons:
        return
    ways = _list_ways(services, silent)
    ways += [f"see the problems of the copies: rackless runs show {run_id}"] if copies else []
    ways.append("start a new run with the same settings")
    raise UserError(
        f"run {run_id} cannot be resumed: {'; '.join(reasons)}",
        f"{capitalize(', or '.join(ways))}. No checkpoint was touched.",
    )


def require_newest(services: Services, run_id: str, step: int, answering: Collection[str]) -> None:
    """Warn about a newer checkpoint that is out of reach, and refuse to discard several.

    Args:
        services: stores and nodes.
        run_id: run to resume.
        step: newest step with an intact copy on `answering`.
        answering: nodes that answer.

    Raises:
        UserError: the message names the newest known step and its nodes.
    """
    saved = _find_saved(services, run_id)
    away = {
        newer: sorted(nodes - set(answering))
        for newer, nodes in saved.items()
        if newer > step and nodes - set(answering)
    }
    if not away:
        return
    newest = max(away)
    silent = away[newest]
    if len(away) == 1:
        services.runs.add_event(
            run_id,
            "warning",
            f"resuming from step {step}: the checkpoint of step {newest} is on "
            f"{show_list(silent)}, which cannot be reached",
        )
        return
    ways = _list_ways(services, silent)
    ways.append(f"discard them: rackless runs resume {run_id} --checkpoint {step}")
    raise UserError(
        f"resuming run {run_id} from step {step} discards {len(away)} newer checkpoints, up to "
        f"step {newest}: they are on nodes that cannot be reached ({show_list(silent)})",
        f"{capitalize(', or '.join(ways))}. No checkpoint was touched.",
    )


def _list_reasons(
    saved: _Saved | None, holders: Sequence[str], silent: Sequence[str], copies: Sequence[Copy]
) -> list[str]:
    """Return the reasons not to start over; empty if no checkpoint was ever saved."""
    reasons = []
    newest = f"the newest checkpoint known, of step {saved.step}, is" if saved else ""
    if saved and silent:
        reasons.append(f"{newest} on nodes that cannot be reached ({show_list(silent)})")
    elif saved and saved.step not in {copy.info.step for copy in copies}:
        reasons.append(f"{newest} no longer on {show_list(holders)}")
    elif silent and len(silent) == len(holders):
        # All of them save the same steps, so one that answers without a checkpoint speaks for all.
        away = show_list(silent)
        reasons.append(f"the nodes that may hold its checkpoints cannot be reached ({away})")
    if copies:
        found = _show_copies(copies)
        reasons.append(f"every copy found is damaged or cannot be read ({found})")
    return reasons


def _find_newest(services: Services, run_id: str) -> _Saved | None:
    """Return the newest current checkpoint that was ever saved, or None."""
    found = _find_saved(services, run_id)
    if found:
        return _Saved(max(found), frozenset(found[max(found)]))
    kept = services.runs.get(run_id).progress.newest_checkpoint_step
    if kept and not services.runs.history(run_id).attempts:  # the mirrors were deleted
        return _Saved(kept, frozenset())
    return None


def _find_saved(services: Services, run_id: str) -> dict[int, set[str]]:
    """Return the nodes of every current checkpoint that was ever saved, by step."""
    services.runs.refresh(run_id)
    starts = resume_steps(services, run_id)
    attempts = services.runs.history(run_id).attempts
    found: dict[int, set[str]] = {}
    for number, attempt in attempts.items():
        for step, nodes in attempt.holders.items():
            if is_current(step, number, starts):
                found.setdefault(step, set()).update(nodes)
    # An attempt that resumed from a step had a copy on all its nodes, even if no journal of that
    # time was fetched.
    for record in services.runs.store.attempts(run_id):
        step = record.resume_step or 0
        if step and is_current(step, record.attempt, starts):
            found.setdefault(step, set()).update(place.node for place in record.placements)
    return found


def _find_writers(services: Services, run_id: str) -> list[str]:
    """Return the nodes that had to write the newest attempt's checkpoints."""
    run = services.runs.get(run_id)
    lost = services.runs.history(run_id).attempt(run.attempt).lost_ranks
    ranks = [place for place in services.runs.placements(run) if place.rank not in lost]
    chosen = choose_checkpoint_ranks(ranks, run.spec.checkpoint.copies)
    return [place.node for place in ranks if place.rank in chosen]


def _show_copies(copies: Sequence[Copy]) -> str:
    by_step: dict[int, list[str]] = {}
    for copy in copies:
        by_step.setdefault(copy.info.step, []).append(copy.node)
    steps = sorted(by_step, reverse=True)
    return ", ".join(f"step {step} on {show_list(by_step[step])}" for step in steps)


def _list_ways(services: Services, silent: Sequence[str]) -> list[str]:
    off = [name for name in silent if name in services.pool.names()]
    removed = [name for name in silent if name not in off]
    ways = [f"turn on {' or '.join(off)} and resume again"] if off else []
    return ways + ([f"add {' or '.join(removed)} to the nodes again"] if removed else [])
