"""Save the run's state on the nodes that keep copies, together with all other ranks.

The step only copies the state to the host; a thread writes, hashes and commits it while training
continues. A save waits for the previous one to be written, so every step that should have a
checkpoint gets one on every node, and the host holds the state once. The save at the end of a run,
or at a stop, waits until its own files are committed. While that is impossible, all ranks pause
rather than lose trained steps.

Ranks are made equal at a checkpoint (see `Strategy.equalize`). A node that has committed its copy
keeps its configured number of checkpoints, and the newest step that every node has, until every
copy of the new one is committed; the ranks learn that from the statistics of later steps, or at the
next save. So a node that cannot save does not fill the disks of others. Nodes that save no copies
also prune then, since each resume brings them a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from agents.contract.run import choose_checkpoint_ranks
from agents.errors import ExpectedError
from agents.state import take_lock
from agents.trainer.checkpoint.disk_watch import DiskWatch
from agents.trainer.checkpoint.folder import CannotWrite, CheckpointFolder
from agents.trainer.checkpoint.state import HostCopy, ResumePoint, write_state
from agents.trainer.model.model import TrainedModel
from agents.trainer.parallel.strategy import Strategy
from agents.trainer.rank.context import RankContext

PAUSE_S = 2.0
"""Time between two checks of a disk that cannot take the last checkpoint, in seconds."""
MOST_PAUSE_S = 30.0
"""Maximum time between two retries if the disk seems to have space, in seconds."""
STOP_PATIENCE_S = 20.0
"""Time that a stop waits for such a disk, in seconds; less than a stop's usual grace."""
# Lock in the attempt's folder: only one rank of a node saves at a loss.
_LOSS_LOCK = "loss.lock"
# Maximum wait for that lock, in seconds.
_LOCK_S = 15.0


