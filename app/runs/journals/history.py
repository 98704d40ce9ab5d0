"""History of one run from its mirrored journals, updated line by line.

There is one `RunHistory` per run and process. It reads the journals of all ranks, because the node
of rank 0 may be the lost one: a step counts once any rank has recorded it. A resume makes the steps
of older attempts beyond its checkpoint void; `steps` leaves them out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from agents.contract import run_layout
from agents.contract.data import DataPreview
from agents.contract.messages import WireError, from_wire
from app.events import EvaluationRecord, RunEvent, StepRecord
from app.interruption import measure_cost
from app.runs.journals.attempt_history import AttemptHistory, take_line
from app.runs.journals.event_text import describe_line
from app.runs.journals.journal import JournalTail, read_trace, step_of, step_record

MAX_EVENTS = 20_000
"""Maximum number of events of a run in memory."""
MAX_TRACES = 1000
"""Maximum number of listed traces of an attempt."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HistoryUpdate:
    """New entries since the last refresh."""

    steps: tuple[StepRecord, ...]
    events: tuple[RunEvent, ...]
    changed: bool


class RunHistory:
    """Reader of the mirrored journals below one run's folder."""

    def __init__(
        self,
        run_id: str,
        folder: Path | None,
        places: Callable[[int], Mapping[int, str]] = lambda attempt: {},
    ) -> None:
        """Read a run's journals with `refresh`.

        Args:
            run_id: id of the run.
            folder: the run's folder; None if it must not be read.
            places: returns the node of each rank of an attempt; empty: unknown.
        """
        self._run_id = run_id
        self._folder = folder
        self._places = places
        self._known_places: dict[int, Mapping[int, str]] = {}
        self._tails: dict[Path, JournalTail] = {}
        self._seen: set[tuple[object, ...]] = set()
        # Attempt and generation of the regroupings that have their event.
        self._told_returns: set[tuple[int, int]] = set()
        self.attempts: dict[int, AttemptHistory] = {}
        self.events: list[RunEvent] = []
        self.data: DataPreview | None = None
        """Preview of the run's data, as recorded by the newest attempt."""

    def refresh(self) -> HistoryUpdate:
        """Read the new lines of all journals."""
        steps: list[StepRecord] = []
        num_events = len(self.events)
        changed = False
        for path, attempt, rank in self._journals():
            lines = self._tails.setdefault(path, JournalTail(path)).read()
            changed = changed or bool(lines)
            for line in lines:
                self._take(line, attempt, path.parent, rank, steps)
        self._tell_returns()
        # Before sorting: the journals of two nodes are read one after the other, so new events may
        # belong between old ones.
        news = tuple(self.events[num_events:])
        self.events.sort(key=lambda event: event.time_s)
        return HistoryUpdate(tuple(sorted(steps, key=lambda s: (s.attempt, s.step))), news, changed)

    def attempt(self, number: int) -> AttemptHistory:
        return self.attempts.get(number) or AttemptHistory()

    def steps(self) -> list[StepRecord]:
        """Return the valid steps, in order."""
        return self._collect_valid(lambda attempt: attempt.steps)

    def evaluations(self) -> list[EvaluationRecord]:
        """Return the valid evaluations, in order, without those of steps that were trained
        again.
        """
        return self._collect_valid(lambda attempt: attempt.evaluations)

    def _collect_valid(self, pick: Callable[[AttemptHistory], dict[int, T]]) -> list[T]:
        """Return the entries of all attempts by step, each up to the start of a later attempt."""
        kept: dict[int, T] = {}
        limit: int | None = None
        # Newest first, since the start of an attempt limits all attempts before it.
        for number in sorted(self.attempts, reverse=True):
            attempt = self.attempts[number]
            for step, one in pick(attempt).items():
                if limit is None or step <= limit:
                    kept[step] = one
            if attempt.first_step is not None:
                limit = attempt.first_step if limit is None else min(limit, attempt.first_step)
        return [kept[step] for step in sorted(kept)]

    def newest_checkpoint(self) -> int | None:
        """Return the newest saved step that no later attempt has discarded."""
        for number in sorted(self.attempts, reverse=True):
            attempt = self.attempts[number]
            # The checkpoint that an attempt started from counts as well; step 0 means from scratch.
            known = [*attempt.checkpoints, *([attempt.first_step] if attempt.first_step else [])]
            if known or attempt.first_step == 0:
                return max(known, default=None)
        return None

    def _journals(self) -> list[tuple[Path, int, int | None]]:
        found = []
        paths = self._folder.glob(f"{run_layout.ATTEMPTS}/*/*/*.jsonl") if self._folder else ()
        for path in sorted(paths):
            rank, number = (
                run_layout.rank_of_journal(path.name),
                run_layout.attempt_of_folder(path.parts[-3]),
            )
            if number is None:
                continue
            if path.name == run_layout.SUPERVISOR_JOURNAL or (
                rank is not None and self._may_speak(path.parent.name, number, rank)
            ):
                found.append((path, number, rank))
        return found

    def _may_speak(self, node: str, attempt: int, rank: int) -> bool:
        """Return whether a node may record what a rank did: its own ranks only."""
        places = self._known_places.get(attempt)
        if not places:
            places = self._known_places[attempt] = self._places(attempt)
        # A node that was renamed since the launch is not among them.
        return places.get(rank) == node or node not in places.values()

    def _take(
        self,
        line: dict[str, Any],
        number: int,
        folder: Path,
        rank: int | None,
        steps: list[StepRecord],
    ) -> None:
        node = folder.name
        attempt = self.attempts.setdefault(number, AttemptHistory())
        line = take_line(line, attempt, number, node, rank)
        if rank is not None:
            trace = read_trace(line, rank, folder)
            if trace is not None and len(attempt.traces) < MAX_TRACES:
                attempt.traces.append(trace)
            record = step_record(line, number)
            if record is not None and attempt.add(record):
                steps.append(record)
        if line["kind"] == "preview":
            with contextlib.suppress(WireError):  # from another version
                self.data = from_wire(DataPreview, line)
        # A regrouping is told once a step after it shows what it cost.
        if line["kind"] != "regrouped" and _is_shown(line, attempt):
            self._describe(line, number, node, rank)

    def _tell_returns(self) -> None:
        """Add the events of regroupings that a step has followed, or a newer attempt."""
        for number, attempt in self.attempts.items():
            for generation, one in attempt.regroupings.items():
                back, last = attempt.find_return(one), attempt.steps.get(one.step)
                is_over = back is not None or number < max(self.attempts)
                if not is_over or (number, generation) in self._told_returns:
                    continue
                self._told_returns.add((number, generation))
                line = {
                    "kind": "regrouped",
                    "time_s": one.time_s,
                    "step": one.step,
                    "nodes": list(one.nodes),
                    "lost_nodes": list(one.lost_nodes),
                    "reason": attempt.describe_lost(one),
                }
                if back is not None:
                    last_s = last.time_s if last is not None else None
                    line["cost_s"] = measure_cost(last_s, one.noticed_s, back.time_s)
                self._describe(line, number, one.nodes[0], 0)

    def _describe(self, line: dict[str, Any], number: int, node: str, rank: int | None) -> None:
        entry = describe_line(line, self._run_id, number, node, rank)
        # Several ranks record the same event; equal keys merge them.
        if entry is not None and entry.key not in self._seen and len(self.events) < MAX_EVENTS:
            self._seen.add(entry.key)
            self.events.append(entry.event)


def _is_shown(line: dict[str, Any], attempt: AttemptHistory) -> bool:
    """Return True if the user sees a line: a checkpoint only once all of its copies exist."""
    saved = attempt.checkpoints.get(step_of(line) or 0)
    return line["kind"] != "checkpoint" or saved is None or saved.is_complete
