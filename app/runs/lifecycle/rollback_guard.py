"""Whether a run may go back behind a checkpoint that was saved and cannot be had now.

Nodes that are off, or copies that are damaged, are no reason to train again what was trained: a new
attempt makes all checkpoints behind its start void. So a run starts from its beginning only while
none was ever saved, and goes back by one at most unless it is told to. What was saved is known from
the mirrored journals and the stored attempts, so it is known while the nodes that hold it are off.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from app.errors import UserError
from app.runs.checkpoints import Copy, is_current, resume_steps
from app.runs.placement import choose_checkpoint_ranks
from app.runs.services import Services
from app.text import capitalize, show_list


@dataclass(frozen=True, slots=True)
class _Saved:
    step: int
    nodes: frozenset[str]
    """That saved it, or that it was copied to."""


def require_no_checkpoint(
    services: Services,
    run_id: str,
    copies: Sequence[Copy],
    answering: Collection[str],
    verify_steps: int | None = None,
) -> None:
    """Refuse to start a run from its beginning when it has, or may have, a checkpoint.

    Args:
        copies: those that were found; none is whole.
        answering: the nodes that answer.
        verify_steps: `copies` are only those with so many logged steps after them.

    Raises:
        UserError: naming the newest step known and its nodes, or the damaged copies.
    """
    if verify_steps is not None and copies:
        raise UserError(
            f"run {run_id} has no whole checkpoint with {verify_steps} logged steps after it: "
            f"{_show_copies(copies)} cannot be used",
            "Resume without verifying: the newest whole checkpoint is then taken.",
        )
    saved = _find_newest(services, run_id)
    holders = sorted(saved.nodes) if saved and saved.nodes else _find_writers(services, run_id)
    silent = [name for name in holders if name not in answering]
    reasons = _list_reasons(saved, holders, silent, copies)
    if not reasons:
        return
    ways = _list_ways(services, silent)
    ways += [f"see what is wrong with the copies: rackless runs show {run_id}"] if copies else []
    ways.append("start a new run with the same settings")
    raise UserError(
        f"run {run_id} cannot go on: {'; '.join(reasons)}",
        f"{capitalize(', or '.join(ways))}. No checkpoint was touched.",
    )


def require_newest(services: Services, run_id: str, step: int, answering: Collection[str]) -> None:
    """Warn of a newer checkpoint that is out of reach, and refuse to go back behind several.

    Args:
        step: the newest with a whole copy on `answering`, the nodes that answer.

    Raises:
        UserError: naming the newest step known and its nodes.
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
            f"it goes on from step {step}: the checkpoint of step {newest} is on "
            f"{show_list(silent)}, which cannot be reached",
        )
        return
    ways = _list_ways(services, silent)
    ways.append(f"lose them: rackless runs resume {run_id} --checkpoint {step}")
    raise UserError(
        f"run {run_id} would go back to step {step}: {len(away)} newer checkpoints, up to step "
        f"{newest}, are on nodes that cannot be reached ({show_list(silent)})",
        f"{capitalize(', or '.join(ways))}. No checkpoint was touched.",
    )


def _list_reasons(
    saved: _Saved | None, holders: Sequence[str], silent: Sequence[str], copies: Sequence[Copy]
) -> list[str]:
    """Return why the run must not start again; empty: no checkpoint was ever saved."""
    reasons = []
    newest = f"the newest checkpoint known, of step {saved.step}, is" if saved else ""
    if saved and silent:
        reasons.append(f"{newest} on nodes that cannot be reached ({show_list(silent)})")
    elif saved and saved.step not in {copy.info.step for copy in copies}:
        reasons.append(f"{newest} no longer on {show_list(holders)}")
    elif silent and len(silent) == len(holders):
        # They write the same steps, so one that answers and has none speaks for the others.
        away = show_list(silent)
        reasons.append(f"the nodes that may hold its checkpoints cannot be reached ({away})")
    if copies:
        found = _show_copies(copies)
        reasons.append(f"every copy found is damaged or cannot be read ({found})")
    return reasons


def _find_newest(services: Services, run_id: str) -> _Saved | None:
    """Return the newest checkpoint that was ever saved and that still counts."""
    found = _find_saved(services, run_id)
    if found:
        return _Saved(max(found), frozenset(found[max(found)]))
    kept = services.runs.get(run_id).progress.newest_checkpoint_step
    if kept and not services.runs.history(run_id).attempts:  # the mirrors are gone
        return _Saved(kept, frozenset())
    return None


def _find_saved(services: Services, run_id: str) -> dict[int, set[str]]:
    """Return the nodes of each checkpoint that was ever saved and that still counts, by step."""
    services.runs.refresh(run_id)
    starts = resume_steps(services, run_id)
    told = services.runs.history(run_id).attempts
    found: dict[int, set[str]] = {}
    for number, attempt in told.items():
        for step, nodes in attempt.holders.items():
            if is_current(step, number, starts):
                found.setdefault(step, set()).update(nodes)
    for record in services.runs.store.attempts(run_id):
        step = record.resume_step or 0
        if step and is_current(step, record.attempt, starts):
            found.setdefault(step, set()).update(place.node for place in record.placements)
    return found


def _find_writers(services: Services, run_id: str) -> list[str]:
    """Return the nodes that the newest attempt's checkpoints were to be written on."""
    run = services.runs.get(run_id)
    ranks = services.runs.placements(run)
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
