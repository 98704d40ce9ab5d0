"""History of one attempt from its journals: steps, checkpoints, losses and pauses."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from app.events import Certificate, EvaluationRecord, PhaseProgress, RankTrace, StepRecord
from app.runs.journals import journal
from app.runs.journals.event_text import describe_exit
from app.text import show_list

# Newest steps for judging the speed: few enough to follow a change within a minute or two, and
# enough for a median that a slow checkpoint step does not move.
PACE_STEPS = 20
MAX_STEPS = 5_000_000
"""Maximum number of steps of an attempt in memory; a node may write any number of lines."""
MAX_PAUSES = 50
"""Maximum number of listed pauses of an attempt."""
MAX_AMOUNT = 1e18
"""Limit of a phase's amounts, below which they are shown."""


@dataclass(slots=True)
class RankHistory:
    """Newest figures that one rank of one attempt has recorded."""

    progress: PhaseProgress | None = None
    """Current phase; None before the first one."""
    step: int | None = None
    time_s: float | None = None
    """Time at the end of that step, by its node's clock; None before the first one."""
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
    """Time until the checkpoint was written and hashed, in seconds."""
    stall_s: float
    """Time that training paused for it, in seconds."""
    num_copies: int = 0
    """Number of ranks that have saved it."""
    num_planned: int = 1
    """Number of ranks that save each checkpoint."""

    @property
    def is_complete(self) -> bool:
        """True if every copy was saved."""
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
    """Time in seconds since the epoch, like `began_s`; None before its end."""


@dataclass(frozen=True, slots=True)
class RecordedRegrouping:
    """Loss that the remaining ranks survived in their processes."""

    step: int
    """Newest completed step."""
    nodes: tuple[str, ...]
    lost_nodes: tuple[str, ...]
    seconds: float
    """Time from the loss to the new group, in seconds, on the rank that noticed it first."""
    time_s: float
    """Time of the new group by its node's clock, in seconds since the epoch."""

    @property
    def noticed_s(self) -> float:
        """Time at which the loss was noticed, in seconds since the epoch."""
        return self.time_s - self.seconds


@dataclass(frozen=True, slots=True)
class RankKill:
    """End of a rank by a signal; the loss of another rank never causes one."""

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
    """Nodes that saved a checkpoint, or started from their copy of it, by its step."""
    failed_saves: dict[int, str] = field(default_factory=dict)
    """Reasons why a checkpoint could not be saved, by step."""
    regroupings: dict[int, RecordedRegrouping] = field(default_factory=dict)
    """Losses that the remaining ranks survived in their processes, by generation."""
    kills: dict[str, RankKill] = field(default_factory=dict)
    """First rank of each node that was ended by a signal, by node."""
    lost_ranks: set[int] = field(default_factory=set)
    """Ranks that these regroupings lost."""
    request_steps: dict[str, int] = field(default_factory=dict)
    """Step after which the ranks acted on a control request, by the request's id."""
    certificate: Certificate | None = None
    traces: list[RankTrace] = field(default_factory=list)
    heard_s: dict[str, float] = field(default_factory=dict)
    """Time of the newest journal line by node, in seconds since the epoch."""
    failed_s: dict[str, float] = field(default_factory=dict)
    """Time at which a rank first failed or stood still by node, in seconds since the epoch."""
    pauses: deque[HeatPause] = field(default_factory=lambda: deque(maxlen=MAX_PAUSES))
    """Newest pauses for cooling, oldest first."""
    first: StepRecord | None = None
    newest: StepRecord | None = None
    recent: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=PACE_STEPS))
    """Newest `PACE_STEPS` steps, whose median is the current speed."""

    @property
    def members(self) -> tuple[str, ...]:
        """Nodes that train since the newest regrouping; empty for all of the attempt."""
        return self.regroupings[max(self.regroupings)].nodes if self.regroupings else ()

    def find_loss_s(self) -> float | None:
        """Return the time at which the first rank or node was lost; None: not known.

        A node that vanishes records no failure, so its newest line counts.
        """
        ends = [self.failed_s.get(node, heard_s) for node, heard_s in self.heard_s.items()]
        return min(ends, default=None)

    def find_return(self, one: RecordedRegrouping) -> StepRecord | None:
        """Return the first step after a regrouping, or None before it is finished."""
        # The lost rank may have recorded the next step before it was lost.
        later = (self.steps.get(one.step + more) for more in (1, 2))
        return next((step for step in later if step and step.time_s >= one.noticed_s), None)

    def describe_lost(self, one: RecordedRegrouping) -> str:
        """Return the cause of the loss of the nodes that a regrouping left out."""
        # A rank that was killed later was only cleaned up, and is not a cause.
        kills = [self.kills[node] for node in one.lost_nodes if node in self.kills]
        causes = sorted((k for k in kills if k.time_s <= one.time_s), key=lambda k: k.time_s)
        killed = [cause.node for cause in causes]
        silent = [node for node in one.lost_nodes if node not in killed]
        verb = "was" if len(silent) == 1 else "were"
        lost = [f"{show_list(silent)} {verb} lost"] if silent else []
        return show_list([*(cause.text for cause in causes), *lost])

    def add(self, record: StepRecord) -> bool:
        """Add a step; return False if another rank has recorded it already."""
        if record.step in self.steps or len(self.steps) >= MAX_STEPS:
            return False
        self.steps[record.step] = record
        self.first = self.first or record
        self.newest = record
        self.recent.append(record)
        return True


