"""Counter-based dropout: masks depend only on the example, the step and the layer.

Ordinary dropout draws from one random stream per process, so its masks change with the number of
ranks and with a resume. Here each element of a mask is a hash of its example's place in the global
order, its token, its layer and its feature. The result is the same on one GPU or on seven different
ones, for any split of the batch, after any resume, and when activations are recomputed.

A seeded generator per row would not suffice: CUDA generators return different numbers on GPUs with
different numbers of multiprocessors. One 32-bit hash decides two features. Its shift is arithmetic,
which costs one bit of the hash before the multiplication spreads the others.

Shape letters: B rows of the micro-batch (one, flat), T its tokens, F features, H half the features
(rounded up).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from agents.errors import ExpectedError

# 0x85EBCA6B, the first multiplier of MurmurHash3's finalizer, as a signed 32-bit integer.
_MULTIPLIER = -2048144789
# Number of values of the 16 bits that decide one feature.
_LANES = 1 << 16
_WORD = 1 << 64


class DropoutClock:
    """Keys of the current micro-batch's tokens, for every `CountedDropout` of a model."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.tokens_BT1: Tensor | None = None
        """Odd random integer of each token of the micro-batch, int32; None disables dropout."""

    def set(
        self,
        positions: Sequence[int],
        lengths: Sequence[int],
        num_tokens: int,
        device: torch.device,
    ) -> None:
        """Set the keys for the next flat row from the places of its examples in the global order.

        A place identifies both the step and the example, because the order is a pure function.

        Args:
            positions: place of each example in the global order.
            lengths: number of tokens of each example.
            num_tokens: number of tokens of the flat row, with padding.
            device: device of the masks.
        """
        keys = np.ones(num_tokens, dtype=np.int32)
        stop = 0
        for position, length in zip(positions, lengths, strict=True):
            start, stop = stop, stop + length
            keys[start:stop] = _draw(self._seed, position, length)
        host = torch.from_numpy(keys)
        if device.type == "cuda":
            host = host.pin_memory()
        self.tokens_BT1 = host.to(device, non_blocking=True).reshape(1, -1, 1)

    def clear(self) -> None:
        """Disable dropout."""
        self.tokens_BT1 = None

    @contextmanager
    def limited_to(self, start: int, stop: int) -> Iterator[None]:
        """Limit the keys to these tokens of the flat row inside the block."""
        seen_BT1 = None if self.tokens_BT1 is None else self.tokens_BT1[:, start:stop]
        with self._showing(seen_BT1):
            yield

    def repeated(self) -> AbstractContextManager[None]:
        """Return a context that restores the current keys, for a recomputation."""
        return self._showing(self.tokens_BT1)

    @contextmanager
    def _showing(self, tokens_BT1: Tensor | None) -> Iterator[None]:
        kept, self.tokens_BT1 = self.tokens_BT1, tokens_BT1
        try:
            yield
        finally:
            self.tokens_BT1 = kept


class CountedDropout(nn.Module):
    """Replaces the `nn.Dropout` of one adapter layer."""

    def __init__(self, probability: float, name: str, features: int, clock: DropoutClock) -> None:
        super().__init__()
        threshold = min(round(probability * _LANES), _LANES - 1)
        self._features = features
        self._name = name
        self._clock = clock
        self._threshold = threshold - _LANES // 2
        self._scale = _LANES / (_LANES - threshold)
        features_H = _draw_name(name, (features + 1) // 2)
        self.register_buffer("features_H", torch.from_numpy(features_H), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` (B, T, F) with some elements zeroed and the rest scaled up."""
        tokens_BT1 = self._clock.tokens_BT1
        if tokens_BT1 is None:
            return x
        if x.shape[:-1] != tokens_BT1.shape[:-1]:
            tokens_BT1 = self._match(tokens_BT1, x)
        hash_BTH = tokens_BT1 * self.features_H
        hash_BTH = (hash_BTH ^ (hash_BTH >> 15)) * _MULTIPLIER
        # Each half of the hash is one feature's uniform value; an odd number of features leaves the
        # last half unused.
        lanes_BTF = hash_BTH.view(torch.int16)[..., : self._features]
        return torch.where(lanes_BTF >= self._threshold, x * self._scale, 0.0)

    def _match(self, tokens_BT1: Tensor, x: Tensor) -> Tensor:
        if x.shape[:-1].numel() == tokens_BT1.numel():
            return tokens_BT1.reshape(*x.shape[:-1], 1)
        raise ExpectedError(
            f"Layer {self._name} does not see every token once (it may belong to a mixture of "
            "experts), so its dropout cannot be the same on every split of the batch.",
            "Set adapter.dropout: 0, or name other layers in adapter.targets",
        )


def _draw(seed: int, position: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    philox = np.random.Philox(key=np.array([seed % _WORD, position], dtype=np.uint64))
    return _odd(philox, count)


def _draw_name(name: str, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    key = np.frombuffer(hashlib.sha256(name.encode("utf-8")).digest()[:16], dtype=np.uint64)
    return _odd(np.random.Philox(key=key), count)


def _odd(philox: np.random.Philox, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    words = philox.random_raw((count + 1) // 2).view(np.uint32)[:count]
    # Odd, so that multiplication is a bijection and no key maps everything to zero.
    return (words | np.uint32(1)).view(np.int32)


def replace_dropouts(model: nn.Module, probability: float, clock: DropoutClock) -> int:
    """Replace every adapter's dropout by a `CountedDropout`; return their number."""
    count = 0
    for name, module in model.named_modules():
        dropouts = getattr(module, "lora_dropout", None)
        if not isinstance(dropouts, nn.ModuleDict):
            continue
        for adapter in dropouts:
            features = module.lora_A[adapter].in_features
            dropouts[adapter] = CountedDropout(probability, f"{name}.{adapter}", features, clock)
            count += 1
    return count
