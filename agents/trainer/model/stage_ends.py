"""Consecutive layers on one rank, and the points where hidden features enter and leave them.

The class of the model runs unchanged, so positions, masks and rotary angles are its own. The
placeholder of the layer before the stage feeds in the features of the stage before, and the
placeholder of the layer after it keeps the features for the next stage. Layers keep their places,
and with them the names of their parameters and the keys of their dropout.

Shape letters: M tokens of the flat row, H hidden features.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from agents.trainer.model.layer_loading import AbsentModule


class StageEnds:
    """Entry and exit of features for the layers `first` to `stop` - 1.

    Args:
        first: index of the first layer of the stage.
        stop: index after its last layer.
        num_layers: number of layers of the whole model.
        width: number of hidden features H between two layers.
    """

    def __init__(self, first: int, stop: int, num_layers: int, width: int) -> None:
        self.first = first
        self.stop = stop
        self.num_layers = num_layers
        self.width = width
        self.adapted: tuple[str, ...] = ()
        """Names of the linear layers with an adapter, of all stages; known once all have loaded."""
        # Features (M, H) of the stage before: with the adapter, and without it.
        self._fed: tuple[Tensor, Tensor | None] | None = None
        self._is_plain = False
        self._window: slice = slice(None)
        self._output: Tensor | None = None

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.stop == self.num_layers

    @property
    def is_fed(self) -> bool:
        """True if features of the stage before are available; else layers see artificial ones."""
        return self._fed is not None

    @contextmanager
    def fed(self, hidden_MH: Tensor, plain_MH: Tensor | None = None) -> Iterator[None]:
        """Start passes inside the block with these features of the stage before.

        Args:
            hidden_MH: features computed with the adapter.
            plain_MH: features computed without it; None if no pass needs them.
        """
        self._fed = (hidden_MH, plain_MH)
        try:
            yield
        finally:
            self._fed = None

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Start passes inside the block with the features computed without the adapter."""
        self._is_plain = True
        try:
            yield
        finally:
            self._is_plain = False

    @contextmanager
    def limited_to(self, start: int, stop: int) -> Iterator[None]:
        """Limit the features fed in to these tokens of the flat row inside the block."""
        self._window = slice(start, stop)
        try:
            yield
        finally:
            self._window = slice(None)

    def take_output(self) -> Tensor:
        """Return the features (1, M, H) of the latest pass for the next stage."""
        output, self._output = self._output, None
        assert output is not None
        return output

    def enter(self, hidden_1MH: Tensor) -> Tensor:
        """Return the features for the first layer; `hidden_1MH` if none were fed."""
        if self._fed is None:
            return hidden_1MH
        # The second item holds the features computed without the adapter.
        hidden_MH = self._fed[self._is_plain]
        assert hidden_MH is not None
        return hidden_MH[self._window][None]

    def leave(self, hidden_1MH: Tensor) -> None:
        """Keep the features for the next stage."""
        self._output = hidden_1MH


class PassingLayer(AbsentModule):
    """Placeholder of a layer of another rank.

    Args:
        absent: earlier placeholder of the layer.
        enters: ends of the stage that starts after it; None if no stage does.
        leaves: ends of the stage that stops before it; None if no stage does.
        in_tuple: True if the class takes the first result of a layer.
    """

    def __init__(
        self,
        absent: AbsentModule,
        enters: StageEnds | None,
        leaves: StageEnds | None,
        *,
        in_tuple: bool,
    ) -> None:
        super().__init__(absent)
        self._enters, self._leaves, self._in_tuple = enters, leaves, in_tuple

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
        """Return the features (1, M, H), or those that were fed."""
        if self._leaves is not None:
            self._leaves.leave(hidden)
        result = hidden if self._enters is None else self._enters.enter(hidden)
        return (result,) if self._in_tuple else result


class UnfedEmbedding(AbsentModule):
    """Placeholder of the embedding in a stage whose features come from another one.

    Without fed features, as when a rank is timed alone or a model's class is probed, every token id
    gets distinct features.

    Args:
        absent: earlier placeholder of the embedding.
        dtype: type in which the stages compute.
        device: device of the stages.
    """

    ends: StageEnds | None = None
    """Ends of this rank's stage, once it is opened."""

    def __init__(self, absent: AbsentModule, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(absent)
        self._dtype = dtype
        # Llama 4 moves token ids to the device of this weight.
        self.weight = torch.empty(0, dtype=dtype, device=device)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return (1, M, H) for token ids (1, M): unused zeros, or artificial features."""
        ids_1M = hidden
        width: Any = self.embedding_dim
        if self.ends is not None and self.ends.is_fed:
            # Expanded from one number: the features are replaced before a layer reads them.
            zero = torch.zeros((), dtype=self._dtype, device=ids_1M.device)
            return zero.expand(*ids_1M.shape, width)
        place_H = torch.arange(1, width + 1, device=ids_1M.device)
        # Bounded and distinct for each id, on every kind of device; in float64 for large ids.
        return torch.sin(((ids_1M[..., None] + 1) * place_H).double()).to(self._dtype)
