"""Save the run's state on the nodes that keep copies, together with all other ranks.

A checkpoint is also where ranks are made equal: GPUs of different kinds may round the last bit of
a norm differently, and such differences would grow. When the states differ, all take that of rank
0, which is the one that a resume would start from anyway. Older checkpoints are deleted only after
every copy of the new one has been committed.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agents.trainer.attempt import Attempt
from agents.trainer.checkpoint import CannotWrite, CheckpointFolder
from agents.trainer.group import Group
from agents.trainer.journal import Journal
from agents.trainer.optimizer import export_state
from agents.trainer.prepare import Prepared
from agents.trainer.snapshot import Progress, write_snapshot

_DIGEST_BYTES = 6
"""A float64 carries 48 bits exactly."""


class Saver:
    """Writes checkpoints on the ranks that were chosen for it, and keeps all ranks in step."""

    def __init__(
        self,
        attempt: Attempt,
        prepared: Prepared,
        *,
        group: Group,
        folder: CheckpointFolder,
        journal: Journal,
    ) -> None:
        self._attempt = attempt
        self._prepared = prepared
        self._group = group
        self._folder = folder
        self._journal = journal
        self._writes = attempt.rank in attempt.intent.checkpoint_ranks
        self._saved_s = time.monotonic()
        self._saved_step = prepared.resumed.step if prepared.resumed else -1
        self._tokens_seen = prepared.resumed.tokens_seen if prepared.resumed else 0
        if self._writes:
            folder.clean()

    def add_tokens(self, count: int) -> None:
        """Count tokens that the run has seen."""
        self._tokens_seen += count

    def is_due_by_time(self) -> bool:
        """Tell whether the clock asks for a checkpoint; only that of rank 0 counts."""
        minutes = self._attempt.intent.spec.checkpoint.every_minutes
        if minutes is None or self._attempt.rank != 0:
            return False
        return time.monotonic() - self._saved_s >= minutes * 60

    def save(self, step: int, *, required: bool, **fields: Any) -> None:
        """Save the state after `step`; all ranks call this together.

        Args:
            step: optimizer steps done.
            required: the run ends here, so that a failure is one; otherwise it is a warning.
            fields: the rest of `Progress`.

        Raises:
            UserError: this attempt may not write any more, or nothing could be written at the end.
        """
        if step == self._saved_step:
            return
        started_s = time.monotonic()
        self._make_equal()
        problem = self._write(step, fields) if self._writes else None
        num_problems = self._count(problem is not None)
        if problem is not None and required:
            raise problem
        if problem is None and self._writes:
            self._journal.write(
                "checkpoint",
                step=step,
                seconds=time.monotonic() - started_s,
                path=str(self._folder.path_of(step)),
            )
            if not num_problems:
                self._folder.prune(self._attempt.intent.spec.checkpoint.keep)
        self._saved_s = time.monotonic()
        self._saved_step = step

    def _write(self, step: int, fields: dict[str, Any]) -> CannotWrite | None:
        spec = self._attempt.intent.spec
        progress = Progress(
            step=step,
            spec=spec,
            devices=tuple((r.node, r.device_id) for r in self._attempt.intent.ranks),
            tokens_seen=self._tokens_seen,
            plain_template=self._prepared.model.plain_template,
            optimizer={},
            layout=self._prepared.flat.layout,
            **fields,
        )

        def write_files(folder: Path) -> None:
            write_snapshot(
                folder,
                model=self._prepared.model,
                flat=self._prepared.flat,
                optimizer=self._prepared.optimizer,
                progress=progress,
            )

        about = {**self._prepared.hashes, "versions": self._prepared.versions}
        try:
            self._folder.commit(step, write_files, about)
        except CannotWrite as error:
            self._journal.write("warning", message=error.message, hint=error.hint)
            return error
        return None

    def _count(self, failed: bool) -> int:
        count = torch.tensor([float(failed)], device=self._prepared.device)
        self._group.sum(count)
        return int(count.item())

    def _make_equal(self) -> None:
        if self._group.world_size == 1:
            return
        tensors = [self._prepared.flat.values, *_state_tensors(self._prepared.optimizer)]
        digests = torch.zeros(self._group.world_size, dtype=torch.float64)
        digests[self._group.rank] = _digest(tensors)
        digests = digests.to(self._prepared.device)
        self._group.sum(digests)
        if len(set(digests.tolist())) == 1:
            return
        for tensor in tensors:
            self._group.copy_from_first(tensor)


def _state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the optimizer's tensors that lie where the parameters do; the rest are counters."""
    tensors, _ = export_state(optimizer)
    return [tensors[name] for name in sorted(tensors) if tensors[name].dim()]


def _digest(tensors: list[Tensor]) -> int:
    sha256 = hashlib.sha256()
    for tensor in tensors:
        sha256.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    return int.from_bytes(sha256.digest()[:_DIGEST_BYTES], "little")
