"""Patches for the AWQ of gptqmodel 7.6: its search for scales and clippings, packing and positions.

AWQ tries twenty scales for each set of layers and compares the set's outputs for all calibration
texts. gptqmodel keeps inputs, wanted outputs and weights in host memory and copies all of them to
the GPU for every try: 54 GB for a layer of a 7B model and 28,000 tokens. Here they stay on the GPU
if they fit; the sums are the same.

AWQ clips each group of weights if that brings its products with the inputs of 512 tokens closer to
the original ones. gptqmodel, like AutoAWQ before it, stores every single product of a weight with
an input, 512 times the weights, ten times over: memory traffic decides the duration, and a wide
layer of a 7B model needs 3 GB. Here the same sums are computed as matrix products.

The result's scales are float16, as in the classic layout; gptqmodel writes them in the model's own
type, and then refuses the layers that an earlier job has kept. It packs a whole layer at once, on
the CPU, column by column and in 64-bit words: 1.1 GB for the widest layer of a 7B model, and
several layers are packed in parallel. Packing one group of inputs at a time gives the same words
with 0.03 GB, and runs on the job's GPU if it has one.

Texts come in blocks of one length (`texts.split_blocks`). gptqmodel keeps one row of positions per
batch and joins those rows, so that there is one per batch instead of one per block; if a layer's
attention takes positions (StableLM, Ministral 3), its search fails. Without positions, it uses
those of one batch for all. Models with different rotary embeddings for different kinds of layers
(Gemma 3) also need the kind of the layer, which gptqmodel does not pass.

Shape letters: O outputs, I inputs, T tokens, G groups, K weights of a group.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from agents.quantizers.formats.patching import replaced
from agents.quantizers.job.heap import return_free_memory

# The grid and token count of gptqmodel, so that results are equal to its own.
_NUM_STEPS, _MOST_CLIPPED = 20, 0.5
_MOST_TOKENS = 512
# Bounds the memory of the products of a block, (G, T, O), for any width of the layer.
_ROWS_AT_ONCE = 256
Round = Callable[[Tensor, Tensor], Any]
"""Function that rounds the first tensor, (O, G, K), as it will be stored, into the second."""
Pack = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""Function that packs codes (K, O) and zeros (1, O) of a number of bits into words."""


@contextmanager
def mended_awq(device: str) -> Iterator[None]:
    """Patch gptqmodel's AWQ inside the block, as described in the module's docstring.

    Args:
        device: device of the job, where weights are packed.
    """
    from gptqmodel.looper.awq_processor import AWQProcessor
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization.awq.utils.packing_utils import pack_awq

    join = AWQProcessor._feature_kwargs_from_batch_indices
    run = AWQProcessor._iter_module_forward_outputs
    search = AWQProcessor._compute_best_scale

    def find_scale(self: Any, x: Tensor, *given: Any, **more: Any) -> tuple[Tensor, float]:
        if device != "cpu":
            try:
                return find_scales(self, x, *given, **more)
            except torch.OutOfMemoryError:
                # gptqmodel's own search, below, is slower but keeps its data in host memory.
                torch.cuda.empty_cache()
        return_free_memory()  # pieces of earlier tries are too small for a wider layer
        found: tuple[Tensor, float] = search(self, x, *given, **more)
        return found

    def find(self: Any, w: Tensor, input_feat: Tensor) -> Tensor:
        group = self.qcfg.group_size
        return find_clips(w, input_feat, group, self._pseudo_quantize_tensor_into)

    def pack_all(self: Any, linear: Any, scales: Tensor, zeros: Tensor, **rest: Any) -> None:
        del rest  # an order of the inputs, which AWQ does not use
        pack_by_groups(pack_awq, self, linear, scales.half(), zeros, device)

    def join_other(self: Any, batch_indices: list[int | None]) -> dict[str, Any]:
        found: dict[str, Any] = join(self, batch_indices)
        # One row per batch instead of one per block is wrong; without any, defaults are used.
        found.pop("position_ids", None)
        return found

    def run_kind(self: Any, x: Tensor, module: Any, *rest: Any) -> Iterator[Tensor]:
        rotary_on = partial(_find_rotary, self._get_rotary_for_device, module)
        # gptqmodel asks the processor, which does not know the layer, so bind the layer here.
        with replaced(self, "_get_rotary_for_device", rotary_on):
            yield from run(self, x, module, *rest)

    with (
        replaced(AWQProcessor, "_compute_best_clip", find),
        replaced(AWQProcessor, "_compute_best_scale", find_scale),
        replaced(AWQProcessor, "_iter_module_forward_outputs", run_kind),
        replaced(AwqTorchLinear, "pack", pack_all),
        replaced(AWQProcessor, "_feature_kwargs_from_batch_indices", join_other),
    ):
        yield


