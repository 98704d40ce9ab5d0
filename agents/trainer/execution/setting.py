"""Execution setting: micro-batch size, and number of layers that recompute or offload.

Memory that a setting leaves free holds weights; see `fill_spare_memory`.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from agents.contract.layer_plan import MEMORY_SHARE, LayerPlan
from agents.trainer.data.examples import BatchPart
from agents.trainer.execution.executor import Executor
from agents.trainer.optim.optimizer_reserve import Reserve
from agents.trainer.rank.device import read_most_bytes

PLANNED_SHARES = (1.0, 0.85, 0.7)
"""Fractions of the free memory to plan with, tried in order until memory suffices."""
DEQUANTIZED_SHARES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08)
"""Fractions of the packed weights to make room for, tried in order."""
# Fraction of the card's memory that dequantized weights leave free: they gain less than any other
# use of it.
_SPARE_SLACK = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionSetting:
    """Execution setting of one rank; stored in checkpoints and with the compiled code."""

    micro_tokens: int
    """Maximum number of tokens of a micro-batch; a longer example forms its own."""
    num_recomputed: int = 0
    """Number of layers that recompute their activations."""
    num_moved: int = 0
    """Number of layers that offload their activations."""
    is_repeating: bool = False
    """True if micro-batches are padded to repeating shapes and replayed; see `cuda_graphs`."""
    tokens_per_s: float = 0.0
    """Expected speed over the run's own rows, in tokens per second; 0 if not measured."""

    @property
    def plan(self) -> LayerPlan:
        """Modes of the layers."""
        return LayerPlan(num_recomputed=self.num_recomputed, num_moved=self.num_moved)


def apply_setting(executor: Executor, setting: ExecutionSetting) -> None:
    """Apply a setting to the executor; its layers free their spare memory."""
    executor.drop_graphs()
    executor.layers.empty()
    executor.micro_tokens = setting.micro_tokens
    executor.is_repeating = setting.is_repeating and executor.replayer is not None
    executor.layers.set(setting.plan)


def read_setting(executor: Executor) -> ExecutionSetting:
    """Return the setting in use, including changes after memory ran out."""
    plan = executor.layers.plan
    return ExecutionSetting(
        micro_tokens=executor.micro_tokens,
        num_recomputed=plan.num_recomputed,
        num_moved=plan.num_moved,
        is_repeating=executor.is_repeating,
    )


def fill_spare_memory(
    executor: Executor, device: torch.device, part: BatchPart, reserve: Reserve
) -> None:
    """Use the memory that passes over `part` leave free for weights; see `LayerStack.fill`.

    Args:
        executor: executor with the final modes of its layers.
        device: a GPU.
        part: examples of the largest possible micro-batch.
        reserve: memory reserve of the optimizer.
    """
    if not executor.layers.can_fill:
        return
    executor.drop_graphs()
    executor.layers.empty()
    peak_bytes = measure_peak_bytes(executor, device, part)
    executor.try_gradients(part)  # the second pass of one shape is recorded, if possible
    held_bytes = executor.held_bytes
    executor.drop_graphs()
    gc.collect()
    torch.cuda.empty_cache()
    slack_bytes = _SPARE_SLACK * read_most_bytes(device)
    # The graphs' pool keeps its memory during the optimizer's step, which needs memory, too.
    needed_bytes = max(peak_bytes, held_bytes) + reserve.lasting_bytes
    needed_bytes = max(needed_bytes, reserve.missing_bytes)
    spare_bytes = read_free_bytes(device) - needed_bytes - slack_bytes
    for caution in PLANNED_SHARES:
        executor.layers.fill(spare_bytes * caution)
        if not executor.layers.filled_bytes or _fits_unchanged(
            executor, device, part, is_recorded=held_bytes > 0
        ):
            break
        executor.drop_graphs()
        executor.layers.empty()
        torch.cuda.empty_cache()


def _fits_unchanged(
    executor: Executor, device: torch.device, part: BatchPart, *, is_recorded: bool
) -> bool:
    """Return whether passes fit as before: still recorded, and without allocator retries."""
    if not executor.try_gradients(part):
        return False
    # Retries are costly: the allocator synchronizes and frees its whole cache.
    before = count_alloc_retries(device)
    if not executor.try_gradients(part):
        return False
    if is_recorded:
        return executor.replayer is not None and executor.replayer.num_graphs > 0
    return count_alloc_retries(device) == before


def count_alloc_retries(device: torch.device) -> int:
    """Return how often the allocator flushed its cache for lack of a large enough block."""
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


def measure_peak_bytes(executor: Executor, device: torch.device, part: BatchPart) -> int:
    """Return the peak memory of passes over `part`, above the memory at rest, in bytes."""
    executor.drop_graphs()
    rest_bytes = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    executor.try_gradients(part)
    return torch.cuda.max_memory_allocated(device) - rest_bytes


def read_free_bytes(device: torch.device) -> float:
    """Return the bytes that this process may still allocate on its GPU, less a safety margin."""
    return read_most_bytes(device) * MEMORY_SHARE - torch.cuda.memory_allocated(device)
