"""History of one run as its mirrored journals record it, kept up to date line by line.

There is one `RunHistory` per run and process. It reads the journals of all ranks, because the node
of rank 0 may be the one that was lost: a step counts once any rank has recorded it. A resume makes
the steps of older attempts beyond its checkpoint void; `steps` leaves them out.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from agents.contract.data import DataPreview
from agents.contract.messages import WireError, from_wire
from agents.contract.run_layout import (
    ATTEMPTS,
    SUPERVISOR_JOURNAL,
    attempt_of_folder,
    rank_of_journal,
)
from app.events import (
    Certificate,
    EvaluationRecord,
    PhaseProgress,
    RankTrace,
    RunEvent,
    StepRecord,
)
from app.runs.journals.event_text import describe_exit, describe_line
from app.runs.journals.journal import (
    JournalTail,
    names_of,
    number_of,
    read_certificate,
    read_trace,
    shares_of,
    step_of,
    step_record,
    text_of,
    time_of,
    whole_of,
)
from app.text import show_list

# Newest steps that speed is judged by: few enough to follow a change within a minute or two, and
# enough for a median that a slow checkpoint step does not move.
PACE_STEPS = 20
MAX_STEPS = 5_000_000
"""Number of steps of an attempt that are kept in memory: a node may write any number of lines."""
MAX_EVENTS = 20_000
"""Number of events of a run that are kept in memory."""
MAX_TRACES = 1000
"""Number of traces of an attempt that are listed."""
MAX_PAUSES = 50
"""Number of pauses of an attempt that are listed."""
MAX_AMOUNT = 1e18
"""Amounts of a phase from this one on are not shown."""


T = TypeVar("T")


@dataclass(slots=True)
class RankHistory:
    """Newest figures that one rank of one attempt has recorded."""

    progress: PhaseProgress | None = None
    """Current phase; None before the first one."""
    step: int | None = None
    time_s: float | None = None
    """Time at which it finished that step, by its node's clock; None before its first one."""
    tokens_per_s: float | None = None
    step_s: float | None = None
    input_s: float | None = None
    compute_s: float | None = None
    wait_s: float | None = None
    optimizer_s: float | None = None
    mfu: float | None = None
    model_flops: float | None = None
    peak_flops_per_s: float | None = None
    memory_bytes: int | None = None
    memory_unpacked_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    setting: UsedSetting | None = None
    paces: deque[RunPace] = field(default_factory=lambda: deque(maxlen=PACE_STEPS))
    """Pace of each of the newest `PACE_STEPS` steps."""


@dataclass(frozen=True, slots=True)
class UsedSetting:
    """Execution setting that a rank's tuner chose."""

    micro_tokens: int
    num_recomputed: int
    num_moved: int


@dataclass(frozen=True, slots=True)
class RunPace:
    """Work and times of one rank in one step."""

    step: int
    tokens: int
    step_s: float
    compute_s: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class SaveTimes:
    """Times of saving one checkpoint, on the slowest rank."""

    seconds: float
    """Time until it was written and hashed."""
    stall_s: float
    """Time that training paused for it."""
    num_copies: int = 0
    """Number of ranks that saved it."""
    num_planned: int = 1
    """Number of ranks that save each checkpoint."""

    @property
    def is_complete(self) -> bool:
        """Whether every copy was saved."""
        return self.num_copies >= self.num_planned


@dataclass(frozen=True, slots=True)
class HeatPause:
    """Pause of all ranks until a GPU had cooled down."""

    node: str
    gpu: str
    celsius: float | None
    """Temperature at its start, in degrees Celsius."""
    step: int
    began_s: float
    ended_s: float | None = None
    """Time in seconds since the epoch, like `began_s`; None: it has not ended."""


