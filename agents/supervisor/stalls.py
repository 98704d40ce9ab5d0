"""Detect a rank that hangs, and find the one that most likely blocks the others.

A rank writes its heartbeat from the training loop itself, so that no thread can hide a hang. When
one rank hangs, all others wait for it in the next collective; the culprit is a rank that is stopped
or stuck in the kernel, else the one that is furthest behind. Times are those of the monotonic
clock, which all processes share and which pauses while the PC sleeps.

A standstill is reported before any rank is ended: a stopped process within two seconds, a rank
without a step after ten times its usual silence, but not before ten seconds. The rank is ended then
only if the cause is certain: it is stopped, or it uses no CPU and has no other node to wait for.
Others get a minute, because a rank may compile during training and a network may recover.

In all other phases (imports, loading, saving, evaluating) a thread may write the heartbeat, so
there the kernel is asked: a rank that neither computes, reads, writes nor says that it waits for
others is reported after ten seconds and ended after a minute.
"""

from __future__ import annotations

import contextlib
import signal
import statistics
from collections import deque
from dataclasses import dataclass, field

from agents.contract.run import AttemptIntent
from agents.supervisor.process_signs import (
    FROZEN,
    HALTED,
    Usage,
    read_process_state,
    read_usage,
    shows_work,
)
from agents.supervisor.ranks import RankProcess

TRAINING_LIMIT_S = 60.0
"""Default maximum silence of a rank that trains, in seconds."""
NAMED_AFTER_S = 10.0
"""Minimum silence of a rank before a standstill is reported, in seconds."""
CUT_AFTER_S = 1.0
"""Minimum wait before a standstill is reported while another node does not answer, in seconds."""
STEPS_KNOWN = 5
"""Number of steps after which a rank's usual silence is known."""
STOPPED_CHECKS = 3
"""Number of consecutive checks that must find a process stopped before it is reported; tools that
limit CPU use stop processes for moments."""
IDLE_S = 2.0
"""Time over which CPU use is measured, in seconds."""
IDLE_SHARE = 0.1
"""CPU use below which a rank counts as idle, as a share of one core."""
OTHER_LIMIT_S = 600.0
"""Maximum silence of a rank that works in another phase than training, in seconds; it may hold the
interpreter while it maps a library from a slow disk."""
STEPS_ALLOWED = 10
"""Maximum silence of a rank, as a multiple of its usual silence or of its forecast step time."""
ABSENCE_S = 10.0
"""Gap between two checks that shows that this process itself was paused, in seconds."""
REMOTE_PATIENCE_S = 5.0
"""Extra time for a rank that only waits if other nodes have ranks, too, in seconds."""
LOOP_PHASES = (
    "training", "adapting", "evaluating", "saving", "paused", "cooling", "tracing",
    "regrouping", "done",
)  # fmt: skip
"""Phases of a rank that has reached the training loop."""
PATIENT_PHASES = ("paused", "cooling", "regrouping", "done")
"""Phases in which a rank waits without work: for disk space, a cooler GPU, or other nodes."""


@dataclass(frozen=True)
class Stall:
    """A rank that was silent for longer than its phase permits."""

    rank: RankProcess
    phase: str
    step: int | None
    age_s: float
    process_state: str
    """State in /proc/PID/stat: T stopped, D stuck in the kernel, R busy, S waiting; or F frozen."""
    maybe_remote: bool
    """True if the cause may be a rank on another node."""
    usage: Usage | None = None
    """Its last measurement if it neither computes, reads, writes nor waits for other ranks."""


