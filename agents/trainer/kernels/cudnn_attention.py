"""Deterministic backward pass of causal attention by cuDNN, for Hopper cards.

PyTorch always calls cuDNN's nondeterministic backward pass, which accumulates the gradient of the
queries in an order that changes from call to call. The deterministic one stores partial gradients
and adds them in order, in scratch memory that grows with the square of the sequence length. The
work is therefore divided by sequences and heads until the scratch memory stays small.

PyTorch does not expose this variant, so it is called through NVIDIA's Python package. Without the
package, or for an unsupported card or shape, the caller falls back to FlashAttention, whose
deterministic backward pass is slower on Hopper.

Shape letters: H heads, K heads of keys and values, M tokens of the flat row, T of one sequence,
S sequences, D head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Limit of the scratch memory of one call.
MAX_SCRATCH_BYTES = 288 << 20
# Tokens per call. More do not use the card better.
_TOKENS_AT_ONCE = 4096
# Major compute capability.
_HOPPER = 9

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides (S, heads, T, D)."""


@dataclass(frozen=True, slots=True)
class _Program:
    graph: Any
    inputs: list[Any]
    outputs: list[Any]
    scratch_bytes: int


Build = Callable[[int, int], int | None]
"""Maps numbers of sequences and key heads to scratch bytes, or None if cuDNN refuses them."""


def differentiate(
    inputs: tuple[Tensor, ...], lse_HM: Tensor, length: int, scale: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the gradients of queries, keys and values (M, heads, D), bit-equal every time.

    Args:
        inputs: gradient, queries, keys, values, output (M, heads, D), in half precision.
        lse_HM: log-sum-exp of the scores, float32.
        length: common length of all sequences, in tokens.
        scale: factor of the scores.

    Returns:
        The gradients, or None if cuDNN has no deterministic form for this card or shape.
    """
    device = lse_HM.device
    if not _is_offered(device):
        return None
    views = [x.detach().unflatten(0, (-1, length)).transpose(1, 2) for x in inputs]
    num_sequences, num_heads = views[0].shape[:2]
    num_keys = views[2].shape[1]
    shared = num_heads // num_keys
    flat = [x.new_empty(x.shape) for x in inputs[1:4]]
    views += [x.unflatten(0, (-1, length)).transpose(1, 2) for x in flat]
    lse_SHT1 = lse_HM.detach().unflatten(1, (-1, length)).transpose(0, 1).unsqueeze(-1)
    views.insert(5, lse_SHT1.contiguous())
    # Heads of each view per key head. With grouped queries several query heads share one key head,
    # and a piece must hold all of them for complete gradients of keys and values.
    heads = (shared, shared, 1, 1, shared, shared, shared, 1, 1)

    def cut(first_sequence: int, sequences: int, first_key: int, keys: int) -> list[Tensor]:
        last = first_sequence + sequences
        return [
            view[first_sequence:last, first_key * n : (first_key + keys) * n]
            for view, n in zip(views, heads, strict=True)
        ]

    def prepare(piece: list[Tensor]) -> _Program | None:
        layouts = tuple((tuple(x.shape), tuple(x.stride())) for x in piece)
        return _build(device, piece[0].dtype, layouts, scale)

    def scratch(sequences: int, keys: int) -> int | None:
        program = prepare(cut(0, sequences, 0, keys))
        return program.scratch_bytes if program else None

    at_once = min(num_sequences, max(1, _TOKENS_AT_ONCE // length))
    size = divide(at_once, num_keys, scratch)
    if size is None:
        return None
    handle = _open(device)
    _library().set_stream(handle, torch.cuda.current_stream(device).cuda_stream)
    room: Tensor | None = None  # shared by all pieces, which run one after the other
    for first in range(0, num_sequences, size[0]):
        for key in range(0, num_keys, size[1]):
            piece = cut(first, min(size[0], num_sequences - first), key, size[1])
            program = prepare(piece)
            if program is None:
                return None
            if room is None or len(room) < program.scratch_bytes:
                room = torch.empty(program.scratch_bytes, dtype=torch.uint8, device=device)
            named = dict(zip([*program.inputs, *program.outputs], piece, strict=True))
            program.graph.execute(named, room, handle=handle)
    query, key_gradient, value = flat
    return query, key_gradient, value


def divide(sequences: int, keys: int, scratch: Build) -> tuple[int, int] | None:
    """Return how many sequences and key heads to process at once, or None if no size fits.

    Sequences are divided first. Heads are divided evenly, so that one program serves all pieces.

    >>> divide(2, 32, lambda sequences, keys: sequences * keys * (8 << 20))
    (1, 32)
    >>> divide(2, 6, lambda sequences, keys: sequences * keys * (200 << 20)) is None
    True
    """
    while True:
        found = scratch(sequences, keys)
        if found is None:
            return None
        if found <= MAX_SCRATCH_BYTES:
            return sequences, keys
        if sequences > 1:
            sequences = (sequences + 1) // 2
        elif keys % 2 == 0:
            keys //= 2
        else:
            return None


@functools.cache
def _library() -> Any:
    """Return NVIDIA's package, or None if it is not installed or finds no cuDNN."""
    try:
        import cudnn
    except (ImportError, OSError, RuntimeError, AssertionError):
        return None
    return cudnn


@functools.cache
def _is_offered(device: torch.device) -> bool:
    major, _ = torch.cuda.get_device_capability(device)
    return major == _HOPPER and _library() is not None and _open(device) is not None


@functools.cache
def _open(device: torch.device) -> Any:
    try:
        with torch.cuda.device(device):
            return _library().create_handle()
    except RuntimeError:
        return None


@functools.cache
def _build(
    device: torch.device, dtype: torch.dtype, layouts: tuple[Layout, ...], scale: float
) -> _Program | None:
    cudnn = _library()
    kind = cudnn.data_type.HALF if dtype is torch.float16 else cudnn.data_type.BFLOAT16
    graph = cudnn.pygraph(
        io_data_type=kind,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=_open(device),
    )
    names = ("gradient", "query", "key", "value", "out", "lse")
    inputs = {
        name: graph.tensor(
            name=name,
            dim=list(shape),
            stride=list(strides),
            data_type=cudnn.data_type.FLOAT if name == "lse" else kind,
        )
        for name, (shape, strides) in zip(names, layouts[:6], strict=True)
    }
    outputs = graph.sdpa_backward(
        name="attention",
        q=inputs["query"],
        k=inputs["key"],
        v=inputs["value"],
        o=inputs["out"],
        dO=inputs["gradient"],
        stats=inputs["lse"],
        attn_scale=scale,
        use_causal_mask=True,
        use_deterministic_algorithm=True,
    )
    for tensor, (shape, strides) in zip(outputs, layouts[6:], strict=True):
        tensor.set_output(True).set_dim(list(shape)).set_stride(list(strides))
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
    except (cudnn.cudnnGraphNotSupportedError, RuntimeError):
        return None
    return _Program(graph, list(inputs.values()), list(outputs), graph.get_workspace_size())
