"""An execution setting: micro-batch size, layers that recompute or move, weights unpacked."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from agents.contract.layer_plan import MEMORY_SHARE, LayerPlan
from agents.trainer.data.examples import Part
from agents.trainer.execution.executor import Executor
from agents.trainer.optim.optimizer_reserve import Reserve
from agents.trainer.rank.device import read_most_bytes

PLANNED_SHARES = (1.0, 0.85, 0.7)
"""Parts of the free memory that are planned with, one after the other, when it ran out."""


_SPARE_SLACK = 0.02
"""Of the memory that the card may give, not spent on unpacked weights: they gain the least."""


DEQUANTIZED_SHARES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08)
"""Of the weights that are not unpacked yet: the most for which no more layers recompute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionSetting:
    """What was chosen."""

    micro_tokens: int
    num_recomputed: int = 0
    num_moved: int = 0
    tokens_per_s: float = 0.0
    """As measured; 0: it was not."""

    @property
    def plan(self) -> LayerPlan:
        """What the layers do."""
        return LayerPlan(num_recomputed=self.num_recomputed, num_moved=self.num_moved)


def apply_setting(executor: Executor, setting: ExecutionSetting) -> None:
    """Let the computer work with this setting, and with weights that stay packed."""
    executor.drop_graphs()
    executor.layers.drop_dequantized()
    executor.micro_tokens = setting.micro_tokens
    executor.layers.set(setting.plan)


def fill_spare_memory(
    executor: Executor, device: torch.device, part: Part, reserve: Reserve
) -> bool:
    """Keep weights unpacked in the memory that passes over `part` leave.

    Args:
        computer: with layers that do already what they will.
        device: a GPU.
        part: as large as any.
        reserve: of the optimizer.

    Returns:
        False: the passes could not be recorded (see `replay`).
    """
    if not executor.layers.can_dequantize:
        return True
    executor.drop_graphs()
    executor.layers.drop_dequantized()
    peak_bytes = measure_peak_bytes(executor, device, part)
    executor.try_gradients(part)  # is recorded now, if anything is
    held_bytes = executor.held_bytes
    executor.drop_graphs()
    gc.collect()
    torch.cuda.empty_cache()
    slack_bytes = _SPARE_SLACK * read_most_bytes(device)
    # Recorded passes hold their memory while the optimizer steps; others have given it back.
    needed_bytes = max(peak_bytes + reserve.lasting_bytes, held_bytes + reserve.missing_bytes)
    spare_bytes = read_free_bytes(device) - needed_bytes - slack_bytes
    for caution in PLANNED_SHARES:
        executor.layers.dequantize(spare_bytes * caution)
        if not executor.layers.dequantized_bytes or _fits_unchanged(
            executor, device, part, held_bytes > 0
        ):
            break
        executor.drop_graphs()
        executor.layers.drop_dequantized()
        torch.cuda.empty_cache()
    return held_bytes > 0


def _fits_unchanged(
    executor: Executor, device: torch.device, part: Part, is_recorded: bool
) -> bool:
    """Tell whether passes still fit, are still recorded, and need not tidy the memory up."""
    with nullcontext() if is_recorded else executor.without_graphs():
        if not executor.try_gradients(part):
            return False
        before = count_alloc_retries(device)
        if not executor.try_gradients(part):
            return False
    return executor.held_bytes > 0 if is_recorded else count_alloc_retries(device) == before


def count_alloc_retries(device: torch.device) -> int:
    """Return how often memory went back to the driver because no free piece was large enough."""
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


def measure_peak_bytes(executor: Executor, device: torch.device, part: Part) -> int:
    """Return the most bytes beside those at rest that passes over `part` need."""
    executor.drop_graphs()
    rest_bytes = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    executor.try_gradients(part)
    return torch.cuda.max_memory_allocated(device) - rest_bytes


def read_free_bytes(device: torch.device) -> float:
    """Return the bytes that this process may still take of its GPU, less a reserve."""
    return read_most_bytes(device) * MEMORY_SHARE - torch.cuda.memory_allocated(device)
