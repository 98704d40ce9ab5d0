"""Guard against a resume that discards saved checkpoints which are merely out of reach.

Nodes that are off, or damaged copies, are no reason to repeat training: a new attempt makes all
checkpoints after its start void. So a run starts from the beginning only while no checkpoint was
ever saved, and skips at most one unless a person names the step. The mirrored journals and the
stored attempts show what was saved, also while the nodes that hold it are off.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from agents.contract.run import choose_checkpoint_ranks
from app.errors import UserError
from app.runs.checkpoints import Copy, is_current, resume_steps
from app.runs.services import Services
from app.text import capitalize, show_list


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
    """Refuse to start a run from the beginning when it has, or may have, a checkpoint.

    Args:
        services: stores and nodes.
        run_id: run to resume.
        copies: copies that were found, none of them intact.
        answering: nodes that answer.
        verify_steps: number of logged steps after each of `copies`, when they were chosen by it.

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
    # Where no journal names the holders, the ranks that write checkpoints may have one.
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
    """Return why the run must not start over; empty when no checkpoint was ever saved."""
    reasons = []
    newest = f"the newest checkpoint known, of step {saved.step}, is" if saved else ""
    if saved and silent:
        reasons.append(f"{newest} on nodes that cannot be reached ({show_list(silent)})")
    elif saved and saved.step not in {copy.info.step for copy in copies}:
        reasons.append(f"{newest} no longer on {show_list(holders)}")
    elif silent and len(silent) == len(holders):
        # All of them write the same steps, so one that answers and has none speaks for all.
        away = show_list(silent)
        reasons.append(f"the nodes that may hold its checkpoints cannot be reached ({away})")
    if copies:
        found = _show_copies(copies)
        reasons.append(f"every copy found is damaged or cannot be read ({found})")
    return reasons


def _find_newest(services: Services, run_id: str) -> _Saved | None:
    """Return the newest current checkpoint that was ever saved."""
    found = _find_saved(services, run_id)
    if found:
        return _Saved(max(found), frozenset(found[max(found)]))
    kept = services.runs.get(run_id).progress.newest_checkpoint_step
    if kept and not services.runs.history(run_id).attempts:  # the mirrors are gone
        return _Saved(kept, frozenset())
    return None


def _find_saved(services: Services, run_id: str) -> dict[int, set[str]]:
    """Return the nodes of every current checkpoint that was ever saved, by step."""
    services.runs.refresh(run_id)
    starts = resume_steps(services, run_id)
    told = services.runs.history(run_id).attempts
    found: dict[int, set[str]] = {}
    for number, attempt in told.items():
        for step, nodes in attempt.holders.items():
            if is_current(step, number, starts):
                found.setdefault(step, set()).update(nodes)
    # An attempt that resumed from a step had a copy on all its nodes, even if no journal of that
    # time was ever fetched.
    for record in services.runs.store.attempts(run_id):
        step = record.resume_step or 0
        if step and is_current(step, record.attempt, starts):
            found.setdefault(step, set()).update(place.node for place in record.placements)
    return found


def _find_writers(services: Services, run_id: str) -> list[str]:
    """Return the nodes on which the newest attempt was to write its checkpoints."""
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