def take_line(
    line: dict[str, Any], attempt: AttemptHistory, number: int, node: str, rank: int | None
) -> dict[str, Any]:
    """Add a journal line to the history of an attempt.

    Args:
        line: parsed line.
        attempt: history so far.
        number: number of the attempt.
        node: node that wrote it.
        rank: rank that wrote it; None for the supervisor's journal.

    Returns:
        The line.
    """
    time_s = journal.time_of(line)
    attempt.heard_s[node] = max(time_s, attempt.heard_s.get(node, 0.0))
    if rank is not None:
        _take_rank_line(line, attempt, attempt.ranks.setdefault(rank, RankHistory()), number)
        _take_holder(line, attempt, node)
        _take_pause(line, attempt, node)
        return _take_regrouping(line, attempt)
    _take_kill(line, attempt, node)
    if line["kind"] == "moving":  # a rank that stood still continues
        attempt.failed_s.pop(node, None)
    elif line["kind"] == "standing" or (line["kind"] == "rank_exited" and line.get("exit_code")):
        attempt.failed_s.setdefault(node, time_s)
    return line


def _take_rank_line(
    line: dict[str, Any], attempt: AttemptHistory, rank: RankHistory, number: int
) -> None:
    kind = line["kind"]
    if kind == "phase":
        rank.progress = _read_progress(line)
    elif kind == "started":
        attempt.total_steps = journal.whole_of(line, "total_steps")
        attempt.first_step = journal.step_of(line)
        attempt.shares = journal.shares_of(line) or attempt.shares
        rank.step = attempt.first_step
        rank.peak_flops_per_s = journal.number_of(line, "peak_flops_per_s")
    elif kind == "checkpoint":
        _take_checkpoint(line, attempt)
    elif kind == "checkpoint_failed":
        attempt.failed_saves[journal.step_of(line) or 0] = journal.text_of(line, "message")
    elif kind == "certificate":
        attempt.certificate = journal.read_certificate(line) or attempt.certificate
    # Journals call a control request a wish: older versions wrote them.
    elif kind == "wish":
        attempt.request_steps[journal.text_of(line, "wish_id")] = journal.step_of(line) or 0
    elif kind == "eval":
        _take_evaluation(line, attempt, number)
    elif kind == "setting":
        rank.setting = UsedSetting(
            micro_tokens=journal.whole_of(line, "micro_tokens") or 0,
            num_recomputed=journal.whole_of(line, "num_recomputed") or 0,
            num_moved=journal.whole_of(line, "num_moved") or 0,
        )
    elif kind == "step":
        _take_step(line, rank)


def _read_progress(line: dict[str, Any]) -> PhaseProgress | None:
    phase = journal.text_of(line, "phase")
    if not phase:
        return None
    done, total = _amount_of(line, "done"), _amount_of(line, "total")
    share = journal.number_of(line, "share")
    if done is not None and total:
        share = min(max(done / total, 0.0), 1.0)
    return PhaseProgress(
        phase=phase,
        done=done,
        total=total,
        share=share,
        expected_s=_amount_of(line, "expected_s"),
        time_s=journal.time_of(line) or None,
    )


def _amount_of(line: dict[str, Any], key: str) -> float | None:
    """Return an amount that can be shown, else None; a node may write any number."""
    value = journal.number_of(line, key)
    return value if value is not None and 0 <= value < MAX_AMOUNT else None