@dataclass
class _Track:
    rank: RankProcess
    beat_s: float
    step: int | None = None
    phase: str = "loading"
    silences_s: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    """Longest silence per recent step (per poll if a poll spans several), in seconds; a rank also
    writes heartbeats between micro-batches."""
    silence_s: float = 0.0
    """Longest silence in the current step, in seconds."""
    foreseen_step_s: float = 0.0
    """Step time that the rank forecast in its warm-up, used until its first step, in seconds."""
    num_stopped: int = 0
    """Number of consecutive checks that found its process stopped."""
    stopped_s: float = 0.0
    """Time of the first of these checks, in seconds."""
    cpu: tuple[float, float] | None = None
    """Time and CPU time used until then at the last measurement of a silent rank, in seconds."""
    is_idle: bool = False
    """True if it used no CPU over the last measurement."""
    waits_since_s: float | None = None
    """Time since which it waits for other ranks in a phase that may take long, in seconds."""
    signs: tuple[object, ...] = ()
    """Step, phase, and number of heartbeats that its work itself has written."""
    sign_s: float = 0.0
    """Time of the newest sign that it works, in seconds."""
    usage: tuple[float, Usage] | None = None
    """Time and resources of the last measurement outside of training, in seconds."""


class StallWatch:
    """Watch over the heartbeats of this node's ranks."""

    def __init__(self, ranks: list[RankProcess], intent: AttemptIntent) -> None:
        self._tracks = [_Track(rank, rank.started_s, sign_s=rank.started_s) for rank in ranks]
        self._looked_s = max((rank.started_s for rank in ranks), default=0.0)
        # Time of the last pause of this process; waits before it do not count.
        self._paused_s = 0.0
        self._has_others = any(r.node != intent.node for r in intent.ranks)
        named = intent.environ.get("RACKLESS_STALL_S", "")
        self._training_limit_s = float(named) if named else TRAINING_LIMIT_S

    def check(self, now_s: float, *, is_stopping: bool = False) -> Stall | None:
        """Read the heartbeats; return the stall that must be ended, if any.

        Args:
            now_s: time on the monotonic clock, in seconds.
            is_stopping: True if the run was asked to end. Then the network need not recover, and a
                rank that stands still prevents the others from ending.
        """
        self._forgive_absence(now_s)
        late = []
        for track in self._tracks:
            if track.rank.has_ended:
                continue
            _follow(track)
            self._observe(track, now_s)
            if self._has_to_end(track, now_s, is_stopping=is_stopping):
                late.append(track)
        stalls = sorted((self._describe(t, now_s) for t in late), key=_culprit_first)
        if not stalls:
            return None
        first = stalls[0]
        if is_stopping or not first.maybe_remote:
            return first
        # Give the other nodes time to find the culprit: theirs is the more precise verdict.
        overdue_s = max(now_s - t.beat_s - self._limit_s(t) for t in late)
        return first if overdue_s >= REMOTE_PATIENCE_S else None

    def find_standstill(self, now_s: float, *, is_cut: bool = False) -> Stall | None:
        """Return the rank that stands still as of the last check, even if it need not be ended.

        Args:
            now_s: time on the monotonic clock, in seconds.
            is_cut: True if another node does not answer. Then waits are reported sooner, including
                those of ranks that evaluate or save, which normally may take long.
        """
        found = [
            self._describe(track, now_s)
            for track in self._tracks
            if not track.rank.has_ended
            and (
                track.num_stopped >= STOPPED_CHECKS
                or _is_quiet(track, now_s)
                or now_s - track.beat_s > self._named_after_s(track)
                or (is_cut and self._wait_s(track, now_s) > self._cut_after_s(track))
            )
        ]
        return min(found, key=_culprit_first, default=None)

    def measure_wait(self, now_s: float) -> float:
        """Return the longest time that a rank may have waited for another node, in seconds."""
        living = [track for track in self._tracks if not track.rank.has_ended]
        waits_s = [self._wait_s(track, now_s) for track in living]
        return max(waits_s, default=0.0) if self._has_others else 0.0

    def _wait_s(self, track: _Track, now_s: float) -> float:
        if track.phase == "training" or (track.phase == "evaluating" and not _waits(track)):
            return now_s - track.beat_s
        if track.waits_since_s is None:
            return 0.0
        return now_s - max(track.waits_since_s, self._paused_s)

    @property
    def has_begun(self) -> bool:
        """True if any rank has reached the training loop, so that there is state to save."""
        return any(track.phase in LOOP_PHASES for track in self._tracks)

    def _observe(self, track: _Track, now_s: float) -> None:
        """Record whether the process is halted, and whether a silent one uses CPU."""
        if read_process_state(track.rank.pid) in HALTED:
            track.num_stopped += 1
            track.stopped_s = now_s if track.num_stopped == 1 else track.stopped_s
        else:
            track.num_stopped = 0
        if track.phase != "training":
            track.cpu, track.is_idle = None, False
            _seek_sign(track, now_s)
            return
        track.usage, track.sign_s = None, now_s
        if now_s - track.beat_s <= self._named_after_s(track):
            track.cpu, track.is_idle = None, False
            return
        used_s = read_usage(track.rank.pid).cpu_s
        # The sum falls when one of its processes ends; then the measurement starts again.
        if track.cpu is None or used_s < track.cpu[1]:
            track.cpu = (now_s, used_s)
        began_s, before_s = track.cpu
        if now_s - began_s >= IDLE_S:
            track.is_idle = used_s - before_s < IDLE_SHARE * (now_s - began_s)
            track.cpu = (now_s, used_s)

    def _has_to_end(self, track: _Track, now_s: float, *, is_stopping: bool) -> bool:
        age_s = now_s - track.beat_s
        if age_s > self._limit_s(track):
            return True
        if track.num_stopped and now_s - track.stopped_s > min(NAMED_AFTER_S, self._limit_s(track)):
            return True
        if track.phase != "training":
            limit_s = NAMED_AFTER_S if is_stopping else max(NAMED_AFTER_S, self._training_limit_s)
            return _quiet_s(track, now_s) > limit_s
        if is_stopping:
            named_s = max(NAMED_AFTER_S, STEPS_ALLOWED * _usual_s(track))
            return age_s > (named_s if track.is_idle else 2 * named_s)
        # With ranks on other nodes, an idle rank may only wait for the network.
        return track.is_idle and not self._has_others and age_s > self._named_after_s(track)

    def _forgive_absence(self, now_s: float) -> None:
        """Restart all timers if this process itself was paused, such as by a stopped VM."""
        if now_s - self._looked_s > ABSENCE_S:
            self.restart(now_s)
        self._looked_s = now_s

    def restart(self, now_s: float) -> None:
        """Measure the silence of all ranks from now on."""
        self._paused_s = now_s
        for track in self._tracks:
            track.beat_s = max(track.beat_s, now_s)
            track.sign_s = max(track.sign_s, now_s)

    def dump_stacks(self) -> None:
        """Make every rank dump its Python stacks to its log, which also ends it."""
        for track in self._tracks:
            with contextlib.suppress(OSError):
                # faulthandler dumps on SIGABRT; a stopped process needs SIGCONT to receive it.
                track.rank.send_signal(signal.SIGABRT)
                track.rank.send_signal(signal.SIGCONT)

    def _limit_s(self, track: _Track) -> float:
        if track.phase != "training":
            return max(OTHER_LIMIT_S, self._training_limit_s)
        return max(self._training_limit_s, STEPS_ALLOWED * _usual_s(track))

    def _named_after_s(self, track: _Track) -> float:
        """Return the silence after which a standstill is reported, in seconds."""
        limit_s = self._limit_s(track)
        if track.phase != "training" or len(track.silences_s) < STEPS_KNOWN:
            return limit_s
        # At least twice the longest silence: first steps compile, later ones may capture graphs.
        least_s = max(NAMED_AFTER_S, 2 * max(track.silences_s))
        return min(limit_s, max(least_s, STEPS_ALLOWED * _usual_s(track)))

    def _cut_after_s(self, track: _Track) -> float:
        """Return the wait after which a rank certainly waits for the silent node, in seconds."""
        if track.phase != "training" and _waits(track):
            return CUT_AFTER_S  # it says so itself
        if len(track.silences_s) < STEPS_KNOWN:
            return max(self._training_limit_s, STEPS_ALLOWED * _usual_s(track))
        return min(self._named_after_s(track), max(CUT_AFTER_S, 2 * max(track.silences_s)))

    def _describe(self, track: _Track, now_s: float) -> Stall:
        state, quiet_s = read_process_state(track.rank.pid), _quiet_s(track, now_s)
        is_quiet = _is_quiet(track, now_s)
        return Stall(
            rank=track.rank,
            phase=track.phase,
            step=track.step,
            age_s=max(now_s - track.beat_s, self._wait_s(track, now_s), quiet_s),
            process_state=state,
            # A running or sleeping process may be in a collective; a halted one is the cause.
            maybe_remote=self._has_others and state not in (*HALTED, "D") and not is_quiet,
            usage=track.usage[1] if is_quiet and track.usage else None,
        )


