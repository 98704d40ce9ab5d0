"""Measure the needs of passes with a few small ones: memory per token and per layer, and time.

All layers recompute in them, or all keep their activations. Compiling a mode takes longer than all
passes, so a card that certainly holds all activations measures only that mode.
"""

from __future__ import annotations

import torch

from agents.contract.layer_plan import LayerPlan, Needs
from agents.contract.spec import Recompute
from agents.trainer.execution.executor import Executor
from agents.trainer.execution.pass_times import PassTime, PassTimer, measure_bus
from agents.trainer.execution.pruning import RECOMPUTED
from agents.trainer.execution.setting import ExecutionSetting, apply_setting, measure_peak_bytes
from agents.trainer.execution.workload import Workload, count_tokens


def measure_needs(
    executor: Executor,
    device: torch.device,
    workload: Workload,
    *,
    num_recomputed: int,
    recompute: Recompute,
) -> tuple[Needs, PassTime]:
    """Return the needs, and the times of a pass over the longest example.

    Args:
        executor: executor whose layers can offload.
        device: the GPU.
        workload: work of this rank.
        num_recomputed: all layers, or 0.
        recompute: rule of the spec. A layer that keeps is compiled only if the rule allows it.

    Raises:
        ExpectedError: nothing fits into memory.
    """
    part, layers = workload.choose_part(0), executor.layers
    tokens = count_tokens(part)
    least = ExecutionSetting(micro_tokens=tokens, num_recomputed=num_recomputed)
    apply_setting(executor, least)
    # Compiles. Unlike `try_gradients` it raises an explained error if nothing fits.
    executor.add_gradients(part)
    timed = PassTimer(executor, device).time(part) or PassTime(1.0, 0.0)
    # After the timing: the first passes also allocate workspaces and compile.
    once_bytes = measure_peak_bytes(executor, device, part)
    input_bytes = _read_layer(executor)
    twice = workload.choose_part(2 * tokens)
    more = count_tokens(twice) - tokens
    apply_setting(
        executor, ExecutionSetting(micro_tokens=2 * tokens, num_recomputed=num_recomputed)
    )
    token_bytes = once_bytes / tokens
    # Data with few rows may not fill a part of twice the size.
    if more > tokens // 2 and executor.try_gradients(twice):
        twice_bytes = measure_peak_bytes(executor, device, twice)
        # Two sizes separate the part that grows with the tokens from the fixed part.
        token_bytes = min(token_bytes, max(0.0, (twice_bytes - once_bytes) / more))
    fixed_bytes = once_bytes - token_bytes * tokens
    layer_bytes = 0
    if recompute != "all":
        layers.set(LayerPlan(num_recomputed=max(0, num_recomputed - 1), num_moved=1))
        layer_bytes = _read_layer(executor) if executor.try_gradients(part) else 0
    pass_s = timed.seconds
    if not num_recomputed:  # the measured bytes contain what all layers keep
        token_bytes = max(0.0, token_bytes - layers.num_layers * layer_bytes / tokens)
        pass_s *= RECOMPUTED
    offloader = layers.offloader
    can_move = offloader is not None and offloader.arena.capacity_bytes
    needs = Needs(
        tokens=tokens,
        fixed_bytes=fixed_bytes,
        token_bytes=token_bytes,
        layer_bytes=layer_bytes / tokens,
        input_bytes=input_bytes / tokens,
        pass_s=pass_s,
        bus_bytes_per_s=measure_bus(device) if can_move else 0.0,
    )
    return needs, timed


def describe_needs(needs: Needs) -> str:
    """Return a line for the log."""
    return (
        f"{needs.tokens:,} tokens at once need {needs.fixed_bytes / 1e9:.2f} GB and "
        f"{needs.token_bytes / 1e6:.2f} MB a token, a layer that keeps "
        f"{needs.layer_bytes / 1e6:.2f} MB a token; {needs.pass_s:.2f} s, bus "
        f"{needs.bus_bytes_per_s / 1e9:.1f} GB/s"
    )


def _read_layer(executor: Executor) -> int:
    offloader = executor.layers.offloader
    return offloader.max_layer_bytes if offloader is not None else 0
