"""Save the run's state on the nodes that keep copies, together with all other ranks.

The step only copies the state to the host; a thread writes, hashes and commits it while training
goes on. A save that finds the one before still being written waits for it: so every step that
should have a checkpoint gets one, on every node, and the host holds the state once. The save at
the end of a run, or at a stop, waits until its own files are committed.

A checkpoint is also where ranks are made equal (see `Strategy.equalize`). Older checkpoints are
deleted only after every copy of the new one has been committed, which the ranks learn from each
other with the statistics of later steps, or at the next save. That holds on nodes that save none,
too: each resume brings them the checkpoint that it begins from.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from agents.trainer.checkpoint.folder import CannotWrite, CheckpointFolder
from agents.trainer.checkpoint.state import HostCopy, ResumePoint, write_state
from agents.trainer.model.model import TrainedModel
from agents.trainer.parallel.strategy import Strategy
from agents.trainer.rank.context import RankContext


class Saver:
    """Writes checkpoints on the ranks that were chosen for it, and keeps all ranks in step.

    Args:
        context: of this rank.
        strategy: holds the state.
        folder: of the run's checkpoints on this node.
        model: names of its parameters and its config go into the files.
        about: hashes and versions for the manifest; see `CheckpointFolder.commit`.
        saved_step: step of the checkpoint that the run continues from; -1: none.
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
        self._writes = attempt.rank in attempt.intent.checkpoint_ranks
        # One rank of each node removes its old checkpoints, also where none are written.
        self._prunes = self._writes or attempt.placement.local_rank == 0
        self._saved_s = time.monotonic()
        self._copy = HostCopy()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saver")
        # The newest save of this rank; its result is the reason why it failed.
        self._writing: Future[CannotWrite | None] | None = None
        # Whether a save has begun after which nothing was pruned yet.
        self._may_prune = False
        if self._prunes:
            folder.clean()

    def reserve(self) -> None:
        """Allocate the host memory that saves need, once the optimizer has its state.

        Pinning 0.5 GB takes a quarter of a second, which no later step should wait for.
        """
        if self._writes:
            self._copy.take(self._strategy.export_state())

    def is_due_by_time(self) -> bool:
        """Return whether the clock asks for a checkpoint; only that of rank 0 counts."""
        minutes = self._spec.every_minutes
        if minutes is None or self._context.attempt.rank != 0:
            return False
        return time.monotonic() - self._saved_s >= minutes * 60

    @property
    def has_uncommitted(self) -> bool:
        """Whether the newest save of this rank is not committed, or has failed.

        Raises:
            ExpectedError: this attempt may not write any more.
        """
        if self._writing is None:
            return False
        return not self._writing.done() or self._writing.result() is not None

    def prune_when_committed(self, num_uncommitted: int) -> None:
        """Delete old checkpoints once no rank has an uncommitted save."""
        if num_uncommitted or not self._may_prune:
            return
        self._may_prune = False
        if self._prunes:
            self._pool.submit(self._folder.prune, self._spec.keep)

    def save(self, point: ResumePoint, *, required: bool) -> None:
        """Save the state after a step; all ranks call this together.

        Args:
            point: where the run stands; the optimizer's part is filled in here.
            required: whether the run ends here, so that this waits for the files and raises when
                they cannot be written. Otherwise they are written in the background, and a failure
                is a warning.

        Raises:
            ExpectedError: this attempt may not write any more, or nothing could be written at the
                end.
        """
        if point.step == self._saved_step:
            return
        started_s = time.monotonic()
        self._wait()
        self.prune_when_committed(self._strategy.equalize(self.has_uncommitted))
        if self._writes:
            self._copy.take(self._strategy.export_state())
            point = replace(point, optimizer=self._copy.plain)
            stall_s = None if required else time.monotonic() - started_s
            self._writing = self._pool.submit(self._write, point, started_s, stall_s)
        self._may_prune = True
        self._saved_step = point.step
        if required:
            self._finish()
        self._saved_s = time.monotonic()

    def _wait(self) -> CannotWrite | None:
        return self._writing.result() if self._writing else None

    def _finish(self) -> None:
        problem = self._wait()
        # All ranks sum before one of them raises, or the others would wait for it in vain.
        num_failed = torch.tensor([float(problem is not None)], device=self._context.device)
        self._context.group.sum(num_failed)
        if problem is not None:
            raise problem
        self.prune_when_committed(int(num_failed.item()))

    def close(self) -> None:
        """Wait until what has begun is written, also when the training ends with an error."""
        self._pool.shutdown()

    def _write(
        self, point: ResumePoint, started_s: float, stall_s: float | None
    ) -> CannotWrite | None:
        """Commit what was copied; runs in the saver's thread.

        Args:
            point: where the run stood.
            started_s: when the save began.
            stall_s: seconds that the training stood still; None: it waits for this.
        """
        journal = self._context.journal
        try:
            self._folder.commit(
                point.step,
                lambda folder: write_state(folder, model=self._model, copy=self._copy, point=point),
                self._about,
            )
        except CannotWrite as error:
            journal.write(
                "checkpoint_failed", step=point.step, message=error.message, hint=error.hint
            )
            return error
        seconds = time.monotonic() - started_s
        journal.write(
            "checkpoint",
            step=point.step,
            seconds=seconds,
            stall_s=seconds if stall_s is None else stall_s,
            path=str(self._folder.path_of(point.step)),
        )
        return None