@dataclass(frozen=True, slots=True)
class Regrouping:
    """Loss after which the ranks that were left went on in their processes."""

    step: int
    """Newest step that was done."""
    nodes: tuple[str, ...]
    lost_nodes: tuple[str, ...]
    seconds: float
    """Time from the loss to the new group, on the rank that noticed it first."""
    time_s: float
    """Time of the new group by its node's clock, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class RankKill:
    """End of a rank by a signal, which no loss of another rank causes."""

    node: str
    text: str
    """Sentence with rank, node, signal and phase."""
    time_s: float
    """Time in seconds since the epoch."""


@dataclass(slots=True)
class AttemptHistory:
    ranks: dict[int, RankHistory] = field(default_factory=dict)
    steps: dict[int, StepRecord] = field(default_factory=dict)
    shares: tuple[float, ...] = ()
    total_steps: int | None = None
    first_step: int | None = None
    """Step after which training started; None while it has not started."""
    evaluations: dict[int, EvaluationRecord] = field(default_factory=dict)
    """Evaluations by step."""
    checkpoints: dict[int, SaveTimes] = field(default_factory=dict)
    """Saved checkpoints by step."""
    holders: dict[int, set[str]] = field(default_factory=dict)
    """Nodes that saved a checkpoint, or started from their copy of one, by its step."""
    failed_saves: dict[int, str] = field(default_factory=dict)
    """Reasons why a checkpoint could not be saved, by step."""
    regroupings: dict[int, Regrouping] = field(default_factory=dict)
    """Losses after which the ranks that were left went on in their processes, by generation."""
    kills: dict[str, RankKill] = field(default_factory=dict)
    """First rank of each node that a signal ended, by the node."""
    lost_ranks: set[int] = field(default_factory=set)
    """Ranks that these have cost."""
    request_steps: dict[str, int] = field(default_factory=dict)
    """Step after which the ranks acted on a control request, by the request's id."""
    certificate: Certificate | None = None
    traces: list[RankTrace] = field(default_factory=list)
    pauses: deque[HeatPause] = field(default_factory=lambda: deque(maxlen=MAX_PAUSES))
    """Newest pauses for cooling, oldest first."""
    first: StepRecord | None = None
    newest: StepRecord | None = None
    recent: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=PACE_STEPS))
    """Newest `PACE_STEPS` steps, whose median is the current speed."""

    @property
    def members(self) -> tuple[str, ...]:
        """Nodes that train since the newest regrouping; empty: all of the attempt."""
        return self.regroupings[max(self.regroupings)].nodes if self.regroupings else ()

    def describe_lost(self, one: Regrouping) -> str:
        """Return what ended the ranks of the nodes that a regrouping left out."""
        # A rank that was ended later is what was left there, and no cause.
        kills = [self.kills[node] for node in one.lost_nodes if node in self.kills]
        causes = sorted((k for k in kills if k.time_s <= one.time_s), key=lambda k: k.time_s)
        killed = [cause.node for cause in causes]
        silent = [node for node in one.lost_nodes if node not in killed]
        verb = "was" if len(silent) == 1 else "were"
        lost = [f"{show_list(silent)} {verb} lost"] if silent else []
        return show_list([*(cause.text for cause in causes), *lost])

    def add(self, record: StepRecord) -> bool:
        """Add a step; return False when another rank has recorded it already."""
        if record.step in self.steps or len(self.steps) >= MAX_STEPS:
            return False
        self.steps[record.step] = record
        self.first = self.first or record
        self.newest = record
        self.recent.append(record)
        return True


@dataclass(frozen=True, slots=True)
class HistoryUpdate:
    """New entries since the last refresh."""

    steps: tuple[StepRecord, ...]
    events: tuple[RunEvent, ...]
    changed: bool


