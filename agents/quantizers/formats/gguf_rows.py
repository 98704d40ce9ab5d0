"""Make llama.cpp's converter write its tensors a few rows at a time.

Its tensors are lazy: their operations are known before anything is read. A written tensor is read,
widened to float32 and quantized as a whole, and each of these results stays in memory until it is
written: 8 bytes per weight, so 8 GiB for an embedding of 128,000 words and 8,192 features. The last
steps treat rows independently, so they are done here in pieces of the tensor: an unchanged tensor
is never in memory as a whole, since its file is mapped. Stacked experts are written one after the
other. Other changes, such as the order of rows in some projections, are still made with the whole
tensor in float32. The bytes are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

import torch

# Number of values that are widened and quantized at once: 16 MiB in float32.
_VALUES_AT_ONCE = 1 << 22


def write_by_rows() -> None:
    """Patch the converter; its packages `gguf` and `conversion` must be importable."""
    from conversion.base import LazyTorchTensor
    from gguf import LazyNumpyTensor, quants

    usual = quants.quantize

    def quantize(data: Any, kind: Any) -> Any:
        made = usual(data, kind)
        source = _find_torch(data, LazyTorchTensor) if isinstance(data, LazyNumpyTensor) else None
        if source is not None:
            made.tofile = partial(_write_stack, source, partial(usual, qtype=kind))
        return made

    quants.quantize = quantize


def _find_torch(data: Any, lazy: Any) -> Any:
    """Return the lazy PyTorch tensor that a lazy array merely wraps, or None."""
    source = data._args[0] if data._data is None and len(data._args) == 1 else None
    return source if isinstance(source, lazy) else None


def _is_widening(source: Any) -> bool:
    args = source._args
    return (
        source._data is None
        and len(args) == 2
        and isinstance(args[0], type(source))
        and args[1] is torch.float32
        and args[0].shape == source.shape
    )


def _write_stack(source: Any, quantize: Callable[[Any], Any], file: BinaryIO) -> None:
    parts = [source]
    # A stack of experts is not made: its parts follow each other in the file.
    if source._func is torch.stack and source._kwargs == {"dim": 0} and len(source._args) == 1:
        parts = source._args[0]
    for part in parts:
        _write(part, quantize, file)


def _write(source: Any, quantize: Callable[[Any], Any], file: BinaryIO) -> None:
    """Write the quantized values of a lazy PyTorch tensor (..., I) of float16 or float32."""
    # A final widening from another type is done piece by piece.
    inner = source._args[0] if _is_widening(source) else source
    tensor = type(source).to_eager(inner)
    rows_RI = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(1, -1)
    num_rows = max(1, _VALUES_AT_ONCE // max(1, rows_RI.shape[1]))
    for piece_RI in rows_RI.split(num_rows):
        quantize(piece_RI.to(source.dtype).numpy()).tofile(file)
