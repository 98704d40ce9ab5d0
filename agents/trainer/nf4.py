"""Products with 4-bit weights: the whole matrix is unpacked by one kernel, then multiplied.

bitsandbytes unpacks the constants of the blocks first, then the weights, with three more launches;
the kernel here does both at once at the speed of the memory. The numbers are the same to the bit:
NormalFloat-4 values times the constants of blocks of 64, which are 8-bit values times those of
groups of 256 blocks, plus one offset (QLoRA, Dettmers et al. 2023, arXiv:2305.14314, section 3).

Layers keep their class's parameters as they were; only `forward` is another. On a CPU, and without
Triton, nothing is replaced.

Shape letters: M tokens, O outputs, I inputs of the layer.
"""

# ruff: noqa: ANN001, ANN202 - Triton itself finds the types of a kernel's parameters

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

try:
    import triton  # type: ignore[import-not-found, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
except ImportError:  # torch for CPUs comes without
    triton = None

_BYTES_AT_ONCE = 2048
_way = {"whole": False}


def compute_whole(whole: bool) -> None:
    """Choose how the products of the next layer are put before the compiler.

    Whole, as one operation: what a layer needs that recomputes, because the compiler would keep
    every product that it sees the inside of. Otherwise in parts, which start a third sooner.
    """
    _way["whole"] = whole


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _unpack_kernel(  # type: ignore[no-untyped-def, unused-ignore]
        packed, scale8, code, group, offset, values, out, num_blocks,
        block_bytes: tl.constexpr, group_blocks: tl.constexpr, size: tl.constexpr,
    ):  # fmt: skip
        block = tl.program_id(0) * size + tl.arange(0, size)
        inside = block < num_blocks
        index = tl.load(scale8 + block, mask=inside, other=0).to(tl.int32)
        scale = tl.load(group + block // group_blocks, mask=inside, other=0.0)
        scale = (tl.load(code + index) * scale + tl.load(offset))[:, None]
        place = block[:, None] * block_bytes + tl.arange(0, block_bytes)[None, :]
        pair = tl.load(packed + place, mask=inside[:, None], other=0).to(tl.int32)
        first = tl.load(values + (pair >> 4)) * scale
        second = tl.load(values + (pair & 15)) * scale
        both = tl.interleave(first, second).to(out.dtype.element_ty)
        target = block[:, None] * (2 * block_bytes) + tl.arange(0, 2 * block_bytes)[None, :]
        tl.store(out + target, both, mask=inside[:, None])

    @torch.library.triton_op("rackless::nf4_unpack", mutates_args=())  # type: ignore[untyped-decorator, unused-ignore]
    def _unpack(
        packed: Tensor,
        scale8: Tensor,
        code: Tensor,
        group: Tensor,
        offset: Tensor,
        values: Tensor,
        group_blocks: int,
        num_outputs: int,
        num_inputs: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the weights (O, I)."""
        weight_OI = torch.empty(num_outputs, num_inputs, dtype=dtype, device=packed.device)
        num_blocks = scale8.numel()
        block_bytes = packed.numel() // num_blocks
        size = max(1, _BYTES_AT_ONCE // block_bytes)
        grid = (triton.cdiv(num_blocks, size),)
        torch.library.wrap_triton(_unpack_kernel)[grid](
            packed, scale8, code, group, offset, values, weight_OI, num_blocks,
            block_bytes=block_bytes, group_blocks=group_blocks, size=size,
        )  # fmt: skip
        return weight_OI


@torch.library.custom_op("rackless::nf4_product", mutates_args=())  # type: ignore[untyped-decorator]
def _product(x_MI: Tensor, state: list[Tensor], sizes: list[int], is_transposed: bool) -> Tensor:
    """Return x @ W.T, or x @ W, in one operation that the compiler does not look into."""
    weight_OI = _unpack(*state, *sizes, x_MI.dtype)
    return x_MI @ (weight_OI if is_transposed else weight_OI.T)


@_product.register_fake  # type: ignore[untyped-decorator]
def _product_shape(
    x_MI: Tensor, state: list[Tensor], sizes: list[int], is_transposed: bool
) -> Tensor:
    _, num_outputs, num_inputs = sizes
    return x_MI.new_empty((x_MI.shape[0], num_inputs if is_transposed else num_outputs))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, state, ctx.sizes, ctx.is_transposed = inputs
    ctx.save_for_backward(*state)


def _differentiate(ctx: Any, gradient_MO: Tensor) -> tuple[Any, ...]:
    state = list(ctx.saved_tensors)
    gradient_MI = _product(gradient_MO, state, ctx.sizes, not ctx.is_transposed)
    return gradient_MI, [None] * len(state), None, None


_product.register_autograd(_differentiate, setup_context=_keep)


class _Product(torch.autograd.Function):
    """x @ W.T, with the weights unpacked again for the backward pass instead of kept."""

    @staticmethod
    def forward(ctx: Any, x_MI: Tensor, sizes: tuple[int, int, int], *state: Tensor) -> Tensor:
        ctx.save_for_backward(*state)
        ctx.sizes, ctx.dtype = sizes, x_MI.dtype
        return x_MI @ _unpack(*state, *sizes, x_MI.dtype).T

    @staticmethod
    def backward(ctx: Any, gradient_MO: Tensor) -> Any:
        weight_OI = _unpack(*ctx.saved_tensors, *ctx.sizes, ctx.dtype)
        return (gradient_MO @ weight_OI, None, *[None] * len(ctx.saved_tensors))


def unpack(layer: Any) -> Tensor:
    """Return the weights (O, I) of a layer that `install` has changed."""
    names = ("packed", "scale8", "code", "group", "offset", "values")
    state = [getattr(layer, f"nf4_{name}") for name in names]
    sizes = (layer.nf4_group_blocks, layer.out_features, layer.in_features)
    return _unpack(*state, *sizes, layer.nf4_dtype)


class _FastForward:
    """Mixed in before the class of a 4-bit linear layer."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """Return the layer's output for x (..., I)."""
        state = (
            self.nf4_packed, self.nf4_scale8, self.nf4_code, self.nf4_group, self.nf4_offset,
            self.nf4_values,
        )  # fmt: skip
        flat_MI = x.to(self.nf4_dtype).flatten(0, -2)
        sizes = (self.nf4_group_blocks, self.out_features, self.in_features)
        if _way["whole"]:
            y_MO = _product(flat_MI, list(state), list(sizes), False)
        else:
            y_MO = _Product.apply(flat_MI, sizes, *state)
        if self.bias is not None:
            y_MO = y_MO + self.bias.to(y_MO.dtype)
        return y_MO.reshape(*x.shape[:-1], self.out_features).to(x.dtype)


def install(model: nn.Module) -> int:
    """Let the 4-bit layers of a model on a GPU use the kernel; return how many do now."""
    count = 0
    for module in model.modules():
        if triton is None or not type(module).__module__.startswith("bitsandbytes."):
            continue  # an adapter around such a layer has a weight of this kind, too
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is None or not _can_do(module, state):
            continue
        parts = {
            "packed": module.weight.data.view(-1),
            "scale8": state.absmax,
            "code": state.state2.code,
            "group": state.state2.absmax,
            "offset": state.offset,
            "values": state.code,
        }
        for name, tensor in parts.items():
            module.register_buffer(f"nf4_{name}", tensor, persistent=False)
        module.nf4_dtype, module.nf4_group_blocks = state.dtype, state.state2.blocksize
        kind = type(module)
        module.__class__ = _subclass(kind)
        count += 1
    return count


_subclasses: dict[type, type] = {}


def _subclass(kind: type) -> type:
    if kind not in _subclasses:
        _subclasses[kind] = type(kind.__name__, (_FastForward, kind), {})
    return _subclasses[kind]


def _can_do(module: Any, state: Any) -> bool:
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