class RunHistory:
    """Reads the mirrored journals below one run's folder."""

    def __init__(self, run_id: str, folder: Path | None) -> None:
        """`folder` is that of the run; None: it has none that may be read."""
        self._run_id = run_id
        self._folder = folder
        self._tails: dict[Path, JournalTail] = {}
        self._seen: set[tuple[object, ...]] = set()
        self.attempts: dict[int, AttemptHistory] = {}
        self.events: list[RunEvent] = []
        self.data: DataPreview | None = None
        """Preview of the run's data, as the newest attempt recorded it."""

    def refresh(self) -> HistoryUpdate:
        """Read what was appended since the last call."""
        steps: list[StepRecord] = []
        num_events = len(self.events)
        changed = False
        for path, attempt, rank in self._journals():
            lines = self._tails.setdefault(path, JournalTail(path)).read()
            changed = changed or bool(lines)
            for line in lines:
                self._take(line, attempt, path.parent, rank, steps)
        # Before sorting: the journals of two nodes are read one after the other, so new events
        # may belong between old ones.
        news = tuple(self.events[num_events:])
        self.events.sort(key=lambda event: event.time_s)
        return HistoryUpdate(tuple(sorted(steps, key=lambda s: (s.attempt, s.step))), news, changed)

    def attempt(self, number: int) -> AttemptHistory:
        return self.attempts.get(number) or AttemptHistory()

    def steps(self) -> list[StepRecord]:
        """Return the valid steps, in order."""
        return self._collect_valid(lambda attempt: attempt.steps)

    def evaluations(self) -> list[EvaluationRecord]:
        """Return the valid evaluations, in order: none of a step that was trained again."""
        return self._collect_valid(lambda attempt: attempt.evaluations)

    def _collect_valid(self, pick: Callable[[AttemptHistory], dict[int, T]]) -> list[T]:
        """Return the entries of all attempts by step, each up to where a later attempt started."""
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
            # An attempt started from a checkpoint, too; step 0 means from scratch.
            known = [*attempt.checkpoints, *([attempt.first_step] if attempt.first_step else [])]
            if known or attempt.first_step == 0:
                return max(known, default=None)
        return None

    def _journals(self) -> list[tuple[Path, int, int | None]]:
        found = []
        paths = self._folder.glob(f"{ATTEMPTS}/*/*/*.jsonl") if self._folder else ()
        for path in sorted(paths):
            rank, number = rank_of_journal(path.name), attempt_of_folder(path.parts[-3])
            if number is not None and (rank is not None or path.name == SUPERVISOR_JOURNAL):
                found.append((path, number, rank))
        return found

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
        if rank is not None:
            known = attempt.ranks.setdefault(rank, RankHistory())
            _take_rank_line(line, attempt, known, number)
            _take_holder(line, attempt, node)
            _take_pause(line, attempt, node)
            line = _take_regrouping(line, attempt)
            trace = read_trace(line, rank, folder)
            if trace is not None and len(attempt.traces) < MAX_TRACES:
                attempt.traces.append(trace)
            record = step_record(line, number)
            if record is not None and attempt.add(record):
                steps.append(record)
        _take_kill(line, attempt, node)
        if line["kind"] == "preview":
            with contextlib.suppress(WireError):  # written by another version
                self.data = from_wire(DataPreview, line)
        if not _is_told(line, attempt):
            return
        entry = describe_line(line, self._run_id, number, node, rank)
        # Several ranks record the same event; equal keys make it one.
        if entry is not None and entry.key not in self._seen and len(self.events) < MAX_EVENTS:
            self._seen.add(entry.key)
            self.events.append(entry.event)


def _is_told(line: dict[str, Any], attempt: AttemptHistory) -> bool:
    """Return whether people hear of a line: of a checkpoint only once all of its copies exist."""
    saved = attempt.checkpoints.get(step_of(line) or 0)
    return line["kind"] != "checkpoint" or saved is None or saved.is_complete


def _take_rank_line(
    line: dict[str, Any], attempt: AttemptHistory, rank: RankHistory, number: int
) -> None:
    kind = line["kind"]
    if kind == "phase":
        rank.progress = _read_progress(line)
    elif kind == "started":
        attempt.total_steps = whole_of(line, "total_steps")
        attempt.first_step = step_of(line)
        attempt.shares = shares_of(line) or attempt.shares
        rank.step = attempt.first_step
        rank.peak_flops_per_s = number_of(line, "peak_flops_per_s")
    elif kind == "checkpoint":
        _take_checkpoint(line, attempt)
    elif kind == "checkpoint_failed":
        attempt.failed_saves[step_of(line) or 0] = text_of(line, "message")
    elif kind == "certificate":
        attempt.certificate = read_certificate(line) or attempt.certificate
    # Journals call a control request a wish.
    elif kind == "wish":
        attempt.request_steps[text_of(line, "wish_id")] = step_of(line) or 0
    elif kind == "eval":
        _take_evaluation(line, attempt, number)
    elif kind == "setting":
        rank.setting = UsedSetting(
            micro_tokens=whole_of(line, "micro_tokens") or 0,
            num_recomputed=whole_of(line, "num_recomputed") or 0,
            num_moved=whole_of(line, "num_moved") or 0,
        )
    elif kind == "step":
        _take_step(line, rank)


def _read_progress(line: dict[str, Any]) -> PhaseProgress | None:
    phase = text_of(line, "phase")
    if not phase:
        return None
    done, total = _amount_of(line, "done"), _amount_of(line, "total")
    share = number_of(line, "share")
    if done is not None and total:
        share = min(max(done / total, 0.0), 1.0)
    return PhaseProgress(
        phase=phase,
        done=done,
        total=total,
        share=share,
        expected_s=_amount_of(line, "expected_s"),
        time_s=time_of(line) or None,
    )


def _amount_of(line: dict[str, Any], key: str) -> float | None:
    """Return an amount that can be shown, else None: a node may write any number."""
    value = number_of(line, key)
    return value if value is not None and 0 <= value < MAX_AMOUNT else None


