"""Patches for the GPTQ of gptqmodel 7.6, so that one Hessian of a layer is in memory at a time.

For a layer with I inputs it adds up products of inputs, one matrix of I x I float32 for the sum and
another for each row of calibration; reorders that matrix into a third; and factors, inverts and
factors again, each into a new matrix, in addition to float32 copies of the weights, of their
rounded values and of each loss. For the widest layer of a 70B model that is 13 GB, plus the model's
layer. Here the same is done in place (`hessian`, `column_rounding`), in 5.5 GB and with a third of
the products.

Layers with the same inputs, such as queries, keys and values, share one Hessian. gptqmodel gives
each its own copy: 17 GB for 128 experts with 4,096 inputs.

Layers that exceed the GPU's memory are rounded on the CPU. Embeddings, convolutions and experts
that no token has reached are left to gptqmodel.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from agents.quantizers.formats.column_rounding import (
    BlockScales,
    RoundBlock,
    order_inputs,
    round_columns,
)
from agents.quantizers.formats.hessian import add_squares, factor_inverse, reorder
from agents.quantizers.formats.patching import replaced
from agents.quantizers.job.heap import mapping_large_blocks

# GPU memory for rounding, in bytes per weight, and per input for temporary copies.
_WEIGHT_BYTES, _INPUT_BYTES = 8, 12 << 10


@contextmanager
def mended_gptq() -> Iterator[None]:
    """Patch gptqmodel's GPTQ inside the block, as described in the module's docstring.

    Freed memory is returned to the system immediately.
    """
    from gptqmodel.quantization.gptq import GPTQ

    add_usual, finish_usual, quantize_usual = (
        getattr(GPTQ, name) for name in ("add_batch", "materialize_global_hessian", "quantize")
    )

    def add(self: Any, inp: Tensor, out: Tensor, batch_index: int | None = None) -> None:
        if _is_plain(self):
            add_batch(self, inp)
        else:
            add_usual(self, inp, out, batch_index)

    def finish(self: Any, target_device: Any = None) -> None:
        finish_sums(self, finish_usual, target_device)

    def quantize(self: Any, blocksize: int = 128) -> tuple[Any, ...]:
        from gptqmodel.utils.fallback import should_use_fallback

        if not _is_plain(self) or should_use_fallback(
            self.fallback, float(self.nsamples), self.expected_nsamples
        ):
            found: tuple[Any, ...] = quantize_usual(self, blocksize)
            return found
        return quantize_layer(self)

    with ExitStack() as stack:
        # Pools of threads free a few large matrices per layer. AWQ's blocks are many and small.
        stack.enter_context(mapping_large_blocks())
        for name, value in (
            ("add_batch", add),
            ("quantize", quantize),
            ("materialize_global_hessian", finish),
            ("adopt_hessian_from", share_hessian),
        ):
            stack.enter_context(replaced(GPTQ, name, value))
        yield


def _is_plain(task: Any) -> bool:
    """Return whether a task is a linear layer with the settings that exports choose."""
    config = task.qcfg
    return (
        isinstance(task.module, nn.Linear)
        and not task._tp_pad_cols
        and config.act_group_aware
        and not (config.desc_act or config.static_groups or config.mock_quantization)
    )


@torch.inference_mode()  # type: ignore[untyped-decorator, unused-ignore]
def add_batch(task: Any, inputs: Tensor) -> None:
    """Add inputs (..., I) to the sums of a task, on their own device."""
    inputs_TI = inputs.reshape(-1, inputs.shape[-1])
    device, num_tokens = inputs_TI.device, len(inputs_TI)
    if not num_tokens:
        return
    with task.lock:
        task.fwd_counter += 1
        sums_II = task._device_hessian_partials.get(device)
        if sums_II is None:
            sums_II = torch.zeros(task.columns, task.columns, device=device)
            task._device_hessian_partials[device] = sums_II
        else:
            task._wait_partial_ready(device)
        add_squares(sums_II, inputs_TI)
        task._record_partial_ready(device)
        counts = task._device_sample_counts
        counts[device] = counts.get(device, 0) + num_tokens
        task.nsamples += num_tokens
        task._hessian_dirty = True


@torch.inference_mode()  # type: ignore[untyped-decorator, unused-ignore]
def finish_sums(task: Any, usual: Callable[..., None], target_device: Any = None) -> None:
    """Turn the sums of a task into its Hessian; `usual` does so if they are on several GPUs."""
    with task.lock:
        sums = task._device_hessian_partials
        if task.H is not None or len(sums) != 1 or not _is_plain(task):
            usual(task, target_device)
            return
        ((device, sums_II),) = sums.items()
        task._wait_partial_ready(device)
        task.nsamples = task._device_sample_counts[device]
        task.H = sums_II.mul_(2 / task.nsamples)
        task._hessian_dirty = False
        task._final_hessian_device_hint = device
        for kept in (sums, task._device_hessian_partial_ready, task._device_sample_counts):
            kept.clear()
        task._record_hessian_ready(device)


def share_hessian(task: Any, leader: Any) -> None:
    """Give a task the Hessian of a leader with the same inputs.

    The first one factors it in place; the others find the factor in the cache of both.
    """
    leader.materialize_global_hessian()
    with leader.lock:
        hessian_II = leader.H if leader.H is not None else leader.create_H(None)
        leader.H = hessian_II
    with task.lock:
        task.H, task.nsamples, task.fwd_counter = hessian_II, leader.nsamples, leader.fwd_counter
        task._hessian_dirty = False
        task._final_hessian_device_hint = hessian_II.device
        task._hessian_ready_event = leader._hessian_ready_event


@torch.inference_mode()  # type: ignore[untyped-decorator, unused-ignore]
def quantize_layer(task: Any) -> tuple[Any, ...]:
    """Return the result of `GPTQ.quantize`: weights, scales, zeros, groups, time, loss, damping.

    Raises:
        ValueError: the layer's inputs or weights are not finite.
    """
    started = time.time()
    task.finalize_hessian(task.module.weight.device)
    made: _Factor = task._shared_factor_or_local("groups", partial(_factor_hessian, task))
    task.H = None
    group = task.qcfg.group_size
    weight_OI = task.clone_module(device=made.factor.device)
    # A dead input has no effect, so its weights may as well be 0.
    weight_OI[:, made.dead] = 0
    weight_OI = weight_OI[:, made.order]
    weight = task.module.weight.data
    kernel = _find_kernel(weight_OI.device)
    done = round_columns(weight_OI, made.factor, group, task.quantizer, weight.dtype, kernel)
    del weight_OI
    if not math.isfinite(done.loss):
        raise ValueError(f"the weights of {task.name} are not finite")
    rounded_OI = done.weight[:, made.order.argsort()].to(weight.device)
    scales_OG, zeros_OG = (
        _put_back(torch.cat(parts, dim=1), made.groups) for parts in (done.scales, done.zeros)
    )
    group_I = torch.arange(task.columns, dtype=torch.int32, device=weight.device) // group
    loss = done.loss / max(1, task.nsamples)
    took_s = time.time() - started
    return rounded_OI, scales_OG, zeros_OG, group_I, took_s, loss, made.damping, task.nsamples


class _Factor(NamedTuple):
    # First, since gptqmodel's cache reads the device of the first field.
    factor: Tensor
    damping: float
    dead: Tensor
    """Inputs that are always 0, by their positions in the layer."""
    order: Tensor
    """Inputs in the order of rounding."""
    groups: list[int]


def _factor_hessian(task: Any) -> _Factor:
    from gptqmodel.quantization import gar

    hessian_II, config = task.H, task.qcfg
    if not _has_room(task):
        task.log_cpu_fallback("rounding", hessian_II.device)
        hessian_II = hessian_II.cpu()
    diagonal_I = hessian_II.diagonal()
    dead_I = diagonal_I == 0
    # An input that is always 0 would make the matrix singular.
    diagonal_I.masked_fill_(dead_I, 1)
    order_I, groups = order_inputs(gar, diagonal_I.clone(), config.group_size)
    reorder(hessian_II, order_I)
    damping = factor_inverse(hessian_II, config.damp_percent, config.damp_auto_increment)
    return _Factor(hessian_II, damping, dead_I, order_I, groups)


def _has_room(task: Any) -> bool:
    """Return whether the device of a task's Hessian has memory for rounding."""
    device = task.H.device
    if device.type != "cuda":
        return True
    torch.cuda.empty_cache()
    free_bytes = torch.cuda.mem_get_info(device)[0]
    return bool(_WEIGHT_BYTES * task.rows * task.columns + _INPUT_BYTES * task.columns < free_bytes)


def _find_kernel(device: torch.device) -> RoundBlock | None:
    """Return gptqmodel's kernel for blocks of columns, or None if it cannot be compiled."""
    if device.type != "cuda":
        return None
    from gptqmodel.quantization.gptq_cuda import block_update_available, gptq_block_update

    if not block_update_available():
        return None

    def round_block(
        weight_OK: Tensor, factor_KK: Tensor, about: BlockScales
    ) -> tuple[Tensor, Tensor, Tensor]:
        rounded_OK, errors_OK, losses_OK = (torch.empty_like(weight_OK) for _ in range(3))
        scales = (about.scales, about.zeros, about.groups)
        filled = (rounded_OK, errors_OK, losses_OK)
        gptq_block_update(weight_OK, factor_KK, *scales, *filled, about.most)
        return filled

    return round_block


def _put_back(values_OG: Tensor, groups: list[int]) -> Tensor:
    """Return values of groups in the order of the layer."""
    found_OG = values_OG.clone()
    found_OG[:, groups] = values_OG[:, : len(groups)]
    return found_OG