def _take_kill(line: dict[str, Any], attempt: AttemptHistory, node: str) -> None:
    code = journal.whole_of(line, "exit_code")
    if line["kind"] == "rank_exited" and code is not None and code < 0:
        attempt.kills.setdefault(
            node, RankKill(node, describe_exit(line, node), journal.time_of(line))
        )


def _take_regrouping(line: dict[str, Any], attempt: AttemptHistory) -> dict[str, Any]:
    generation = journal.whole_of(line, "generation")
    if line["kind"] != "regrouped" or generation is None:
        return line
    found = RecordedRegrouping(
        step=journal.step_of(line) or 0,
        nodes=journal.names_of(line, "nodes"),
        lost_nodes=journal.names_of(line, "lost_nodes"),
        seconds=journal.number_of(line, "seconds") or 0.0,
        time_s=journal.time_of(line),
    )
    # Each rank writes the line; the one with the longest time noticed the loss first.
    before = attempt.regroupings.get(generation)
    if found.nodes and (before is None or found.seconds > before.seconds):
        attempt.regroupings[generation] = found
    lost = line.get("lost_ranks")
    if isinstance(lost, list):
        attempt.lost_ranks.update(rank for rank in lost if isinstance(rank, int))
    return line


def _take_checkpoint(line: dict[str, Any], attempt: AttemptHistory) -> None:
    step = journal.step_of(line)
    if step is None:
        return
    # Every rank that writes records its own times; the slowest one counts.
    before = attempt.checkpoints.get(step, SaveTimes(0.0, 0.0))
    found = attempt.checkpoints[step] = SaveTimes(
        seconds=max(before.seconds, journal.number_of(line, "seconds") or 0.0),
        stall_s=max(before.stall_s, journal.number_of(line, "stall_s") or 0.0),
        num_copies=before.num_copies + 1,
        num_planned=journal.whole_of(line, "copies") or 1,
    )
    if found.is_complete:
        attempt.failed_saves.pop(step, None)  # a later attempt to save succeeded


def _take_holder(line: dict[str, Any], attempt: AttemptHistory, node: str) -> None:
    step = journal.step_of(line)
    # Step 0 is a start from scratch, which holds no copy.
    if step and line["kind"] in ("checkpoint", "started"):
        attempt.holders.setdefault(step, set()).add(node)


def _take_pause(line: dict[str, Any], attempt: AttemptHistory, node: str) -> None:
    if line["kind"] == "too_hot":
        attempt.pauses.append(
            HeatPause(
                node=node,
                gpu=journal.text_of(line, "gpu") or f"a GPU of {node}",
                celsius=journal.number_of(line, "celsius"),
                step=journal.step_of(line) or 0,
                began_s=journal.time_of(line),
            )
        )
    elif line["kind"] == "cooled":
        # One `cooled` line ends the pauses of all GPUs at that step.
        for place, one in enumerate(attempt.pauses):
            if one.step == journal.step_of(line) and one.ended_s is None:
                attempt.pauses[place] = replace(one, ended_s=journal.time_of(line))


def _take_evaluation(line: dict[str, Any], attempt: AttemptHistory, number: int) -> None:
    step = journal.step_of(line)
    if step is not None:
        attempt.evaluations[step] = EvaluationRecord(
            attempt=number,
            step=step,
            loss=journal.number_of(line, "loss"),
            perplexity=journal.number_of(line, "perplexity"),
        )


def _take_step(line: dict[str, Any], rank: RankHistory) -> None:
    rank.step = journal.step_of(line)
    rank.time_s = journal.number_of(line, "time_s")
    rank.tokens_per_s = journal.number_of(line, "tokens_per_s")
    rank.step_s = journal.number_of(line, "step_s")
    rank.input_s = journal.number_of(line, "input_s")
    rank.compute_s = journal.number_of(line, "compute_s")
    rank.wait_s = journal.number_of(line, "wait_s")
    rank.optimizer_s = journal.number_of(line, "optimizer_s")
    rank.mfu = journal.number_of(line, "mfu")
    rank.model_flops = journal.number_of(line, "model_flops")
    rank.memory_bytes = journal.whole_of(line, "memory_bytes")
    rank.memory_unpacked_bytes = journal.whole_of(line, "memory_unpacked_bytes")
    rank.memory_reserved_bytes = journal.whole_of(line, "memory_reserved_bytes")
    tokens = journal.whole_of(line, "tokens")
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
