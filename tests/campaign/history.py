"""What a run really trained, read from the journals of its ranks; pure, except for `read_steps`.

Only the last pass over a step counts: a resume begins again at its checkpoint, and what came after
that checkpoint is undone with it.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

GAP_S = 2.0
"""Least silence between two steps that counts as an interruption, in seconds."""

HOUR_S = 3600.0
MAX_SHIFT_HOURS = 24
"""Hours by which a fault may set a clock: times further off are no times of this run."""
LAST_STEPS = 2
"""Number of steps of a killed rank that its journal may lack."""


@dataclass(frozen=True, order=True, slots=True)
class Step:
    """One step, as one rank recorded it."""

    attempt: int
    rank: int
    step: int
    time_s: float
    samples: str
    loss_hex: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """Difference between what a run trained and what an undisturbed run trains."""

    lost: int = 0
    """Steps whose samples were never trained on."""
    doubled: int = 0
    """Steps whose samples were trained on more often than they should."""
    repeated: int = 0
    """Steps that were undone and done again."""
    difference: float | None = None
    """Largest relative difference of a loss; None: there is no step to compare."""
    final_difference: float | None = None
    """Relative difference of the last loss."""
    is_equal: bool = False
    """Whether every loss is equal to the bit."""
    double_run: bool = False
    """Whether two attempts trained at the same time."""
    disagreeing: int = 0
    """Steps for which ranks of one attempt recorded different samples."""


def read_steps(runs: Iterable[Path]) -> list[Step]:
    """Read the steps of all ranks and attempts from the folders of one run on all nodes."""
    found = []
    for run in runs:
        for journal in run.glob("attempts/*/rank-*.jsonl"):
            attempt, rank = int(journal.parent.name), int(journal.stem.partition("-")[2])
            changed_s = journal.stat().st_mtime
            for line in journal.read_bytes().rpartition(b"\n")[0].splitlines():
                try:
                    record = json.loads(line)
                except ValueError:
                    continue  # a line that a full disk cut
                if record.get("kind") == "step":
                    values = (record["step"], undo_shift(record["time_s"], changed_s))
                    words = (record["samples"], record["loss_hex"])
                    found.append(Step(attempt, rank, *values, *words))
    return sorted(found, key=lambda step: step.time_s)


def undo_shift(time_s: float, changed_s: float) -> float:
    """Return the time of a line by the right clock, where a fault had set it by whole hours.

    Args:
        time_s: time by the clock of the node, in seconds since the epoch.
        changed_s: time by the kernel at which its file was last written, in seconds.

    >>> [undo_shift(time_s, 9000.0) for time_s in (5395.0, 8995.0, 12595.0)]
    [8995.0, 8995.0, 8995.0]
    """
    num_hours = round((time_s - changed_s) / HOUR_S)
    return time_s - num_hours * HOUR_S if abs(num_hours) <= MAX_SHIFT_HOURS else time_s


def read_load_s(runs: Iterable[Path], attempt: int) -> float:
    """Return the time from an attempt's first rank to its first step, in seconds; 0: not known."""
    began: list[float] = []
    first: list[float] = []
    for run in runs:
        for journal in run.glob(f"attempts/{attempt}/rank-*.jsonl"):
            changed_s = journal.stat().st_mtime
            for line in journal.read_bytes().rpartition(b"\n")[0].splitlines():
                with contextlib.suppress(ValueError):  # a line that a full disk cut
                    record = json.loads(line)
                    kinds = {"phase": began, "step": first}
                    time_s = undo_shift(record["time_s"], changed_s)
                    kinds.get(record["kind"], []).append(time_s)
    return min(first) - min(began) if began and first else 0.0


def trace_lineage(steps: Sequence[Step]) -> tuple[list[Step], int]:
    """Return the steps that count, in order, and the number of those that were undone.

    >>> done = [Step(1, 0, n, float(n), "s", "l") for n in (1, 2, 3)]
    >>> again = [Step(2, 0, n, 9.0 + n, "s", "l") for n in (2, 3)]
    >>> lineage, undone = trace_lineage([*done, *again])
    >>> [(step.attempt, step.step) for step in lineage], undone
    ([(1, 1), (2, 2), (2, 3)], 2)
    """
    lineage: list[Step] = []
    undone = 0
    for attempt in sorted({step.attempt for step in steps}):
        # Several ranks tell of each step; a regrouped attempt tells of a step again, later.
        passes = _passes([step for step in steps if step.attempt == attempt])
        for records in passes:
            keep = [step for step in lineage if step.step < records[0].step]
            undone += len(lineage) - len(keep)
            lineage = [*keep, *records]
    return lineage, undone


