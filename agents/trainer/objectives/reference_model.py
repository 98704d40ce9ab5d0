"""Log-probabilities of the answers under the model before a full fine-tuning.

With an adapter the reference model stays available: the same weights without the adapter. A full
fine-tuning changes the weights themselves, so the reference is evaluated once, before the first
step, on every row that the run will see. A second copy of the model would take memory during the
whole run. Each rank evaluates its part; the sum over the ranks is the whole table.

The table is cached on every node under a hash of its inputs: model, tokenized data, rows, precision
and versions. So a resume finds it, as does a run with other settings; one node with the table is
enough. The least recently used tables are deleted first, as with tokenized data.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import operator
import os
import shutil
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from agents.contract.objectives import OBJECTIVES
from agents.contract.spec import RunSpec
from agents.shared.micro_shapes import group_examples
from agents.trainer.data.cache import prune
from agents.trainer.data.examples import Examples
from agents.trainer.data.order import order_rows
from agents.trainer.data.store import ExampleSet
from agents.trainer.model.forward import Forward
from agents.trainer.model.micro_batch import CPU_TOKENS, build_micro_batch
from agents.trainer.objectives.objective import sum_log_probabilities
from agents.trainer.rank.device import choose_dtype, explain_out_of_memory
from agents.trainer.rank.group import Group

MAX_CACHE_BYTES = 5 << 30
"""Maximum size of all tables on a node, in bytes."""
_TABLE, _ABOUT = "table.npy", "about.json"
ReportProgress = Callable[[int, float], None]
"""Called with the number of rows done, and their fraction of this rank's rows, 0 to 1."""


class ReferenceTable:
    """Table of one run.

    Args:
        spec: spec of the run.
        forward: model, which has to hold its base weights until the table is complete.
        sets: rows of the training data, then those of the evaluation.
        cache: folder of all tables on this node.
        device: device of this rank.
    """

    def __init__(
        self,
        spec: RunSpec,
        forward: Forward,
        sets: tuple[ExampleSet, ExampleSet | None],
        cache: Path,
        device: torch.device,
    ) -> None:
        self._spec = spec
        self._forward = forward
        self._sets = sets
        self._cache = cache
        self._device = device
        num_rows = sum(len(rows) for rows in sets if rows is not None)
        num_segments = OBJECTIVES[spec.objective].num_segments
        self.table_RK = torch.zeros(num_rows, num_segments, dtype=torch.float64)
        """Log-probability of each segment of each row; 0 if no step reads it."""

    def complete(
        self, group: Group, model_sha256: str, *, keeps: bool, report: ReportProgress | None = None
    ) -> None:
        """Fill the table on all ranks; all call this together.

        Args:
            model_sha256: hash of the base weights.
            keeps: True if this rank writes the cache of its node.
            report: called with the progress of this rank.

        Raises:
            ExpectedError: a rank failed; every rank ends with the same reason.
        """
        key = self._make_key(model_sha256)
        found = self._read(key)
        # Caches of nodes may differ: another run may have pruned one of them.
        reports = group.agree("reference found", lambda: {"found": found is not None})
        holders = [rank for rank, report in enumerate(reports) if report["found"]]
        if not holders:
            group.agree("reference", lambda: self._compute(group.rank, group.world_size, report))
        # One rank provides the table and the others zeros, so that the sum below is the table.
        elif found is not None and group.rank == holders[0]:
            self.table_RK.copy_(found)
        # NCCL sums only tensors on the GPU.
        whole_RK = self.table_RK.to(self._device)
        group.sum(whole_RK)
        self.table_RK.copy_(whole_RK)
        if keeps and found is None:
            self._keep(key)

    def _make_key(self, model_sha256: str) -> str:
        train, evaluation = self._sets
        used = np.array(_find_used(self._spec, train.parts), dtype=np.int64)
        parts = {
            "model": model_sha256,
            # The name of a folder of tokens hashes its content.
            "data": [train.folder.name, evaluation.folder.name if evaluation else ""],
            "pairs": hashlib.sha256(used.tobytes()).hexdigest(),
            "precision": [str(choose_dtype(self._spec.precision, self._device)), self._device.type],
            "versions": [torch.__version__, version("transformers")],
        }
        text = json.dumps(parts, sort_keys=True)
        return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]

    def _read(self, key: str) -> Tensor | None:
        """Return the cached table; None if no complete one exists."""
        try:
            os.utime(self._cache / key / _ABOUT)  # marks the last use
            found = np.load(self._cache / key / _TABLE)
        except (OSError, ValueError):
            return None
        if found.shape != tuple(self.table_RK.shape) or found.dtype != np.float64:
            return None
        return torch.from_numpy(found)

    def _keep(self, key: str) -> None:
        """Write the table; on a full disk the next start has to compute it again."""
        # Hidden until it is complete, so that no other process reads half a table.
        unfinished = self._cache / f".{key}-{os.getpid()}"
        try:
            with contextlib.suppress(OSError):
                unfinished.mkdir(mode=0o700, parents=True)
                np.save(unfinished / _TABLE, self.table_RK.numpy())
                (unfinished / _ABOUT).write_text("{}", encoding="ascii")
                unfinished.rename(self._cache / key)
                prune(self._cache, MAX_CACHE_BYTES, keep=key)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _compute(self, rank: int, world_size: int, report: ReportProgress | None) -> dict[str, int]:
        train, evaluation = self._sets
        with explain_out_of_memory(self._device):
            part_RK = compute_reference(
                self._spec,
                self._forward,
                (train, evaluation),
                rank=rank,
                world_size=world_size,
                device=self._device,
                report=report,
            )
        self.table_RK.copy_(part_RK)
        return {"computed": len(part_RK)}