class Saver:
    """Writes checkpoints on the chosen ranks, and keeps all ranks in step.

    Args:
        context: context of this rank.
        strategy: owner of the state.
        folder: folder of the run's checkpoints on this node.
        model: source of parameter names and config for the files.
        about: hashes and versions for the manifest; see `CheckpointFolder.commit`.
        saved_step: step of the checkpoint from which the run continues; -1 for a new run.
    """

    def __init__(
        self,
        context: RankContext,
        strategy: Strategy,
        folder: CheckpointFolder,
        *,
        model: TrainedModel,
        about: dict[str, Any],
        saved_step: int = -1,
    ) -> None:
        attempt = context.attempt
        self._context = context
        self._spec = attempt.intent.spec.checkpoint
        self._strategy = strategy
        self._folder = folder
        self._model = model
        self._about = about
        self._saved_step = saved_step
        # Newest step whose checkpoint is known to be on every node that keeps copies.
        self._common_step = saved_step
        self._choose_writers(attempt.intent.checkpoint_ranks)
        self._saved_s = time.monotonic()
        self._copy = HostCopy()
        self._disk = DiskWatch(
            folder.path,
            attempt.folder,
            attempt.placement.node,
            context.journal,
            lambda: self._copy.size_bytes,
        )
        # One thread: saves are written in order, and pruning never overlaps a save.
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saver")
        # The newest save of this rank; its result is the error of a failed one.
        self._writing: Future[CannotWrite | None] | None = None
        # True from the start of a save until its prune.
        self._may_prune = False
        if self._prunes:
            folder.clean()

    def _choose_writers(self, ranks: Sequence[int]) -> None:
        attempt = self._context.attempt
        self._writes, self._num_copies = attempt.rank in ranks, len(ranks)
        # One rank of each node removes old checkpoints, even on nodes that write none.
        self._prunes = self._writes or attempt.placement.local_rank == 0

    def regroup(self) -> None:
        """Choose the writing ranks again after a loss, so that the number of copies is restored."""
        self._choose_writers(choose_checkpoint_ranks(self._context.placements, self._spec.copies))

    def reserve(self) -> None:
        """Allocate the host memory for saves, once the optimizer has its state.

        Pinning 0.5 GB takes a quarter of a second, which should not delay a later step.
        """
        if self._writes:
            with self._context.guard.changing():
                self._copy.take(self._strategy.export_state())

    def is_due(self) -> bool:
        """Return whether this rank asks for a checkpoint, by clock or to retry a failed save."""
        return self._is_due_by_time() or (self._writes and self._disk.look())

    def _is_due_by_time(self) -> bool:
        """Return whether the clock asks for a checkpoint; only that of rank 0 counts."""
        minutes = self._spec.every_minutes
        if minutes is None or self._context.group.rank != 0:
            return False
        return time.monotonic() - self._saved_s >= minutes * 60

    @property
    def has_uncommitted(self) -> bool:
        """True if the newest save of this rank is not committed, or has failed.

        Raises:
            ExpectedError: this attempt must not write any more.
        """
        if self._writing is None:
            return False
        return not self._writing.done() or self._writing.result() is not None

    def prune_when_committed(self, num_uncommitted: int) -> None:
        """Delete old checkpoints once no rank has an uncommitted save."""
        if num_uncommitted or not self._may_prune:
            return
        self._may_prune = False
        self._common_step = self._saved_step
        if self._prunes:
            self._pool.submit(self._folder.prune, self._spec.keep)

    def save(self, point: ResumePoint, *, required: bool) -> None:
        """Save the state after a step; all ranks call this together.

        Args:
            point: state of the run; the optimizer's part is added here.
            required: True at the end of the run: waits for the files and raises if they cannot be
                written. Otherwise they are written in the background, and a failure is a warning.

        Raises:
            ExpectedError: this attempt must not write any more, or the save at a stop failed.
        """
        # For example the last step, if it was saved periodically just before.
        if point.step == self._saved_step:
            return
        started_s = time.monotonic()
        self._wait()
        with self._context.heartbeat.waiting():
            num_uncommitted = self._strategy.equalize(self.has_uncommitted)
        self.prune_when_committed(num_uncommitted)
        if self._writes:
            # From here on the copy belongs to this save; a thread that saves at a loss uses it,
            # too.
            with self._context.guard.changing():
                self._copy.take(self._strategy.export_state())
                point = replace(point, optimizer=self._copy.plain)
                stall_s = None if required else time.monotonic() - started_s
                self._writing = self._pool.submit(self._write, point, started_s, stall_s)
        self._may_prune = True
        self._saved_step = point.step
        if required:
            self._finish(point)
        self._saved_s = time.monotonic()

    def _wait(self) -> CannotWrite | None:
        return self._writing.result() if self._writing else None

    def _finish(self, point: ResumePoint) -> None:
        """Wait for the files of all ranks; pause while some cannot be written."""
        problem = self._wait()
        began_s = tried_s = time.monotonic()
        num_looks = 0
        # All ranks sum before one of them raises, or the others would wait for it in vain.
        while any(sums := self._context.count(problem is not None, self._is_stop_late(began_s))):
            failed, late = sums
            if not failed or late:
                break
            if not num_looks:
                self._report_pause(problem, point.step)
            num_looks += 1
            time.sleep(PAUSE_S)
            # The pause before a retry grows, since each retry writes the whole checkpoint.
            is_time = time.monotonic() - tried_s >= min(num_looks * PAUSE_S, MOST_PAUSE_S)
            if problem is not None and is_time and self._disk.has_room():
                tried_s = time.monotonic()
                self._writing = self._pool.submit(self._write, point, tried_s, None)
                problem = self._wait()
        if problem is not None:
            raise problem
        if not sums[0]:
            self.prune_when_committed(0)

    def _is_stop_late(self, began_s: float) -> bool:
        is_over = time.monotonic() - began_s >= STOP_PATIENCE_S
        return self._context.control.stop_requested and is_over

    def _report_pause(self, problem: CannotWrite | None, step: int) -> None:
        self._context.enter_phase("paused", step)
        if problem is not None:
            node = self._context.attempt.placement.node
            self._context.journal.write("paused", step=step, node=node, message=problem.message)

    def save_at_loss(self, point: ResumePoint, changed: torch.cuda.Event | None) -> str:
        """Save the state of this rank without the others; return why that is impossible.

        May be called by another thread while the training loop waits in a collective and can change
        nothing. One rank per node is enough for a step. An earlier save in progress is always
        finished first.

        Args:
            point: state of the run at the last change of the trained state.
            changed: event of that change on the GPU; None if it has happened.
        """
        is_saved = False
        with contextlib.suppress(ExpectedError):  # a failure of an earlier save is journaled
            is_saved = self._wait() is None and point.step == self._saved_step
        gap = self._strategy.find_gap()
        if gap:
            return "" if is_saved else gap
        attempt = self._context.attempt
        lock = os.open(attempt.folder / _LOSS_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            take_lock(lock, _LOCK_S)  # without it two ranks write, and the later one stays
            return self._commit_at_loss(point, changed)
        except ExpectedError as error:
            return error.message.rstrip(".")
        finally:
            os.close(lock)

    def _commit_at_loss(self, point: ResumePoint, changed: torch.cuda.Event | None) -> str:
        if self._folder.holds(point.step):
            return ""
        started_s = time.monotonic()
        self._copy.take(self._strategy.export_state(), changed)
        point = replace(point, optimizer=self._copy.plain)
        self._folder.commit(
            point.step,
            lambda folder: write_state(folder, model=self._model, copy=self._copy, point=point),
            # A resume from it keeps promise B: ranks were not made equal.
            {**self._about, "at_loss": True},
        )
        self._context.journal.write(
            "checkpoint",
            step=point.step,
            seconds=time.monotonic() - started_s,
            stall_s=0.0,
            path=str(self._folder.path_of(point.step)),
            copies=1,
            at_loss=True,
        )
        self._folder.prune(self._spec.keep, self._common_step)
        return ""

    def close(self) -> None:
        """Wait until pending files are written, also when training ends with an error."""
        self._pool.shutdown()

    def _write(
        self, point: ResumePoint, started_s: float, stall_s: float | None
    ) -> CannotWrite | None:
        """Commit the copied state; runs in the saver's thread.

        Args:
            point: state of the run.
            started_s: start of the save, on the monotonic clock.
            stall_s: time that training stood still, in seconds; None if it waits for this call.
        """
        journal = self._context.journal
        try:
            self._folder.commit(
                point.step,
                lambda folder: write_state(folder, model=self._model, copy=self._copy, point=point),
                self._about,
            )
        except CannotWrite as error:
            return self._disk.note_failed(error, point.step)
        seconds = time.monotonic() - started_s
        journal.write(
            "checkpoint",
            step=point.step,
            seconds=seconds,
            stall_s=seconds if stall_s is None else stall_s,
            path=str(self._folder.path_of(point.step)),
            copies=self._num_copies,
        )
        self._disk.note_saved()
        # At once, based on this node alone: another node may be unable to save for a long time.
        self._folder.prune(self._spec.keep, self._common_step)
        return None