def _waits(track: _Track) -> bool:
    """Return whether the rank says that it waits for other ranks."""
    return track.waits_since_s is not None


def _quiet_s(track: _Track, now_s: float) -> float:
    """Return the time without a sign of work outside of training, in seconds."""
    return 0.0 if track.phase == "training" else now_s - track.sign_s


def _is_quiet(track: _Track, now_s: float) -> bool:
    return _quiet_s(track, now_s) > NAMED_AFTER_S


def _seek_sign(track: _Track, now_s: float) -> None:
    """Update the time of the newest sign that a rank works, outside of training."""
    is_patient = _waits(track) or track.phase in PATIENT_PHASES
    # A rank that waits still writes heartbeats, unless it is halted.
    if is_patient and now_s - track.beat_s <= NAMED_AFTER_S and not track.num_stopped:
        track.sign_s, track.usage = now_s, None
        return
    if track.usage is not None and now_s - track.usage[0] < IDLE_S:
        return
    usage, before = read_usage(track.rank.pid), track.usage
    track.usage = (now_s, usage)
    if before is not None and shows_work(before[1], usage, now_s - before[0]):
        track.sign_s = now_s


def _usual_s(track: _Track) -> float:
    """Return a rank's usual silence, in seconds; before its first step, its forecast."""
    # The median, because one slow step (a save, a busy disk) must not raise it.
    return statistics.median(track.silences_s) if track.silences_s else track.foreseen_step_s


