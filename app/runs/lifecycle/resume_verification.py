"""Choose a checkpoint with logged steps after it, so that a resume can be compared with them.

Only valid steps count: a resume from an earlier checkpoint makes the steps after it void. They are
read from the mirrored journals.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

from agents.contract.run import LoggedStep, Replay
from agents.contract.run_layout import rank_of_journal
from app.errors import UsageError, UserError
from app.runs.journals.journal import JournalTail, Line, text_of, whole_of
from app.runs.services import Services

# A replay repeats training that is already done; a wrong state shows in its first step.
MAX_REPLAYED_STEPS = 1000
COMPARED_STEPS = 20
"""Number of repeated steps that an automatic resume compares with the logged ones."""


def require_replayable(num_steps: int) -> None:
    """Check the number of steps to replay.

    Raises:
        UsageError: it is out of range.
    """
    if not 1 <= num_steps <= MAX_REPLAYED_STEPS:
        raise UsageError(
            f"{num_steps} steps cannot be replayed: choose 1 to {MAX_REPLAYED_STEPS}",
            "A few steps are enough: a wrong state shows in the first one.",
        )


def choose_starts(
    services: Services,
    run_id: str,
    checkpoints: Collection[int],
    num_steps: int,
    *,
    is_wanted: bool = False,
) -> tuple[int, ...]:
    """Return the steps of the checkpoints that have `num_steps` logged steps after them.

    Args:
        services: stores and nodes.
        run_id: run to resume.
        checkpoints: steps of the available checkpoints.
        num_steps: required number of logged steps after a checkpoint.
        is_wanted: True if the user named the checkpoint; others may exist.

    Raises:
        UserError: no checkpoint has so many.
    """
    logged = {record.step for record in services.runs.history(run_id).steps()}
    following = {start: _count_following(start, logged) for start in checkpoints}
    found = tuple(start for start, count in following.items() if count >= num_steps)
    if found:
        return found
    most = max(following.values(), default=0)
    hint = f"Verify fewer: --verify {most}" if most else "Resume without --verify."
    if is_wanted:
        (step,) = checkpoints
        raise UserError(
            f"the checkpoint of step {step} of run {run_id} has {most} logged steps after it, but "
            f"{num_steps} are to be verified",
            f"{hint.rstrip('.')}, or leave out --checkpoint to start from an older one.",
        )
    raise UserError(
        f"no checkpoint of run {run_id} has {num_steps} logged steps after it; "
        f"the maximum is {most}",
        hint,
    )


def _count_following(start: int, logged: Collection[int]) -> int:
    count = 0
    while start + count + 1 in logged:
        count += 1
    return count


def count_logged(services: Services, run_id: str, start: int) -> int:
    """Return the number of logged steps after `start` without a gap, at most `COMPARED_STEPS`."""
    logged = {record.step for record in services.runs.history(run_id).steps()}
    return min(_count_following(start, logged), COMPARED_STEPS)


def read_replay(services: Services, run_id: str, start: int, num_steps: int) -> Replay:
    """Return the logged values of the `num_steps` after `start`. Reads whole journals."""
    attempt_of = {
        record.step: record.attempt
        for record in services.runs.history(run_id).steps()
        if start < record.step <= start + num_steps
    }
    steps: list[LoggedStep] = []
    for attempt in sorted(set(attempt_of.values())):
        wanted = {step for step, number in attempt_of.items() if number == attempt}
        steps += read_logged(services.paths.attempt(run_id, attempt), wanted)
    return Replay(
        steps=tuple(sorted(steps, key=lambda logged: logged.step)),
        devices=_find_devices(services, run_id, set(attempt_of.values())),
    )


def read_logged(folder: Path, wanted: Collection[int]) -> list[LoggedStep]:
    """Return the logged values of some steps from an attempt's mirrored journals."""
    found: dict[int, LoggedStep] = {}
    saved: set[int] = set()
    for path in sorted(folder.glob("*/*")):
        if rank_of_journal(path.name) is None:
            continue
        lines = JournalTail(path).read()
        # Saving at a loss does not synchronise the ranks, so a replay need not repeat it.
        together = [line for line in lines if line.get("at_loss") is not True]
        saved.update(_steps_of(together, "checkpoint"))
        for line in lines:
            step = whole_of(line, "step")
            # Every rank logs the loss of the whole batch, so the first journal with a step is
            # enough.
            if text_of(line, "kind") == "step" and step is not None and step in wanted:
                found.setdefault(step, _read_step(line, step))
    return [replace(one, saved=step in saved) for step, one in found.items() if one.loss_hex]


def _steps_of(lines: Iterable[Line], kind: str) -> set[int]:
    steps = (whole_of(line, "step") for line in lines if text_of(line, "kind") == kind)
    return {step for step in steps if step is not None}


def _read_step(line: Line, step: int) -> LoggedStep:
    shares = line.get("shares")
    return LoggedStep(
        step=step,
        loss_hex=text_of(line, "loss_hex"),
        samples=text_of(line, "samples"),
        shares=tuple(map(float, shares)) if isinstance(shares, list) else (),
    )


def _find_devices(
    services: Services, run_id: str, attempts: Collection[int]
) -> tuple[tuple[str, str], ...]:
    """Return the devices of these attempts; empty if they differ, or some were lost."""
    history = services.runs.history(run_id)
    if any(history.attempt(number).lost_ranks for number in attempts):
        return ()
    known = [
        tuple((place.node, place.device_id) for place in record.placements)
        for record in services.runs.store.attempts(run_id)
        if record.attempt in attempts
    ]
    return known[0] if len(known) == len(attempts) and len(set(known)) == 1 else ()