def pack_by_groups(
    pack: Pack, layer: Any, linear: Any, scales_OG: Tensor, zeros_OG: Tensor, device: str
) -> None:
    """Set the buffers of `AwqTorchLinear.pack` in `layer`, one group of inputs at a time.

    Args:
        pack: `pack_awq` of gptqmodel.
        layer: quantized layer, whose group size divides its inputs.
        linear: layer with the weights to round and pack, and perhaps a bias.
        scales_OG: scale of each group of each output.
        zeros_OG: integer that stands for zero in each group.
        device: device that computes; the buffers go to the device of the weights.
    """
    here = linear.weight.device
    scales_GO, zeros_GO = scales_OG.t().contiguous(), zeros_OG.t().contiguous()
    words, zero_words = [], []
    for weight_OK, *rounding in zip(
        linear.weight.data.split(layer.group_size, dim=1), scales_GO, zeros_GO, strict=True
    ):
        scale_O, zero_O = (value.to(device) for value in rounding)
        # The order of gptqmodel, since other orders round some weights to another code.
        steps_KO = (weight_OK.to(device).t() + zero_O * scale_O) / scale_O
        codes_KO = torch.round(steps_KO).to(torch.int32).contiguous()
        packed, packed_zeros = pack(codes_KO, zero_O[None].to(torch.int32), layer.bits)
        words.append(packed.to(here))
        zero_words.append(packed_zeros.to(here))
    layer.register_buffer("qweight", torch.cat(words))
    layer.register_buffer("qzeros", torch.cat(zero_words))
    layer.register_buffer("scales", scales_GO.clone())
    if linear.bias is None:
        layer.bias = None
    else:
        is_narrow = linear.bias.dtype in (torch.float16, torch.bfloat16)
        bias = linear.bias.clone().to(linear.bias.dtype if is_narrow else scales_GO.dtype)
        layer.register_buffer("bias", bias)


def _find_rotary(rotary_on: Callable[[Any], Any], attention: Any, device: Any) -> Any:
    """Return a layer's rotary embedding, bound to the layer's kind if it needs one (Gemma 3)."""
    rotary = rotary_on(device)
    if rotary is None or "layer_type" not in inspect.signature(rotary.forward).parameters:
        return rotary
    return partial(rotary, layer_type=attention.layer_type)


@torch.inference_mode()  # type: ignore[untyped-decorator, unused-ignore]
def find_scales(
    processor: Any,
    x: Tensor,
    w_mean: Tensor,
    x_mean: Tensor,
    module: Any,
    linears: Sequence[Any],
    wanted: Tensor | Sequence[Tensor],
    kwargs: dict[str, Any],
) -> tuple[Tensor, float]:
    """Return the best scale of each input (I,) and its mean squared error; weights are unchanged.

    Args:
        processor: AWQ processor of gptqmodel.
        x: inputs of `module`, on any device.
        w_mean: mean absolute weight for each input (I,).
        x_mean: mean absolute value of each input (I,).
        module: module whose outputs are compared.
        linears: linear layers of `module` whose inputs are scaled.
        wanted: outputs of `module` for `x` before quantizing, perhaps in chunks.
        kwargs: other arguments of `module`.

    Raises:
        torch.OutOfMemoryError: the device of the module lacks memory for it.

    Lin et al. 2023, arXiv:2306.00978; `_compute_best_scale` of gptqmodel 7.6, to the bit.
    """
    device = linears[0].weight.device
    x_mean, w_mean = x_mean.reshape(-1).to(device), w_mean.reshape(-1).to(device)
    hint = getattr(processor._scale_context, "prev_scale", None)
    if hint is not None:
        w_mean = w_mean * float(hint)
    # Every try rounds the weights in place, so the next one starts from a copy.
    kept = [linear.weight.clone() for linear in linears]
    best, least = None, float("inf")
    try:
        x = x.to(device)
        if isinstance(wanted, Tensor):
            wanted = wanted.to(device)
        else:
            wanted = [chunk.to(device) for chunk in wanted]
        for step in range(_NUM_STEPS):
            scale_I = _scale(x_mean, w_mean if processor.duo_scaling else None, step / _NUM_STEPS)
            for linear in linears:
                linear.weight.mul_(scale_I)
                processor._pseudo_quantize_tensor_into(linear.weight, linear.weight)
                linear.weight.div_(scale_I)
            error = _find_error(processor, x, module, wanted, kwargs)
            if error < least:
                best, least = scale_I, error
            for linear, weight in zip(linears, kept, strict=True):
                linear.weight.copy_(weight)
    except torch.OutOfMemoryError:
        for linear, weight in zip(linears, kept, strict=True):
            linear.weight.copy_(weight)
        raise
    # NaN is never smaller, so no step was better.
    if best is None:
        raise ValueError("the outputs of a layer are not finite")
    return best.cpu(), least