def _passes(steps: Sequence[Step]) -> list[list[Step]]:
    """Return the passes over rising steps of one attempt, from what its most talkative rank says.

    A rank that regroups tells of the repeated steps again; ranks that ended early tell less.
    """
    by_rank: dict[int, list[Step]] = {}
    for step in steps:
        by_rank.setdefault(step.rank, []).append(step)
    if not by_rank:
        return []
    told = max(by_rank.values(), key=lambda records: (records[-1].step, len(records)))
    passes: list[list[Step]] = []
    for step in told:
        if not passes or step.step <= passes[-1][-1].step:
            passes.append([])
        passes[-1].append(step)
    return passes


def compare(steps: Sequence[Step], undisturbed: Sequence[Step], *, is_done: bool = True) -> Damage:
    """Compare a run with the undisturbed one of the same seed.

    What a run that is not done has still to train is not lost.
    """
    lineage, undone = trace_lineage(steps)
    reference, _ = trace_lineage(undisturbed)
    if not is_done:
        reached = max((step.step for step in lineage), default=0)
        reference = [step for step in reference if step.step <= reached]
    # A batch is known by its step too: later epochs may draw the same rows.
    got = Counter((step.step, step.samples) for step in lineage)
    due = Counter((step.step, step.samples) for step in reference)
    loss_of = {step.step: step.loss_hex for step in reference}
    shared = [(step.loss_hex, loss_of[step.step]) for step in lineage if step.step in loss_of]
    differences = [
        abs(float.fromhex(a) - float.fromhex(b)) / max(abs(float.fromhex(b)), 1e-12)
        for a, b in shared
    ]
    return Damage(
        lost=(due - got).total(),
        doubled=(got - due).total(),
        repeated=undone,
        difference=max(differences, default=None),
        final_difference=differences[-1] if differences else None,
        is_equal=bool(shared) and all(a == b for a, b in shared),
        double_run=is_double_run(steps),
        disagreeing=count_disagreeing(steps),
    )


def is_double_run(steps: Sequence[Step]) -> bool:
    """Return whether an attempt went on after a newer one had begun to train."""
    for attempt in {step.attempt for step in steps}:
        newer = [step.time_s for step in steps if step.attempt > attempt]
        last_s = max(step.time_s for step in steps if step.attempt == attempt)
        if newer and last_s > min(newer):
            return True
    return False


def count_disagreeing(steps: Sequence[Step]) -> int:
    """Return the number of steps for which ranks of one attempt recorded different samples."""
    told: dict[tuple[int, int], set[str]] = {}
    for step in steps:
        told.setdefault((step.attempt, step.step), set()).add(step.samples)
    return sum(len(samples) > 1 for samples in told.values())


def is_on_all_ranks(steps: Sequence[Step], num_ranks: int) -> bool:
    """Return whether all ranks trained every step, so that losses have to be equal to the bit.

    What a rank did right before it died may be missing in its journal.
    """
    for attempt in {step.attempt for step in steps}:
        ranks: dict[int, set[int]] = {}
        for step in steps:
            if step.attempt == attempt:
                ranks.setdefault(step.step, set()).add(step.rank)
        if sum(len(told) < num_ranks for told in ranks.values()) > LAST_STEPS:
            return False
    return True


def find_return_s(steps: Sequence[Step], fault_s: float, *, is_new_attempt: bool) -> float:
    """Return the time from a fault until the training went on, in seconds; 0: it never paused.

    Args:
        steps: all steps of the run, by time.
        fault_s: time of the fault, in seconds since the epoch.
        is_new_attempt: whether a newer attempt took over, so that any gap is the fault's.
    """
    if is_new_attempt:
        before = max((s.attempt for s in steps if s.time_s <= fault_s), default=0)
        after = [step.time_s for step in steps if step.attempt > before]
        if after:
            return max(min(after) - fault_s, 0.0)
    times = [max((s.time_s for s in steps if s.time_s <= fault_s), default=fault_s)]
    times += [step.time_s for step in steps if step.time_s > fault_s]
    gaps = [(later - earlier, later) for earlier, later in pairwise(times)]
    length_s, end_s = max(gaps, default=(0.0, fault_s))
    return end_s - fault_s if length_s > GAP_S else 0.0