def _take_kill(line: dict[str, Any], attempt: AttemptHistory, node: str) -> None:
    code = whole_of(line, "exit_code")
    if line["kind"] == "rank_exited" and code is not None and code < 0:
        attempt.kills.setdefault(node, RankKill(node, describe_exit(line, node), time_of(line)))


def _take_regrouping(line: dict[str, Any], attempt: AttemptHistory) -> dict[str, Any]:
    """Return the line; one of a regrouping with what the nodes that were lost say of the cause."""
    generation = whole_of(line, "generation")
    if line["kind"] != "regrouped" or generation is None:
        return line
    found = Regrouping(
        step=step_of(line) or 0,
        nodes=names_of(line, "nodes"),
        lost_nodes=names_of(line, "lost_nodes"),
        seconds=number_of(line, "seconds") or 0.0,
        time_s=time_of(line),
    )
    before = attempt.regroupings.get(generation)
    if found.nodes and (before is None or found.seconds > before.seconds):
        attempt.regroupings[generation] = found
    lost = line.get("lost_ranks")
    if isinstance(lost, list):
        attempt.lost_ranks.update(rank for rank in lost if isinstance(rank, int))
    return {**line, "reason": attempt.describe_lost(found)}


def _take_checkpoint(line: dict[str, Any], attempt: AttemptHistory) -> None:
    step = step_of(line)
    if step is None:
        return
    # Every rank that writes records its own times; the slowest one counts.
    before = attempt.checkpoints.get(step, SaveTimes(0.0, 0.0))
    found = attempt.checkpoints[step] = SaveTimes(
        seconds=max(before.seconds, number_of(line, "seconds") or 0.0),
        stall_s=max(before.stall_s, number_of(line, "stall_s") or 0.0),
        num_copies=before.num_copies + 1,
        num_planned=whole_of(line, "copies") or 1,
    )
    if found.is_complete:
        attempt.failed_saves.pop(step, None)  # the end of a run tries again


def _take_holder(line: dict[str, Any], attempt: AttemptHistory, node: str) -> None:
    step = step_of(line)
    # Step 0 is a start from scratch, which holds no copy.
    if step and line["kind"] in ("checkpoint", "started"):
        attempt.holders.setdefault(step, set()).add(node)


def _take_pause(line: dict[str, Any], attempt: AttemptHistory, node: str) -> None:
    if line["kind"] == "too_hot":
        attempt.pauses.append(
            HeatPause(
                node=node,
                gpu=text_of(line, "gpu") or f"a GPU of {node}",
                celsius=number_of(line, "celsius"),
                step=step_of(line) or 0,
                began_s=time_of(line),
            )
        )
    elif line["kind"] == "cooled":
        for place, one in enumerate(attempt.pauses):
            if one.step == step_of(line) and one.ended_s is None:
                attempt.pauses[place] = replace(one, ended_s=time_of(line))


def _take_evaluation(line: dict[str, Any], attempt: AttemptHistory, number: int) -> None:
    step = step_of(line)
    if step is not None:
        attempt.evaluations[step] = EvaluationRecord(
            attempt=number,
            step=step,
            loss=number_of(line, "loss"),
            perplexity=number_of(line, "perplexity"),
        )


def _take_step(line: dict[str, Any], rank: RankHistory) -> None:
    rank.step = step_of(line)
    rank.time_s = number_of(line, "time_s")
    rank.tokens_per_s = number_of(line, "tokens_per_s")
    rank.step_s = number_of(line, "step_s")
    rank.input_s = number_of(line, "input_s")
    rank.compute_s = number_of(line, "compute_s")
    rank.wait_s = number_of(line, "wait_s")
    rank.optimizer_s = number_of(line, "optimizer_s")
    rank.mfu = number_of(line, "mfu")
    rank.model_flops = number_of(line, "model_flops")
    rank.memory_bytes = whole_of(line, "memory_bytes")
    rank.memory_unpacked_bytes = whole_of(line, "memory_unpacked_bytes")
    rank.memory_reserved_bytes = whole_of(line, "memory_reserved_bytes")
    tokens = whole_of(line, "tokens")
    if None not in (rank.step, tokens, rank.step_s, rank.compute_s):
        rank.paces.append(
            RunPace(
                step=rank.step or 0,
                tokens=tokens or 0,
                step_s=rank.step_s or 0.0,
                compute_s=rank.compute_s or 0.0,
                wait_s=rank.wait_s or 0.0,
            )
        )
