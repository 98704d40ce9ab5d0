"""Detect a rank that hangs, and name the one that most likely blocks the others.

A rank writes its heartbeat from the training loop itself, so that no thread can hide a hang. When
one hangs, all others wait for it in the next collective; the culprit is the one that is stopped or
stuck in the kernel, else the one furthest behind. Times are of the kernel's monotonic clock, which
all processes share and which pauses while the PC sleeps.
"""

from __future__ import annotations

import contextlib
import signal
import statistics
from collections import deque
from dataclasses import dataclass, field

from agents.contract.run import AttemptIntent
from agents.supervisor.ranks import RankProcess

TRAINING_LIMIT_S = 60.0
OTHER_LIMIT_S = 600.0
"""Limit for loading, warm-up, saving and evaluation, and before the first heartbeat, in seconds."""
STEPS_ALLOWED = 10
"""Maximum silence of a rank, as a multiple of its usual silence or of its forecast step time."""
ABSENCE_S = 10.0
"""Gap between two checks that shows that this process itself was paused, in seconds."""
REMOTE_PATIENCE_S = 5.0
"""Extra time for a rank that merely waits, when other nodes have ranks too, in seconds."""


@dataclass(frozen=True)
class Stall:
    """A rank that was silent for longer than its phase allows."""

    rank: RankProcess
    phase: str
    step: int | None
    age_s: float
    process_state: str
    """State in /proc/PID/stat: T stopped, D stuck in the kernel, R busy, S waiting."""
    maybe_remote: bool
    """Whether the cause may be a rank on another node."""


@dataclass
class _Track:
    rank: RankProcess
    beat_s: float
    step: int | None = None
    phase: str = "loading"
    silences_s: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    """Longest silence in each of the last steps; a rank also beats between micro-batches."""
    silence_s: float = 0.0
    """Longest silence in the current step, in seconds."""
    foreseen_step_s: float = 0.0
    """Step time that the rank forecast from its warm-up, until it has done a step, in seconds."""


class StallWatch:
    """Follows the heartbeats of this node's ranks."""

    def __init__(self, ranks: list[RankProcess], intent: AttemptIntent) -> None:
        self._tracks = [_Track(rank, rank.started_s) for rank in ranks]
        self._looked_s = max((rank.started_s for rank in ranks), default=0.0)
        self._has_others = any(r.node != intent.node for r in intent.ranks)
        named = intent.environ.get("RACKLESS_STALL_S", "")
        self._training_limit_s = float(named) if named else TRAINING_LIMIT_S

    def check(self, now_s: float) -> Stall | None:
        """Read the heartbeats; return the current stall, if any."""
        self._forgive_absence(now_s)
        late = []
        for track in self._tracks:
            if track.rank.has_ended:
                continue
            _follow(track)
            if now_s - track.beat_s > self._limit_s(track):
                late.append(track)
        stalls = sorted((self._describe(t, now_s) for t in late), key=_culprit_first)
        if not stalls:
            return None
        first = stalls[0]
        patience_s = REMOTE_PATIENCE_S if first.maybe_remote else 0.0
        # Give the other nodes time to find the culprit: their verdict says more than ours.
        overdue_s = max(now_s - t.beat_s - self._limit_s(t) for t in late)
        return first if overdue_s >= patience_s else None

    def _forgive_absence(self, now_s: float) -> None:
        """Restart all timers if this process did not run either (a paused PC)."""
        if now_s - self._looked_s > ABSENCE_S:
            for track in self._tracks:
                track.beat_s = max(track.beat_s, now_s)
        self._looked_s = now_s

    def dump_stacks(self) -> None:
        """Make every rank dump its Python stacks to its log, which ends it."""
        for track in self._tracks:
            with contextlib.suppress(OSError):
                # faulthandler dumps on SIGABRT; a stopped process needs SIGCONT to receive it.
                track.rank.send_signal(signal.SIGABRT)
                track.rank.send_signal(signal.SIGCONT)

    def _limit_s(self, track: _Track) -> float:
        if track.phase != "training":
            return max(OTHER_LIMIT_S, self._training_limit_s)
        usual_s = track.foreseen_step_s
        if track.silences_s:
            usual_s = statistics.median(track.silences_s)
        # The median, because one slow step (a save, a busy disk) must not raise the limit.
        return max(self._training_limit_s, STEPS_ALLOWED * usual_s)

    def _describe(self, track: _Track, now_s: float) -> Stall:
        state = read_process_state(track.rank.pid)
        return Stall(
            rank=track.rank,
            phase=track.phase,
            step=track.step,
            age_s=now_s - track.beat_s,
            process_state=state,
            # A process that runs or sleeps may be in a collective; a stopped one is the cause.
            maybe_remote=self._has_others and state not in ("T", "t", "D"),
        )


def read_process_state(pid: int) -> str:
    """Return the state letter of a process, empty when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode("ascii")
    except (OSError, IndexError):
        return ""


def _follow(track: _Track) -> None:
    beat = track.rank.read_heartbeat()
    at_s, step = beat.get("monotonic_s"), beat.get("step")
    if not isinstance(at_s, (int, float)):
        return
    if at_s <= track.beat_s:
        # An old beat must not undo the time that was granted after a pause, or at an adoption, but
        # an adopted rank may be in the middle of the training.
        if track.step is None and isinstance(step, int):
            track.step, track.phase = step, str(beat.get("phase", track.phase))
        return
    if isinstance(step, int):
        # Only a silence that began in training counts: saving and evaluating take longer.
        if track.step is not None and track.phase == "training":
            num_steps = step - track.step  # more than one where they are quick
            silence_s = (at_s - track.beat_s) / max(1, num_steps)
            track.silence_s = max(track.silence_s, silence_s)
            if num_steps > 0:
                track.silences_s.append(track.silence_s)
                track.silence_s = 0.0
        track.step = step
    foreseen_s = beat.get("foreseen_step_s")
    if isinstance(foreseen_s, (int, float)):
        track.foreseen_step_s = foreseen_s
    track.phase = str(beat.get("phase", track.phase))
    track.beat_s = at_s


def _culprit_first(stall: Stall) -> tuple[int, int, float]:
    # At the same step, the rank that fell silent first is the likelier cause.
    order = {"T": 0, "t": 0, "D": 1}.get(stall.process_state, 2)
    return order, -1 if stall.step is None else stall.step, -stall.age_s
