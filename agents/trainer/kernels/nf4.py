"""Dequantize NF4 weights with one kernel, a whole matrix at a time.

bitsandbytes dequantizes the block constants first and then the weights, with three more launches;
this kernel does both in one pass at memory speed. The result is bit-equal: NormalFloat-4 values
times the constants of blocks of 64, which are 8-bit values times the constants of groups of 256
blocks, plus one offset (QLoRA, Dettmers et al. 2023, arXiv:2305.14314, section 3).

`fused_linear` multiplies with the dequantized weights. Layers keep their parameters. While a
layer's weights are kept dequantized, the memory of the packed ones may be released; they are
restored bit-equal from the dequantized weights. Does nothing on a CPU or without Triton.

Shape letters: O outputs, I inputs of the layer.
"""

# ruff: noqa: ANN001, ANN202 - Triton itself finds the types of a kernel's parameters

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

try:
    import triton  # type: ignore[import-not-found, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
except ImportError:  # torch for CPUs comes without it
    triton = None

# Tensors of a layer's weights, in the order of the kernels' parameters.
_PARTS = ("packed", "scale8", "code", "group", "offset", "values")
# Number of packed bytes that one program processes.
_BYTES_AT_ONCE = 2048

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _read_scale(  # type: ignore[no-untyped-def, unused-ignore]
        scale8, code, group, offset, block, inside, group_blocks: tl.constexpr
    ):
        """Return the constants of some blocks, as a column."""
        index = tl.load(scale8 + block, mask=inside, other=0).to(tl.int32)
        scale = tl.load(group + block // group_blocks, mask=inside, other=0.0)
        return (tl.load(code + index) * scale + tl.load(offset))[:, None]

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _dequantize_kernel(  # type: ignore[no-untyped-def, unused-ignore]
        packed, scale8, code, group, offset, values, out, num_blocks,
        block_bytes: tl.constexpr, group_blocks: tl.constexpr, size: tl.constexpr,
    ):  # fmt: skip
        block = tl.program_id(0) * size + tl.arange(0, size)
        inside = block < num_blocks
        scale = _read_scale(scale8, code, group, offset, block, inside, group_blocks)
        place = block[:, None] * block_bytes + tl.arange(0, block_bytes)[None, :]
        pair = tl.load(packed + place, mask=inside[:, None], other=0).to(tl.int32)
        first = tl.load(values + (pair >> 4)) * scale
        second = tl.load(values + (pair & 15)) * scale
        both = tl.interleave(first, second).to(out.dtype.element_ty)
        target = block[:, None] * (2 * block_bytes) + tl.arange(0, 2 * block_bytes)[None, :]
        tl.store(out + target, both, mask=inside[:, None])

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _repack_kernel(  # type: ignore[no-untyped-def, unused-ignore]
        packed, scale8, code, group, offset, values, whole, num_blocks,
        block_bytes: tl.constexpr, group_blocks: tl.constexpr, size: tl.constexpr,
    ):  # fmt: skip
        """Invert `_dequantize_kernel`: find the 4-bit code that dequantizes to each value.

        Exact, because the 16 values of one block differ after rounding.
        """
        block = tl.program_id(0) * size + tl.arange(0, size)
        inside = block < num_blocks
        scale = _read_scale(scale8, code, group, offset, block, inside, group_blocks)
        place = block[:, None] * block_bytes + tl.arange(0, block_bytes)[None, :]
        first = tl.load(whole + 2 * place, mask=inside[:, None], other=0.0)
        second = tl.load(whole + 2 * place + 1, mask=inside[:, None], other=0.0)
        pair = tl.zeros([size, block_bytes], tl.int32)
        for number in range(16):
            value = (tl.load(values + number) * scale).to(whole.dtype.element_ty)
            pair = tl.where(first == value, (pair & 15) | (number << 4), pair)
            pair = tl.where(second == value, (pair & 240) | number, pair)
        tl.store(packed + place, pair.to(tl.uint8), mask=inside[:, None])


def is_registered(layer: nn.Module) -> bool:
    """Return whether `register` has prepared this layer."""
    return hasattr(layer, "nf4_packed")


# Layers by the address of their handle. A custom operator takes tensors, not modules, and the
# address identifies the layer without a copy; the tensor is never reallocated.
_layers: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()


def get_handle(layer: Any) -> Tensor:
    """Return a tensor that identifies the layer to an operator that takes only tensors."""
    handle: Tensor = layer.nf4_scale8
    return handle


def read_weights(handle: Tensor) -> Tensor:
    """Return the dequantized weights (O, I) of the layer with this handle."""
    layer: Any = _layers[handle.data_ptr()]
    return dequantize(layer) if layer.nf4_dequantized is None else layer.nf4_dequantized


def set_sole_reader(layer: Any, *, is_alone: bool) -> None:
    """Set whether `read_weights` is the only code that reads this layer's weights.

    Otherwise the packed weights stay in memory, for PEFT's own forward pass of other adapters.
    """
    packed = layer.nf4_packed
    layer.nf4_has_sole_reader = is_alone and packed.untyped_storage().nbytes() == packed.nbytes


def keep_dequantized(layer: Any) -> None:
    """Keep the layer's weights dequantized until `repack`.

    Releases the memory of the packed weights if `read_weights` is their only reader.
    """
    layer.nf4_dequantized = dequantize(layer)
    if layer.nf4_has_sole_reader:
        layer.nf4_packed.untyped_storage().resize_(0)


def allocate_repack_buffer(layers: Iterable[Any]) -> Tensor | None:
    """Return memory for the packed weights of any one of these layers, or None without layers.

    Reserved in advance: repacking runs when memory is short, and must not fail then.
    """
    largest = max(
        (layer.nf4_packed for layer in layers), key=lambda part: part.nbytes, default=None
    )
    return None if largest is None else torch.empty_like(largest)


def repack(layer: Any) -> None:
    """Drop the layer's dequantized weights; the packed ones are restored bit-equal."""
    packed = layer.nf4_packed
    if not packed.untyped_storage().nbytes():
        packed.untyped_storage().resize_(packed.nbytes)
        _launch(_repack_kernel, layer, layer.nf4_dequantized)
    layer.nf4_dequantized = None


def count_extra_bytes(layer: Any) -> int:
    """Return the additional bytes of the layer with dequantized weights."""
    whole_bytes = layer.out_features * layer.in_features * layer.nf4_dtype.itemsize
    return int(whole_bytes - (layer.nf4_packed.nbytes if layer.nf4_has_sole_reader else 0))


def dequantize(layer: Any) -> Tensor:
    """Return the layer's weights (O, I), computed from the packed ones."""
    size = (layer.out_features, layer.in_features)
    weight_OI = torch.empty(size, dtype=layer.nf4_dtype, device=layer.nf4_scale8.device)
    _launch(_dequantize_kernel, layer, weight_OI)
    return weight_OI


def dequantize_parts(
    parts: Sequence[Tensor], size: Sequence[int], dtype: torch.dtype, group_blocks: int
) -> Tensor:
    """Return weights of any shape from the tensors of `split_state`.

    Args:
        parts: packed weights, 8-bit constants, their code, constants of groups, offset, NF4 values.
        size: shape of the weights.
        dtype: their type.
        group_blocks: number of blocks that share the constant of a group.
    """
    packed, scale8, *_ = parts
    if triton is not None and packed.is_cuda and packed.numel() % scale8.numel() == 0:
        weights = torch.empty(*size, dtype=dtype, device=packed.device)
        _launch_parts(_dequantize_kernel, parts, weights, group_blocks)
        return weights
    return _dequantize_by_library(parts, size, dtype, group_blocks)


def _dequantize_by_library(
    parts: Sequence[Tensor], size: Sequence[int], dtype: torch.dtype, group_blocks: int
) -> Tensor:
    from bitsandbytes import functional

    packed, scale8, code, group, offset, values = parts
    shape = torch.Size(size)
    nested = functional.QuantState(
        absmax=group, code=code, blocksize=group_blocks, dtype=torch.float32
    )
    state = functional.QuantState(
        absmax=scale8, shape=shape, code=values, quant_type="nf4", dtype=dtype,
        blocksize=2 * -(-packed.numel() // scale8.numel()), offset=offset, state2=nested,
    )  # fmt: skip
    weights: Tensor = functional.dequantize_4bit(packed.view(-1, 1), state)
    return weights.reshape(shape)


def split_state(packed: Tensor, state: Any) -> tuple[Tensor, ...]:
    """Return the tensors of a bitsandbytes `QuantState` in the order of `dequantize_parts`."""
    nested = state.state2
    return (packed.view(-1), state.absmax, nested.code, nested.absmax, state.offset, state.code)


def _launch(kernel: Any, layer: Any, weight_OI: Tensor) -> None:
    """Launch a kernel over all blocks of a layer's weights."""
    parts = [getattr(layer, f"nf4_{name}") for name in _PARTS]
    _launch_parts(kernel, parts, weight_OI, layer.nf4_group_blocks)


def _launch_parts(kernel: Any, parts: Sequence[Tensor], weights: Tensor, group_blocks: int) -> None:
    packed, scale8, *_ = parts
    num_blocks = scale8.numel()
    block_bytes = packed.numel() // num_blocks
    size = max(1, _BYTES_AT_ONCE // block_bytes)
    kernel[(triton.cdiv(num_blocks, size),)](
        *parts, weights, num_blocks,
        block_bytes=block_bytes, group_blocks=group_blocks, size=size,
    )  # fmt: skip


def register(model: nn.Module) -> int:
    """Prepare the NF4 layers of a model on a GPU for the kernel; return their number."""
    count = 0
    for module in model.modules():
        if triton is None or not type(module).__module__.startswith("bitsandbytes."):
            continue  # a LoRA layer forwards `weight` of its base layer
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is None or not _supports(module, state):
            continue
        _prepare(module)
        count += 1
    return count


def refresh(layer: nn.Module) -> None:
    """Point the kernel to the current tensors of the layer's weights; see `register`.

    Layers that take turns in one place share a handle. They have equal shapes, and the place holds
    the weights of the computing one.
    """
    if is_registered(layer):
        _prepare(layer)


def _prepare(layer: Any) -> None:
    state = layer.weight.quant_state
    for name, tensor in zip(_PARTS, split_state(layer.weight.data, state), strict=True):
        layer.register_buffer(f"nf4_{name}", tensor, persistent=False)
    layer.nf4_dtype, layer.nf4_group_blocks = state.dtype, state.state2.blocksize
    layer.nf4_dequantized, layer.nf4_has_sole_reader = None, False
    _layers[state.absmax.data_ptr()] = layer


def _supports(module: Any, state: Any) -> bool:
    weight = module.weight
    return bool(
        weight.is_cuda
        and state.quant_type == "nf4"
        and state.nested
        and state.dtype in (torch.bfloat16, torch.float16)
        and tuple(state.shape) == (module.out_features, module.in_features)
        and weight.numel() * 2 == module.out_features * module.in_features
        and weight.numel() % state.absmax.numel() == 0
    )