def compute_reference(
    spec: RunSpec,
    forward: Forward,
    sets: tuple[Examples, Examples | None],
    *,
    rank: int,
    world_size: int,
    device: torch.device,
    report: ReportProgress | None = None,
) -> Tensor:
    """Return this rank's part of the table (R, K): rows of training, then those of evaluation.

    Rows of other ranks, and rows that no step will see, are zero.
    """
    train, evaluation = sets
    num_train = len(train)
    num_segments = OBJECTIVES[spec.objective].num_segments
    num_rows = num_train + len(evaluation or ())
    table_RK = torch.zeros(num_rows, num_segments, dtype=torch.float64)
    # Every n-th row, so that long and short ones are spread over the ranks.
    wanted = _find_used(spec, train.parts)[rank::world_size]
    evaluated = range(rank, len(evaluation or ()), world_size)
    total = len(wanted) + len(evaluated)

    def count(num_done: int) -> None:
        if report is not None:
            report(num_done, num_done / max(1, total))

    _fill(table_RK[:num_train], train, wanted, forward, device, count)
    if evaluation is not None:
        done = len(wanted)
        _fill(
            table_RK[num_train:], evaluation, evaluated, forward, device, lambda n: count(done + n)
        )
    return table_RK


def _find_used(spec: RunSpec, parts: Sequence[int]) -> list[int]:
    """Return the indices of the rows that a step of the run will see."""
    size, order = spec.batch_sequences, order_rows(spec, parts)
    steps = order.count_steps(spec)
    # Every row is seen at least once: an epoch is taken as a whole.
    if steps * size >= order.num_rows and all(map(operator.ge, order.taken, order.sizes)):
        return list(range(sum(parts)))
    batches = (order.choose(step=step, batch=size) for step in range(1, steps + 1))
    return sorted({row for batch in batches for row in batch})


def _fill(
    table_RK: Tensor,
    examples: Examples,
    places: Sequence[int],
    forward: Forward,
    device: torch.device,
    count: Callable[[int], None],
) -> None:
    num_done, num_segments = 0, table_RK.shape[1]
    for group in group_examples([int(examples.num_tokens[p]) for p in places], CPU_TOKENS):
        chosen = [places[i] for i in group]
        batch = build_micro_batch([examples[place] for place in chosen], device)
        with torch.no_grad():
            # In float64: the loss subtracts two large sums.
            table_RK[chosen] = sum_log_probabilities(forward, batch, num_segments).double().cpu()
        num_done += len(chosen)
        count(num_done)
