"""Encoding of features and gradients in messages: unchanged or in 8 bits.

In 8 bits each row is cut into blocks with a scale each, that of the block's largest value, so an
outlier costs precision only in its own block. Rounding is to nearest: equal features give equal
messages, also after a resume.

Shape letters: N rows of a message, H hidden features, W bytes of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Number of features that share a scale. A scale of 4 bytes is 6 % of the message.
_BLOCK = 64
_MOST = 127


class WireFormat:
    """Converts features (N, H) to messages and back.

    Args:
        width: number of hidden features H.
        dtype: type in which the stages compute.
        bits: bits of a feature on the wire: 16 sends the computed type, 8 rounds.
    """

    def __init__(self, width: int, dtype: torch.dtype, bits: int = 16) -> None:
        self._width = width
        self._dtype = dtype
        self._bits = bits
        self._num_blocks = -(-width // _BLOCK)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of a message."""
        if self._bits == 8:
            return self._num_blocks * (_BLOCK + 4)
        return self._width * self._dtype.itemsize

    @property
    def rounds(self) -> bool:
        """True if the message loses precision."""
        return self._bits == 8

    def measure_error(self, hidden_NH: Tensor, message: Tensor) -> float:
        """Return the root mean square of the rounding error, relative to the features."""
        exact_NH = hidden_NH.float()
        lost_NH = self.decode(message).float() - exact_NH
        # Relative to at least 1e-30: features may all be zero.
        return float(lost_NH.norm() / exact_NH.norm().clamp(min=1e-30))

    def make_buffer(self, num_rows: int, *, is_pinned: bool = False) -> Tensor:
        """Return host memory for a message of `num_rows` rows.

        Raises:
            RuntimeError: the system cannot pin more memory.
        """
        width, dtype = self._width, self._dtype
        if self._bits == 8:
            width, dtype = self.row_bytes, torch.uint8
        return torch.empty(num_rows, width, dtype=dtype, pin_memory=is_pinned)

    def encode(self, hidden_NH: Tensor) -> Tensor:
        """Return the message of these features."""
        if self._bits != 8:
            return hidden_NH.to(self._dtype).contiguous()
        more = self._num_blocks * _BLOCK - self._width
        padded = torch.nn.functional.pad(hidden_NH.float(), (0, more))
        blocks_NBK = padded.view(len(hidden_NH), self._num_blocks, _BLOCK)
        scale_NB1 = blocks_NBK.abs().amax(-1, keepdim=True) / _MOST
        rounded = (blocks_NBK / scale_NB1.clamp(min=1e-30)).round().to(torch.int8)
        values_NW = rounded.view(torch.uint8).flatten(1)
        scales_NW = scale_NB1.flatten(1).contiguous().view(torch.uint8)
        return torch.cat((values_NW, scales_NW), dim=1)

    def decode(self, message: Tensor) -> Tensor:
        """Return the features (N, H) of a message."""
        if self._bits != 8:
            return message
        cut = self._num_blocks * _BLOCK
        values_NBK = message[:, :cut].contiguous().view(torch.int8).float()
        values_NBK = values_NBK.view(len(message), self._num_blocks, _BLOCK)
        scale_NB = message[:, cut:].contiguous().view(torch.float32)
        hidden = (values_NBK * scale_NB[..., None]).flatten(1)[:, : self._width]
        return hidden.to(self._dtype)
