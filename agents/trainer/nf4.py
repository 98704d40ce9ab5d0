"""4-bit weights are unpacked by one kernel, a whole matrix at a time.

bitsandbytes unpacks the constants of the blocks first, then the weights, with three more launches;
the kernel here does both at once at the speed of the memory. The numbers are the same to the bit:
NormalFloat-4 values times the constants of blocks of 64, which are 8-bit values times those of
groups of 256 blocks, plus one offset (QLoRA, Dettmers et al. 2023, arXiv:2305.14314, section 3).

Layers keep their class's parameters as they were; `joined` multiplies with what is unpacked. On a
CPU, and without Triton, nothing is done.

Shape letters: O outputs, I inputs of the layer.
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

_PARTS = ("packed", "scale8", "code", "group", "offset", "values")
NUM_PARTS = len(_PARTS)
"""Tensors that a layer's weights consist of."""
_BYTES_AT_ONCE = 2048

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


def is_packed(layer: nn.Module) -> bool:
    """Tell whether `install` has seen these weights."""
    return hasattr(layer, "nf4_packed")


def read_parts(layer: nn.Module) -> list[Tensor]:
    """Return what the weights of such a layer consist of."""
    return [getattr(layer, f"nf4_{name}") for name in _PARTS]


_whole: dict[int, tuple[Tensor, Tensor]] = {}
"""What is packed and the same unpacked, by the address of the former: an operation gets tensors,
not layers. What is here keeps its address."""


def keep_whole(layer: Any) -> None:
    """Keep the weights of such a layer unpacked as well, until `let_go`."""
    _whole[layer.nf4_packed.data_ptr()] = layer.nf4_packed, unpack(layer)


def let_go(layer: Any) -> None:
    """Keep the weights of such a layer packed only."""
    _whole.pop(layer.nf4_packed.data_ptr(), None)


def find_whole(parts: list[Tensor]) -> Tensor | None:
    """Return the weights (O, I) that `read_parts` returned packed, if they are kept unpacked."""
    found = _whole.get(parts[0].data_ptr())
    return found[1] if found else None


def count_bytes(layer: Any) -> int:
    """Return what the weights of such a layer take unpacked."""
    return int(layer.out_features * layer.in_features * layer.nf4_dtype.itemsize)


def unpack(layer: Any) -> Tensor:
    """Return the weights (O, I) of such a layer."""
    device = layer.nf4_packed.device
    size = (layer.out_features, layer.in_features)
    weight_OI = torch.empty(size, dtype=layer.nf4_dtype, device=device)
    unpack_into(weight_OI, read_parts(layer), layer.nf4_group_blocks)
    return weight_OI


def unpack_into(weight_OI: Tensor, parts: list[Tensor], group_blocks: int) -> None:
    """Fill the rows of a matrix with what `read_parts` returned; groups are of so many blocks."""
    packed, scale8, code, group, offset, values = parts
    num_blocks = scale8.numel()
    block_bytes = packed.numel() // num_blocks
    size = max(1, _BYTES_AT_ONCE // block_bytes)
    _unpack_kernel[(triton.cdiv(num_blocks, size),)](
        packed, scale8, code, group, offset, values, weight_OI, num_blocks,
        block_bytes=block_bytes, group_blocks=group_blocks, size=size,
    )  # fmt: skip


def install(model: nn.Module) -> int:
    """Get the 4-bit layers of a model on a GPU ready for the kernel; return how many are."""
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
        count += 1
    return count


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