def _scale(x_mean_I: Tensor, w_mean_I: Tensor | None, ratio: float) -> Tensor:
    scale_I = x_mean_I.pow(ratio)
    if w_mean_I is not None:
        scale_I = scale_I / (w_mean_I.pow(1 - ratio) + 1e-4)
    scale_I = scale_I.clamp(min=1e-4)
    # Only ratios of scales matter; centering keeps the magnitude of weights.
    scale_I = scale_I / (scale_I.max() * scale_I.min()).sqrt()
    return scale_I.where(scale_I.isfinite(), 1.0)


def _find_error(
    processor: Any, x: Tensor, module: Any, wanted: Tensor | Sequence[Tensor], kwargs: Any
) -> float:
    """Return the mean squared difference of a module's outputs from the wanted ones."""
    total, count = torch.zeros((), dtype=torch.float64, device=x.device), 0
    for should, found in zip(
        processor._iter_reference_output_chunks(x, wanted),
        processor._iter_module_forward_outputs(x, module, kwargs),
        strict=False,
    ):
        # float16 outputs may overflow, and infinity would hide all other errors.
        bounds = torch.finfo(found.dtype)
        missed = (should.to(found.dtype) - found.clip(bounds.min, bounds.max)).float()
        total += missed.pow(2).sum()
        count += missed.numel()
    return float(total) / max(count, 1)


def find_clips(weight_OI: Tensor, inputs: Tensor, group: int, round_into: Round) -> Tensor:
    """Return the clipping bound of each group, (O, G, 1), in the type of the weights.

    Args:
        weight_OI: weights of a linear layer.
        inputs: inputs of any tokens, (..., I); about 512 of them are used, evenly spaced.
        group: number of weights that share a scale; divides I.
        round_into: rounding of gptqmodel.

    Lin et al. 2023, arXiv:2306.00978; `_compute_best_clip` of gptqmodel 7.6.
    """
    with torch.inference_mode():
        inputs_TI = inputs.reshape(-1, inputs.shape[-1])
        inputs_TI = inputs_TI[:: max(1, len(inputs_TI) // _MOST_TOKENS)].to(weight_OI.device)
        inputs_GTK = inputs_TI.unflatten(1, (-1, group)).transpose(0, 1).float()
        rows = weight_OI.unflatten(1, (-1, group)).split(_ROWS_AT_ONCE)
        return torch.cat([_find_in(rows_OGK, inputs_GTK, round_into) for rows_OGK in rows])


def _find_in(rows_OGK: Tensor, inputs_GTK: Tensor, round_into: Round) -> Tensor:
    most_OG1 = rows_OGK.abs().amax(-1, keepdim=True)
    # Groups are independent, since a bound changes only the products of its group.
    wanted_GTO = _multiply(inputs_GTK, rows_OGK)
    rounded_OGK = torch.empty_like(rows_OGK)
    best_OG1, least_OG1 = most_OG1, torch.full_like(most_OG1, float("inf"), dtype=torch.float32)
    for step in range(int(_MOST_CLIPPED * _NUM_STEPS)):
        bound_OG1 = most_OG1 * (1 - step / _NUM_STEPS)
        round_into(rows_OGK.clamp(-bound_OG1, bound_OG1), rounded_OGK)
        missed_GTO = _multiply(inputs_GTK, rounded_OGK).sub_(wanted_GTO)
        error_OG1 = missed_GTO.square_().mean(1).t().unsqueeze(-1)
        is_better_OG1 = error_OG1 < least_OG1
        least_OG1 = error_OG1.where(is_better_OG1, least_OG1)
        best_OG1 = bound_OG1.where(is_better_OG1, best_OG1)
    return best_OG1


def _multiply(inputs_GTK: Tensor, rows_OGK: Tensor) -> Tensor:
    """Return the products of each group (G, T, O), in float32."""
    return torch.bmm(inputs_GTK, rows_OGK.permute(1, 2, 0).float())
