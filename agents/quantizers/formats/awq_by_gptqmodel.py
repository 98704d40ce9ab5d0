"""What gptqmodel 7.6 does of AWQ otherwise here: how scales and clippings are tried, and positions.

AWQ tries twenty scales for each set of layers, by what the set makes of all calibration texts.
gptqmodel keeps what goes in, what should come out and the weights in host memory meanwhile, and
copies all of it to the GPU for every one of them: 54 GB for a layer of a 7B and 28,000 tokens. Here
it stays on the GPU where there is room; the sums are the same.

AWQ clips each group of weights where that brings its products with the inputs of 512 tokens nearer
to what they were. gptqmodel, as AutoAWQ before it, keeps every single product of a weight with an
input for that, 512 times the weights, ten times over: the memory decides how long it takes, and a
wide layer of a 7B model needs 3 GB for it. The same sums are products of matrices.

The result's scales are float16, as the classic layout has them; gptqmodel writes them in the
model's own type, and takes no layers back then that an earlier job has kept. It packs a whole layer
at once, on the processor, column by column and in 64-bit words: 1.1 GB for the widest of a 7B, and
several are packed side by side. One group of inputs after the other gives the same words, with
0.03 GB, and on the GPU of the job where there is one.

Texts come in blocks of one length (`texts.split_blocks`). Of each batch of them gptqmodel keeps one
row of positions and joins those rows, which are as many as batches then and not as blocks; where a
layer's attention takes positions (StableLM, Ministral 3), its search fails. Left without, it takes
those of one batch for all. A model that turns queries and keys of some layers otherwise than those
of others (Gemma 3) is asked with the kind of the layer, which gptqmodel leaves out.

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

_NUM_STEPS, _MOST_CLIPPED = 20, 0.5
_MOST_TOKENS = 512
_ROWS_AT_ONCE = 256
Round = Callable[[Tensor, Tensor], Any]
"""Writes the first tensor, (O, G, K), rounded as it will be stored, to the second."""
Pack = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""Returns the words of codes (K, O) and of zeros (1, O), of so many bits each."""


@contextmanager
def mended_awq(device: str) -> Iterator[None]:
    """Let gptqmodel try clippings by products, write scales in float16, and join no positions.

    Args:
        device: of the job, where weights are packed.
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
                torch.cuda.empty_cache()
        found: tuple[Tensor, float] = search(self, x, *given, **more)
        return found

    def find(self: Any, w: Tensor, input_feat: Tensor) -> Tensor:
        group = self.qcfg.group_size
        return find_clips(w, input_feat, group, self._pseudo_quantize_tensor_into)

    def pack_all(self: Any, linear: Any, scales: Tensor, zeros: Tensor, **rest: Any) -> None:
        del rest  # an order of the inputs, which AWQ has not
        pack_by_groups(pack_awq, self, linear, scales.half(), zeros, device)

    def join_other(self: Any, batch_indices: list[int | None]) -> dict[str, Any]:
        found: dict[str, Any] = join(self, batch_indices)
        found.pop("position_ids", None)
        return found

    def run_kind(self: Any, x: Tensor, module: Any, *rest: Any) -> Iterator[Tensor]:
        rotary_on = partial(_find_rotary, self._get_rotary_for_device, module)
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
    """Give `layer` the buffers that `AwqTorchLinear.pack` makes, for one group of inputs at a time.

    Args:
        pack: `pack_awq` of gptqmodel.
        layer: its group size divides its inputs.
        linear: with the weights to round and pack, and perhaps a bias.
        scales_OG: of each group of each output.
        zeros_OG: the integer that stands for zero there.
        device: where this is computed; the buffers come to the weights.
    """
    here = linear.weight.device
    scales_GO, zeros_GO = scales_OG.t().contiguous(), zeros_OG.t().contiguous()
    words, zero_words = [], []
    for weight_OK, *rounding in zip(
        linear.weight.data.split(layer.group_size, dim=1), scales_GO, zeros_GO, strict=True
    ):
        scale_O, zero_O = (value.to(device) for value in rounding)
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
    """Return what turns queries and keys of a layer, which may be of several kinds (Gemma 3)."""
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
    """Return the best scale of each input (I,), and its mean squared error; weights stay as before.

    Args:
        processor: gptqmodel's.
        x: what goes into `module`, wherever it is.
        w_mean: of the weights' sizes for each input (I,).
        x_mean: of the sizes of each input (I,).
        module: that is asked for its outputs.
        linears: of `module`, whose inputs are scaled.
        wanted: outputs for `x`, perhaps in chunks.
        kwargs: of `module`.

    Raises:
        torch.OutOfMemoryError: there is no room for all of it where the module is.

    Lin et al. 2023, arXiv:2306.00978; `_compute_best_scale` of gptqmodel 7.6, to the bit.
    """
    device = linears[0].weight.device
    x_mean, w_mean = x_mean.reshape(-1).to(device), w_mean.reshape(-1).to(device)
    hint = getattr(processor._scale_context, "prev_scale", None)
    if hint is not None:
        w_mean = w_mean * float(hint)
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
    if best is None:
        raise ValueError("the outputs of a layer are not finite")
    return best.cpu(), least


def _scale(x_mean_I: Tensor, w_mean_I: Tensor | None, ratio: float) -> Tensor:
    scale_I = x_mean_I.pow(ratio)
    if w_mean_I is not None:
        scale_I = scale_I / (w_mean_I.pow(1 - ratio) + 1e-4)
    scale_I = scale_I.clamp(min=1e-4)
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
        bounds = torch.finfo(found.dtype)
        missed = (should.to(found.dtype) - found.clip(bounds.min, bounds.max)).float()
        total += missed.pow(2).sum()
        count += missed.numel()
    return float(total) / max(count, 1)


def find_clips(weight_OI: Tensor, inputs: Tensor, group: int, round_into: Round) -> Tensor:
    """Return for each group the largest weight that is kept, (O, G, 1), in the weights' own type.

    Args:
        weight_OI: of a linear layer.
        inputs: of any tokens, (..., I); of more than 512 about that many are taken, evenly.
        group: weights that share a scale; divides I.
        round_into: as gptqmodel rounds.

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
