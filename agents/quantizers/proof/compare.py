"""Measure the distance of a quantized model from its original, over the same held-out tokens.

The measure is the mean Kullback-Leibler divergence from the original's next-token distribution to
the other one's: perplexity alone rates a damaged model as nearly intact, because errors in both
directions cancel out. Only one model is in memory at a time, so the original's distributions are
kept in a file, in half precision: 2 bytes for each token and word of the vocabulary.

Shape letters: B one row, T tokens of a row, N tokens of all rows, V words.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from agents.errors import ExpectedError, explain_os_error
from agents.quantizers.inference.models import find_device

_IMPOSSIBLE = 1e-9

# Nats per token. e to a higher power overflows a float, and the model is unusable anyway.
_MOST_LOSS = 700.0
_BROKEN_ORIGINAL = (
    "The model that is to be quantized predicts numbers that are not finite.",
    "The training has diverged, or its base is damaged: export an earlier checkpoint",
)
_BROKEN_RESULT = (
    "The quantized model predicts numbers that are not finite, so it cannot be used.",
    "Choose another format; the merged model is not affected",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Distance:
    """Distance of one model from the original, as means over all predicted tokens."""

    kl: float
    """D(original || other), in nats per token (Kullback and Leibler 1951); 0: identical."""
    top1: float
    """Share of tokens with the same likeliest next word, 0 to 1."""
    perplexity: float
    """Perplexity: exp of the mean cross-entropy of the text."""
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceOutputs:
    """The original's distributions, kept in a file."""

    logits: Path
    """Log-probabilities, float16 (N, V)."""
    num_words: int
    perplexity: float
    num_tokens: int


class Predictor(Protocol):
    """Object that predicts next tokens."""

    def predict(self, row: Sequence[int]) -> Tensor:
        """Return log-probabilities (T - 1, V) of the token after each one but the last, float32."""
        ...


class ModelPredictor:
    """A model of Transformers, on its device."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._device = find_device(model)

    def predict(self, row: Sequence[int]) -> Tensor:
        """See `Predictor`."""
        ids_BT = torch.tensor([list(row)], device=self._device)
        with torch.inference_mode():
            logits_TV = self._model(input_ids=ids_BT, use_cache=False).logits[0, :-1]
            logs_TV: Tensor = logits_TV.float().log_softmax(-1).cpu()
        return logs_TV


def remember(predictor: Predictor, rows: Sequence[Sequence[int]], path: Path) -> ReferenceOutputs:
    """Write the log-probabilities of the next word after each token of `rows` to `path`.

    Args:
        predictor: predictor of the original.
        rows: token ids; every token but the first of a row is predicted.
        path: file to write, of 2 N V bytes.

    Raises:
        ValueError: no row has two tokens.
        ExpectedError: the model predicts numbers that are not finite.
    """
    num_tokens = sum(max(0, len(row) - 1) for row in rows)
    if not num_tokens:
        raise ValueError("rows has no row of two tokens; there is nothing to predict")
    kept_NV: np.memmap[Any, Any] | None = None
    place, loss = 0, 0.0
    for targets_T, logs_TV in _walk(predictor, rows):
        if logs_TV.isnan().any():
            raise ExpectedError(*_BROKEN_ORIGINAL)
        if kept_NV is None:
            shape = (num_tokens, logs_TV.shape[1])
            _reserve(path, 2 * num_tokens * logs_TV.shape[1])
            kept_NV = np.memmap(path, dtype=np.float16, mode="r+", shape=shape)
        kept_NV[place : place + len(targets_T)] = logs_TV.half().numpy()
        loss += _loss(targets_T, logs_TV)
        place += len(targets_T)
    assert kept_NV is not None
    # Written so that NaN, which compares false, is refused.
    if not loss / num_tokens < _MOST_LOSS:
        raise ExpectedError(*_BROKEN_ORIGINAL)
    kept_NV.flush()
    return ReferenceOutputs(
        logits=path,
        num_words=int(kept_NV.shape[1]),
        perplexity=math.exp(loss / num_tokens),
        num_tokens=num_tokens,
    )


def _reserve(path: Path, num_bytes: int) -> None:
    """Reserve disk space, since a write to a mapped hole kills the process on a full disk."""
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        raise explain_os_error(error, f"writing the original's predictions to {path}") from error


def measure(
    predictor: Predictor, rows: Sequence[Sequence[int]], reference: ReferenceOutputs
) -> Distance:
    """Return the distance of another model from the recorded one over the same rows.

    Raises:
        ExpectedError: the model predicts numbers that are not finite.
    """
    shape = (reference.num_tokens, reference.num_words)
    kept_NV = np.memmap(reference.logits, dtype=np.float16, mode="r", shape=shape)
    place, kl, same, loss = 0, 0.0, 0, 0.0
    for targets_T, logs_TV in _walk(predictor, rows):
        if logs_TV.isnan().any():
            raise ExpectedError(*_BROKEN_RESULT)
        taken = torch.from_numpy(np.array(kept_NV[place : place + len(targets_T)]))
        words = min(logs_TV.shape[1], reference.num_words)  # some formats drop or add padding
        # float16 rounds log-probabilities, so normalize them again.
        kept_TV = taken.float().log_softmax(-1)[:, :words]
        kl += diverge(kept_TV, logs_TV[:, :words])
        same += int((kept_TV.argmax(1) == logs_TV.argmax(1)).sum())
        loss += _loss(targets_T, logs_TV)
        place += len(targets_T)
    if not (math.isfinite(kl) and loss / place < _MOST_LOSS):
        raise ExpectedError(*_BROKEN_RESULT)
    return Distance(
        # Rounding can make the mean of equal models slightly negative.
        kl=max(0.0, kl / place),
        top1=same / place,
        perplexity=math.exp(loss / place),
        num_tokens=place,
    )


def diverge(first_TV: Tensor, second_TV: Tensor) -> float:
    """Return the sum over T of D(first || second), in nats, of log-probabilities (T, V).

    >>> half = torch.tensor([[0.5, 0.5]]).log()
    >>> round(diverge(half, torch.tensor([[0.25, 0.75]]).log()), 4)
    0.1438
    """
    terms_TV = first_TV.exp() * (first_TV - second_TV)
    # 0 * -inf is NaN, but the term of an impossible word is 0.
    possible_TV = first_TV > math.log(_IMPOSSIBLE)
    return terms_TV.where(possible_TV, torch.zeros_like(terms_TV)).double().sum().item()


def _walk(predictor: Predictor, rows: Sequence[Sequence[int]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the following words (T,) and their log-probabilities (T, V), row by row."""
    for row in rows:
        if len(row) > 1:
            yield torch.tensor(list(row[1:])), predictor.predict(row)


def _loss(targets_T: Tensor, logs_TV: Tensor) -> float:
    return -logs_TV.gather(1, targets_T[:, None]).double().sum().item()
