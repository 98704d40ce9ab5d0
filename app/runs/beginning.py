"""Whether a run may start from its beginning: only while no checkpoint of it was ever saved.

Nodes that are off, or copies that are damaged, are no reason to train everything again: a new
attempt from the beginning makes all older checkpoints void. What was saved is known from the
mirrored journals and the stored attempts, so it is known while the nodes that hold it are off.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from app.errors import UserError
from app.runs.checkpoints import Copy, counts, starts_of
from app.runs.placement import choose_checkpoint_ranks
from app.runs.services import Services
from app.text import capitalize, show_list


@dataclass(frozen=True, slots=True)
class _Saved:
    step: int
    nodes: frozenset[str]
    """That saved it, or that it was copied to."""


def expect_no_checkpoint(
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
    services.book.refresh(run_id)
    starts = starts_of(services, run_id)
    told = services.book.history(run_id).attempts
    found: dict[int, set[str]] = {}
    for number, attempt in told.items():
        for step, nodes in attempt.holders.items():
            if counts(step, number, starts):
                found.setdefault(step, set()).update(nodes)
    for record in services.book.store.attempts(run_id):
        step = record.resume_step or 0
        if step and counts(step, record.attempt, starts):
            found.setdefault(step, set()).update(place.node for place in record.placements)
    kept = services.book.get(run_id).progress.newest_checkpoint_step
    if kept and not found and not told:  # the mirrors are gone
        return _Saved(kept, frozenset())
    return _Saved(max(found), frozenset(found[max(found)])) if found else None


def _find_writers(services: Services, run_id: str) -> list[str]:
    """Return the nodes that the newest attempt's checkpoints were to be written on."""
    run = services.book.get(run_id)
    ranks = services.book.placements(run)
    chosen = choose_checkpoint_ranks(ranks, run.spec.checkpoint.copies)
    return [place.node for place in ranks if place.rank in chosen]


def _show_copies(copies: Sequence[Copy]) -> str:
    by_step: dict[int, list[str]] = {}
    for copy in copies:
        by_step.setdefault(copy.info.step, []).append(copy.node)
    steps = sorted(by_step, reverse=True)
    return ", ".join(f"step {step} on {show_list(by_step[step])}" for step in steps)


def _list_ways(services: Services, silent: Sequence[str]) -> list[str]:
    off = [name for name in silent if name in services.cluster.names()]
    removed = [name for name in silent if name not in off]
    ways = [f"turn on {' or '.join(off)} and resume again"] if off else []
    return ways + ([f"add {' or '.join(removed)} to the nodes again"] if removed else [])
