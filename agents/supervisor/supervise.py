"""The detached process that owns the ranks of one attempt on one node until the last one has ended.

It forks once at its start, so that neither the server nor an SSH session is its parent. It is a
child subreaper, so that orphans of its ranks become its children. If it is killed, another
supervisor adopts its ranks (`ownership`). It sleeps until a child ends, a signal arrives (SIGINT:
the user stops the run; SIGTERM: the system does), or half a second has passed; then it checks
whether a rank hangs. All waits use the monotonic clock. It writes exit.json last, when no process
of the attempt is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from agents.contract import run_layout
from agents.contract.run import AttemptIntent
from agents.disk_space import HeldSpace
from agents.errors import ExpectedError, explain_os_error
from agents.rendezvous.interfaces import hold_port
from agents.shared.files.secrets import format_trace, hide_secrets
from agents.state import Home, Identity, identify, read_json, take_lock, write_json
from agents.supervisor.attempt import AttemptFolder
from agents.supervisor.clocks import ClockWatch
from agents.supervisor.confirmation import ConfirmationWatch
from agents.supervisor.fence import read_fence, read_halt
from agents.supervisor.full_disk import FullDiskWatch
from agents.supervisor.journal import AttemptJournal, give_back_all
from agents.supervisor.launcher import DirectLauncher, Launcher
from agents.supervisor.leases import sign
from agents.supervisor.loss import has_begun, let_save
from agents.supervisor.outages import OutageWatch, find_silent_peers
from agents.supervisor.rank_group import TICK_S, RankGroup
from agents.supervisor.regrouping import RegroupWatch
from agents.supervisor.shares import name_share
from agents.supervisor.stalls import Stall, StallWatch
from agents.supervisor.sweep import find_processes, sweep
from agents.supervisor.verdict import (
    AttemptOutcome,
    describe_stall,
    judge_away,
    judge_end,
    judge_ended_peer,
    judge_failure,
    judge_outside,
    judge_sleep,
    judge_stall,
    name_lost_nodes,
    name_stuck,
)

PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 30.0
"""Default time for a rank to finish its step and save after a stop, in seconds."""
FAILURE_GRACE_S = 5.0
"""Time for the other ranks to end after one failed, in seconds; most hang in a collective."""
GATHER_S = 1.0
"""Wait for more failures after the first one, to distinguish cause and effect, in seconds."""
UNBEGUN_GRACE_S = 3.0
"""Time for ranks to end that do not train yet and have nothing to save, in seconds."""
UNSAVED = "It was ended without a checkpoint."
RESERVED_BYTES = 16384
"""Disk space reserved for exit.json, so that a full disk cannot make the attempt look lost."""


def supervise(folder: str, lease_fds: str = "") -> int:
    """Own the attempt in `folder` from a child process; the calling process exits at once."""
    leases = [int(number) for number in lease_fds.split(",") if number]
    if os.fork():
        os._exit(0)
    # The end of the server or of its SSH session must not end this process.
    os.setsid()
    path = Path(folder)
    attempt = AttemptFolder(Home(path.parents[3]), path.parents[1].name, int(path.name))
    lock = os.open(path / "supervisor.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    # A repeated launch may start a second supervisor; the lock is held until this process ends.
    if not take_lock(lock, 0.0) or attempt.file(run_layout.EXIT_FILE).exists():
        return 0
    intent = attempt.read_intent()
    identity = identify(os.getpid())
    if intent is None or identity is None:
        raise SystemExit(f"{folder}: {run_layout.INTENT_FILE} or /proc cannot be read")
    for number in leases:
        # Ranks must not inherit the leases: a leftover rank would keep its device locked.
        os.set_inheritable(number, False)
    sign(leases, attempt.tag, identity.to_json())
    Supervisor(attempt, intent, identity, DirectLauncher()).run()
    return 0


def become_subreaper() -> None:
    """Make orphaned descendants children of this process instead of init."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Supervisor:
    """Owner of the ranks: starts or adopts, watches and ends them, and records the outcome."""

    def __init__(
        self, attempt: AttemptFolder, intent: AttemptIntent, identity: Identity, launcher: Launcher
    ) -> None:
        self._attempt = attempt
        self._intent = intent
        self._launcher = launcher
        self._journal = AttemptJournal(attempt.file(run_layout.SUPERVISOR_JOURNAL))
        # Signals received that ask for the end.
        self._asked: set[int] = set()
        # Rank last reported as standing still, or None.
        self._standing_rank: int | None = None
        self._standing_for: tuple[str, ...] = ()
        self._outages = OutageWatch(intent)
        self._regroups = RegroupWatch(attempt, intent)
        self._clocks = ClockWatch()
        self._disk = FullDiskWatch(attempt.folder)
        wake = _listen_to_signals(self._asked.add)
        self._group = RankGroup(attempt, intent, identity, self._journal, wake)

    def run(self) -> None:
        """Run the attempt until all of its processes have ended and exit.json is written."""
        become_subreaper()
        # The SIGABRT that ends a stall would dump core, a file as large as a rank's memory.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        held: HeldSpace | None = None
        door = self._hold_door()
        try:
            held = self._hold()
            verdict = self._take_ranks() or self._watch()
        except ExpectedError as error:
            verdict = AttemptOutcome(state="failed", message=error.message, hint=error.hint)
        except Exception as bug:  # noqa: BLE001 - the edge: ranks must not be left alone
            sys.stderr.write(format_trace(bug))
            verdict = self._describe_bug(bug)
        verdict = self._end_rest(verdict)
        if held is not None:
            # Only now: these blocks allow exit.json to be written to a full disk.
            held.release()
        self._write_exit(verdict)
        door.close()

    def _hold_door(self) -> contextlib.ExitStack:
        """Hold the port at which rank 0 listens once it has imported, if that is a rank here."""
        door, intent = contextlib.ExitStack(), self._intent
        is_first = any(place.rank == 0 and place.node == intent.node for place in intent.ranks)
        if is_first and intent.master_port:
            with contextlib.suppress(OSError):  # in use: rank 0 says so
                door.enter_context(hold_port(intent.master_address, intent.master_port))
        return door

    def _hold(self) -> HeldSpace | None:
        """Reserve space for the record of the end.

        Raises:
            ExpectedError: the disk is full, and no rank has been started yet.
        """
        try:
            return HeldSpace(self._attempt.folder, RESERVED_BYTES)
        except OSError as error:
            # A full disk is no reason for a successor to end ranks that already train.
            if self._group.has_predecessor:
                return None
            doing = f"the run's supervisor writes to {self._attempt.folder}"
            raise explain_os_error(error, doing, self._attempt.folder) from error

    def _describe_bug(self, bug: Exception) -> AttemptOutcome:
        return AttemptOutcome(
            state="failed",
            message=f"A fault in the supervisor on node {self._intent.node}: "
            + hide_secrets(f"{type(bug).__name__}: {bug}."),
            hint=f"Please report it with the file {self._attempt.file(run_layout.SUPERVISOR_LOG)}",
        )

    def _take_ranks(self) -> AttemptOutcome | None:
        """Start the ranks, or adopt those of a dead supervisor; return an outcome on failure."""
        if not self._group.has_predecessor:
            # Stopped between the check of the launch and here.
            if self._attempt.number <= read_halt(self._attempt.home, self._attempt.run_id):
                return AttemptOutcome(state="stopped", message="")
            return self._group.start(self._launcher)
        return self._group.adopt() or self._refuse_replaced()

    def _refuse_replaced(self) -> AttemptOutcome | None:
        """Return the outcome if a newer attempt of the run has replaced this one."""
        newest = read_fence(self._attempt.home, self._attempt.run_id)
        if newest <= self._attempt.number:
            return None
        message = f"It was ended because attempt {newest} of the run has replaced it."
        return AttemptOutcome(state="stopped", message=message)

    # ------------------------------------------------------------ watch

    def _watch(self) -> AttemptOutcome:
        """Wait for the end of all ranks, the failure of one, a stall, or a stop request."""
        stalls = StallWatch(self._group.ranks, self._intent)
        confirmation = ConfirmationWatch(self._attempt, self._intent, time.monotonic())
        while self._group.is_any_alive:
            self._group.wait(TICK_S)
            self._check_clocks()
            self._check_disk()
            if any(rank.has_failed for rank in self._group.ranks):
                return self._gather_failure(stalls)
            if self._is_stop_asked():
                return self._stop(stalls)
            unconfirmed = confirmation.check(time.monotonic())
            if unconfirmed is not None:
                return unconfirmed
            if self._regroups.look():
                self._outages = OutageWatch(self._regroups.intent)
            now_s = time.monotonic()
            stall = stalls.check(now_s)
            waits_s = stalls.measure_wait(now_s)
            self._outages.look(waits_s, now_s, is_loading=not stalls.has_begun)
            if not stalls.has_begun and (gone := self._judge_peers(now_s)) is not None:
                return gone
            standing = stalls.find_standstill(now_s, is_cut=bool(self._outages.silent))
            stall = self._judge_wait(waits_s, now_s, stall, standing)
            self._name_standstill(standing)
            may_continue = stall is not None and stall.maybe_remote and stalls.has_begun
            if may_continue and self._regroups.interrupt():
                stalls.restart(now_s)
            elif stall is not None:
                self._let_save()  # before the stacks are dumped, which ends the ranks
                self._dump_stacks(stalls)
                stalled = judge_stall(stall, self._intent, self._find_silent(stall))
                return self._name_lost(name_share(stalled, self._intent))
        return self._judge_end()

    def _judge_peers(self, now_s: float) -> AttemptOutcome | None:
        """Return the outcome of ranks that load if ranks of other nodes are certainly gone."""
        away_s = self._outages.measure(now_s)
        if away_s >= self._intent.outage_s:
            # Asked at more ports: no rank waits yet, and a firewall may drop the usual probe.
            if silent := find_silent_peers(self._intent):
                return judge_away(self._group.ranks, self._intent, silent, away_s)
            self._outages.forgive(now_s)
        ended = read_json(self._attempt.file(run_layout.ENDED_PEER_FILE)) or {}
        if "node" not in ended:
            return None
        return judge_ended_peer(str(ended["node"]), str(ended.get("reason", "")))

    def _judge_end(self, *, is_stop: bool = False) -> AttemptOutcome:
        """Judge the end of all ranks; a stop without a request is attributed to the system."""
        ranks, is_wanted = self._group.ranks, self._is_stop_wanted()
        outcome = judge_end(ranks, self._intent, is_stop=is_stop)
        if outcome.state != "stopped" or is_wanted:
            return outcome
        return judge_outside(outcome, ranks, self._intent, is_node=bool(self._asked))

    def _check_clocks(self) -> None:
        """Record that this PC slept, or that its clock was set."""
        sleep, set_s = self._clocks.look()
        if sleep is not None:
            message = sleep.describe(self._intent.node)
            self._journal.write("slept", duration_s=sleep.duration_s, message=message)
        if set_s:
            self._journal.write("clock_set", by_s=set_s)

    def _check_disk(self) -> None:
        """Record that the disk is full, or has room again."""
        lacks = self._disk.look(time.monotonic())
        if lacks is not None:
            self._journal.write("disk", lacks=lacks)

    def _judge_wait(
        self, waits_s: float, now_s: float, stall: Stall | None, standing: Stall | None
    ) -> Stall | None:
        """Return the stall that must be ended, given which other nodes answer."""
        if stall is not None:
            is_excused = stall.maybe_remote and self._outages.excuses(waits_s, now_s)
            return None if is_excused else stall
        # A rank that certainly waits for a node needs no extra time to compile.
        has_waited = bool(self._outages.silent) and not self._outages.excuses(waits_s, now_s)
        return standing if has_waited and standing and standing.maybe_remote else None

    def _name_standstill(self, found: Stall | None) -> None:
        """Report to the master when a rank stands still, for which nodes, and when it continues."""
        if found is not None and found.maybe_remote and not self._outages.is_known:
            return  # the probe in progress tells whether it waits for a node that is away
        rank = found.rank.rank if found else None
        silent = self._outages.silent if found and found.maybe_remote else ()
        is_known = silent == self._standing_for or not silent
        if rank == self._standing_rank and is_known:
            return
        if found is None and self._regroups.waits():
            return  # the ranks have left their group and still wait for another one
        self._standing_rank, self._standing_for = rank, silent
        if found is None:
            self._journal.write("moving", message="All ranks on this node continue.")
            return
        message = describe_stall(found, self._intent, silent, has_ended=False)
        self._journal.write("standing", rank=rank, phase=found.phase, message=message)

    def _dump_stacks(self, stalls: StallWatch) -> None:
        stalls.dump_stacks()
        # Time for faulthandler to write the stacks; then the process ends.
        self._group.wait_for_all(FAILURE_GRACE_S / 2)

    def _gather_failure(self, stalls: StallWatch) -> AttemptOutcome:
        """Wait briefly for other ranks to fail, then find the cause among all failures."""
        self._group.wait_for_all(GATHER_S)
        if self._is_stop_asked():
            return self._stop(stalls)
        failed = judge_failure(self._group.ranks, self._intent)
        return self._name_lost(name_share(failed, self._intent))

    def _name_lost(self, verdict: AttemptOutcome) -> AttemptOutcome:
        if not verdict.peer_lost:
            return verdict
        self._check_clocks()
        sleep = self._clocks.recent_sleep
        # Other nodes wait at least this long, so a shorter sleep cannot be the cause.
        if sleep is not None and sleep.duration_s >= self._intent.outage_s / 2:
            return judge_sleep(sleep, self._intent.node, verdict)
        if verdict.lost_nodes:
            return verdict
        silent = self._outages.silent or find_silent_peers(self._regroups.intent)
        return name_lost_nodes(verdict, silent)

    def _find_silent(self, stall: Stall) -> tuple[str, ...]:
        """Return the nodes that do not answer, if a stalled rank may wait for them."""
        if not stall.maybe_remote:
            return ()
        return self._outages.silent or find_silent_peers(self._regroups.intent)

    def _stop(self, stalls: StallWatch) -> AttemptOutcome:
        """Ask each rank to finish its step and save; the sweep ends late ranks."""
        if self._is_stop_at_loss():
            self._let_save()
        began_s = time.monotonic()
        self._journal.write("stopping", grace_s=self._read_grace_s())
        self._group.send_signal(signal.SIGINT if self._is_stop_wanted() else signal.SIGTERM)
        # A process in SIGSTOP handles the signal only after SIGCONT; then it can save as well.
        self._group.send_signal(signal.SIGCONT)
        stalls.check(began_s, is_stopping=True)  # updates `has_begun`
        # The grace is read each time: a second stop with a shorter grace must take effect.
        while self._group.is_any_alive:
            grace_s = self._read_grace_s()
            if not stalls.has_begun:
                # At a loss, the next attempt waits for this one to end.
                grace_s = 0.0 if self._is_stop_at_loss() else min(grace_s, UNBEGUN_GRACE_S)
            left_s = began_s + grace_s - time.monotonic()
            if left_s <= 0:
                late = [rank.rank for rank in self._group.ranks if not rank.has_ended]
                return self._describe_late(late, stalls, grace_s)
            self._group.wait(min(left_s, TICK_S))
            now_s = time.monotonic()
            stall = stalls.check(now_s, is_stopping=True)
            self._outages.look(stalls.measure_wait(now_s), now_s)
            self._name_standstill(stalls.find_standstill(now_s))
            if stall is not None:
                silent = self._outages.silent
                return self._stop_hung(stalls, describe_stall(stall, self._intent, silent))
        return self._judge_end(is_stop=True)

    def _stop_hung(self, stalls: StallWatch, message: str) -> AttemptOutcome:
        """Let ranks that wait for a hanging one save without it, then end all ranks."""
        if len(self._intent.ranks) > 1:
            let_save(self._group, self._attempt, lambda: self._read_grace_s() == 0)
        self._dump_stacks(stalls)
        saved = [rank.read_last("checkpoint") for rank in self._group.ranks]
        steps = [line["step"] for line in saved if line.get("at_loss") is True]
        end = f"Step {max(steps)} was saved by a rank that waited for it." if steps else UNSAVED
        return AttemptOutcome(state="stopped", message=f"{message} {end}")

    def _describe_late(self, late: list[int], stalls: StallWatch, grace_s: float) -> AttemptOutcome:
        if not stalls.has_begun:
            return AttemptOutcome(state="stopped", message="")
        text = ", ".join(map(str, late))
        message = f"Rank {text} did not finish its step within {grace_s:g} s and was killed."
        return AttemptOutcome(state="stopped", message=message)

    def _read_grace_s(self) -> float:
        if self._is_stop_at_loss():
            return FAILURE_GRACE_S  # the ranks have saved already, or cannot save
        value = (read_json(self._attempt.file(run_layout.STOP_FILE)) or {}).get("grace_s")
        return float(value) if isinstance(value, (int, float)) else GRACE_S

    def _is_stop_asked(self) -> bool:
        return bool(self._asked) or self._attempt.file(run_layout.STOP_FILE).exists()

    def _is_stop_wanted(self) -> bool:
        """Return whether the user or a master asked for the stop, not the system."""
        return signal.SIGINT in self._asked or self._attempt.file(run_layout.STOP_FILE).exists()

    def _is_stop_at_loss(self) -> bool:
        """Return whether a master ends this part because another part was lost."""
        return (read_json(self._attempt.file(run_layout.STOP_FILE)) or {}).get("at_loss") is True

    def _let_save(self) -> None:
        """Let surviving ranks save their state, unless the user stops the run."""
        if len(self._intent.ranks) > 1:
            let_save(
                self._group,
                self._attempt,
                lambda: self._is_stop_asked() and not self._is_stop_at_loss(),
            )

    # ------------------------------------------------------------ end

    def _end_rest(self, verdict: AttemptOutcome) -> AttemptOutcome:
        """End all other processes of the attempt; report those that cannot be ended."""
        if verdict.state == "failed" and has_begun(self._group):
            self._let_save()
            self._group.send_signal(signal.SIGTERM)
            self._group.wait_for_all(FAILURE_GRACE_S)
        self._group.send_signal(signal.SIGKILL)
        own = os.getpid()
        left = sweep(self._attempt.tag, 1.0, without=own) if self._has_others(own) else []
        self._group.wait_for_all(TICK_S)
        return name_stuck(verdict, left, self._intent.node) if left else verdict

    def _has_others(self, own: int) -> bool:
        # Twice, because during a scan of /proc a parent may fork an unseen child and end.
        return bool(
            find_processes(self._attempt.tag, own) or find_processes(self._attempt.tag, own)
        )

    def _write_exit(self, verdict: AttemptOutcome) -> None:
        """Write exit.json; retry while the disk is full."""
        value = {
            "state": verdict.state,
            "message": verdict.message,
            "hint": verdict.hint,
            "peer_lost": verdict.peer_lost,
            "lost_nodes": verdict.lost_nodes,
            "cause": verdict.cause,
            "ended_s": time.time(),
            "ranks": [rank.to_json() for rank in self._group.ranks],
        }
        self._journal.write("ended", state=verdict.state, message=verdict.message)
        give_back_all(self._attempt.folder)
        # Without exit.json, the attempt would look lost, so wait for space before giving up.
        for _ in range(20):
            try:
                write_json(self._attempt.file(run_layout.EXIT_FILE), value)
                return
            except ExpectedError:
                time.sleep(1.0)


def _listen_to_signals(on_stop: Callable[[int], None]) -> int:
    """Return a descriptor that is readable after a signal; SIGTERM and SIGINT call `on_stop`."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # The wakeup descriptor gets a byte only for signals that have a Python handler.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: on_stop(number))
    # The run must survive the end of the terminal or SSH connection that launched it.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return reader
