"""Save the run's state on the nodes that keep copies, together with all other ranks.

The step only copies the state to the host; a thread writes, hashes and commits it while training
goes on. A save that finds the one before still being written waits for it: so every step that
should have a checkpoint gets one, on every node, and the host holds the state once. The save at
the end of a run, or at a stop, waits until its own files are committed.

A checkpoint is also where ranks are made equal: GPUs of different kinds may round the last bit of
a norm differently, and such differences would grow. When the states differ, all take that of rank
0, which is the one that a resume would start from anyway. Older checkpoints are deleted only after
every copy of the new one has been committed, which the ranks tell each other with the statistics
of later steps, or at the next save. That holds on nodes that save none, too: each resume brings
them the checkpoint that it begins from.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from agents.trainer.checkpoint.folder import CannotWrite, CheckpointFolder
from agents.trainer.checkpoint.state import HostCopy, ResumePoint, write_state
from agents.trainer.optim.optimizer import export_state
from agents.trainer.parallel.state_digest import digest
from agents.trainer.rank.attempt import RankAttempt
from agents.trainer.rank.group import Group
from agents.trainer.rank.journal import RankJournal
from agents.trainer.training_state import TrainingState


class Saver:
    """Writes checkpoints on the ranks that were chosen for it, and keeps all ranks in step."""

    def __init__(
        self,
        attempt: RankAttempt,
        prepared: TrainingState,
        *,
        group: Group,
        folder: CheckpointFolder,
        journal: RankJournal,
    ) -> None:
        self._attempt = attempt
        self._prepared = prepared
        self._group = group
        self._folder = folder
        self._journal = journal
        self._writes = attempt.rank in attempt.intent.checkpoint_ranks
        self._tidies = self._writes or attempt.placement.local_rank == 0
        """Removes old checkpoints of its node."""
        self._saved_s = time.monotonic()
        self._saved_step = prepared.resumed.step if prepared.resumed else -1
        self._tokens_seen = prepared.resumed.tokens_seen if prepared.resumed else 0
        self._copy = HostCopy()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saver")
        self._writing: Future[CannotWrite | None] | None = None
        """The newest save of this rank."""
        self._may_prune = False
        """A save has begun after which nothing was pruned yet."""
        if self._tidies:
            folder.clean()

    def get_ready(self) -> None:
        """Get the memory that saves copy into, so that the first save is as quick as all others.

        To be called after a step: before the first one the optimizer has no state.
        """
        if self._writes:
            self._copy.take(self._prepared.flat, self._prepared.optimizer)

    def add_tokens(self, count: int) -> None:
        """Count tokens that the run has seen."""
        self._tokens_seen += count

    def reserve(self) -> None:
        """Take the host memory that saves need; to be called once the optimizer has its state.

        Pinning 0.5 GB takes a quarter of a second, which no later step should wait for.
        """
        if self._writes:
            self._copy.take(self._prepared.flat, self._prepared.optimizer)

    def is_due_by_time(self) -> bool:
        """Tell whether the clock asks for a checkpoint; only that of rank 0 counts."""
        minutes = self._attempt.intent.spec.checkpoint.every_minutes
        if minutes is None or self._attempt.rank != 0:
            return False
        return time.monotonic() - self._saved_s >= minutes * 60

    @property
    def has_uncommitted(self) -> bool:
        """Tell whether the newest save of this rank is not committed, or has failed.

        Raises:
            ExpectedError: this attempt may not write any more.
        """
        if self._writing is None:
            return False
        return not self._writing.done() or self._writing.result() is not None

    def learn(self, num_uncommitted: int) -> None:
        """Take in how many ranks had an uncommitted save; with none, old checkpoints go."""
        if num_uncommitted or not self._may_prune:
            return
        self._may_prune = False
        if self._tidies:
            self._pool.submit(self._folder.prune, self._attempt.intent.spec.checkpoint.keep)

    def save(self, step: int, *, required: bool, **fields: Any) -> None:
        """Save the state after `step`; all ranks call this together.

        Args:
            step: optimizer steps done.
            required: the run ends here, so that this waits for the files and a failure is one;
                otherwise they are written in the background and a failure is a warning.
            fields: the rest of `ResumePoint`.

        Raises:
            ExpectedError: this attempt may not write any more, or nothing could be written at the
                end.
        """
        if step == self._saved_step:
            return
        started_s = time.monotonic()
        self._wait()
        carried = self._prepared.wire.exchange_carried()
        self._make_equal(carried)
        if self._writes:
            self._copy.take(self._prepared.flat, self._prepared.optimizer, carried)
            self._begin(step, fields, started_s, waits=required)
        self._may_prune = True
        self._saved_step = step
        if required:
            self._finish()
        self._saved_s = time.monotonic()

    def _begin(self, step: int, fields: dict[str, Any], started_s: float, *, waits: bool) -> None:
        progress = self._describe(step, fields)
        stall_s = None if waits else time.monotonic() - started_s
        self._writing = self._pool.submit(self._write, progress, started_s, stall_s)

    def _wait(self) -> CannotWrite | None:
        return self._writing.result() if self._writing else None

    def _finish(self) -> None:
        problem = self._wait()
        failed = torch.tensor([float(problem is not None)], device=self._prepared.device)
        self._group.sum(failed)
        if problem is not None:
            raise problem
        self.learn(int(failed.item()))

    def close(self) -> None:
        """Wait until what has begun is written, also when the training ends with an error."""
        self._pool.shutdown()

    def _describe(self, step: int, fields: dict[str, Any]) -> ResumePoint:
        return ResumePoint(
            step=step,
            spec=self._attempt.intent.spec,
            devices=tuple((r.node, r.device_id) for r in self._attempt.intent.ranks),
            tokens_seen=self._tokens_seen,
            plain_template=self._prepared.model.plain_template,
            optimizer=self._copy.plain,
            layout=self._prepared.flat.layout,
            **fields,
        )

    def _write(
        self, progress: ResumePoint, started_s: float, stall_s: float | None
    ) -> CannotWrite | None:
        """Commit what was copied; in the saver's thread. Without a stall, the step waits for it."""
        about = {**self._prepared.hashes, "versions": self._prepared.versions}
        try:
            self._folder.commit(
                progress.step,
                lambda folder: write_state(
                    folder, model=self._prepared.model, copy=self._copy, progress=progress
                ),
                about,
            )
        except CannotWrite as error:
            self._journal.write(
                "checkpoint_failed", step=progress.step, message=error.message, hint=error.hint
            )
            return error
        seconds = time.monotonic() - started_s
        self._journal.write(
            "checkpoint",
            step=progress.step,
            seconds=seconds,
            stall_s=seconds if stall_s is None else stall_s,
            path=str(self._folder.path_of(progress.step)),
        )
        return None

    def _make_equal(self, carried: dict[str, Tensor]) -> None:
        """Compare the states of all ranks; also how the save before this one went."""
        world_size = self._group.world_size
        if world_size == 1:
            self.learn(int(self.has_uncommitted))
            return
        state, _ = export_state(self._prepared.optimizer)
        tensors = [self._prepared.flat.values, *_big(state), *_big(carried)]
        halves_2 = digest(tensors)
        told = torch.zeros(2 * world_size + 1, dtype=torch.float64, device=halves_2.device)
        told[2 * self._group.rank : 2 * self._group.rank + 2] = halves_2
        told[-1] = float(self.has_uncommitted)
        self._group.sum(told)
        *digests, num_uncommitted = told.tolist()
        self.learn(int(num_uncommitted))
        if len(set(zip(digests[::2], digests[1::2], strict=True))) == 1:
            return
        for tensor in tensors:
            self._group.copy_from_first(tensor)


def _big(tensors: dict[str, Tensor]) -> list[Tensor]:
    """Return the tensors that lie where the parameters do; the rest are counters."""
    return [tensors[name] for name in sorted(tensors) if tensors[name].dim()]