def _follow(track: _Track) -> None:
    beat = track.rank.read_heartbeat()
    at_s, step = beat.get("monotonic_s"), beat.get("step")
    since_s = beat.get("waits_since_s")
    track.waits_since_s = since_s if isinstance(since_s, (int, float)) else None
    if not isinstance(at_s, (int, float)):
        return
    signs = (step, beat.get("phase"), beat.get("num_signs"))
    if signs != track.signs:
        track.signs, track.sign_s = signs, max(track.sign_s, at_s)
    if at_s <= track.beat_s:
        # An old heartbeat must not reset the time granted after a pause or an adoption, but it
        # shows the step and phase of an adopted rank.
        if track.step is None and isinstance(step, int):
            track.step, track.phase = step, str(beat.get("phase", track.phase))
        return
    if isinstance(step, int):
        # Only silences that begin in training count: saving and evaluating take longer.
        if track.step is not None and track.phase == "training":
            num_steps = step - track.step  # short steps: several per poll
            silence_s = (at_s - track.beat_s) / max(1, num_steps)
            track.silence_s = max(track.silence_s, silence_s)
            if num_steps > 0:
                missing = STEPS_KNOWN - len(track.silences_s)
                track.silences_s.extend([track.silence_s] * max(1, min(num_steps, missing)))
                track.silence_s = 0.0
        track.step = step
    foreseen_s = beat.get("foreseen_step_s")
    if isinstance(foreseen_s, (int, float)):
        track.foreseen_step_s = foreseen_s
    track.phase = str(beat.get("phase", track.phase))
    track.beat_s = at_s


def _culprit_first(stall: Stall) -> tuple[int, int, float]:
    # At the same step, the rank that fell silent first is the likelier cause.
    order = {"T": 0, "t": 0, FROZEN: 0, "D": 1}.get(stall.process_state, 2 + stall.maybe_remote)
    return order, -1 if stall.step is None else stall.step, -stall.age_s
