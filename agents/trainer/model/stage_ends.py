"""A stretch of a model's layers on one rank, and where hidden features enter and leave it.

The class of the model runs unchanged, so positions, masks and rotary angles are its own. What
stands in for the layer before the stretch hands in the features that the stage before has sent, and
what stands in for the one behind it keeps what goes to the next stage. Layers keep their places,
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
    """Where features enter the layers from `first` to before `stop`, and leave them.

    Args:
        first: index of the first layer of the stage.
        stop: index behind its last layer.
        num_layers: layers of the whole model.
        width: hidden features H between two layers.
    """

    def __init__(self, first: int, stop: int, num_layers: int, width: int) -> None:
        self.first = first
        self.stop = stop
        self.num_layers = num_layers
        self.width = width
        self.adapted: tuple[str, ...] = ()
        """Linear layers of all stages that have an adapter, by name; known once all have loaded."""
        # Features (M, H) that the stage before has sent: with the adapter, and without it.
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
        """Whether features of the stage before are at hand; else the layers see made-up ones."""
        return self._fed is not None

    @contextmanager
    def fed(self, hidden_MH: Tensor, plain_MH: Tensor | None = None) -> Iterator[None]:
        """Let passes inside the block begin with these features of the stage before.

        Args:
            hidden_MH: computed with the adapter.
            plain_MH: computed without it; None: no pass without it will come.
        """
        self._fed = (hidden_MH, plain_MH)
        try:
            yield
        finally:
            self._fed = None

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Let passes inside the block begin with the features that no adapter has touched."""
        self._is_plain = True
        try:
            yield
        finally:
            self._is_plain = False

    @contextmanager
    def limited_to(self, start: int, stop: int) -> Iterator[None]:
        """Limit what is handed in to these tokens of the flat row inside the block."""
        self._window = slice(start, stop)
        try:
            yield
        finally:
            self._window = slice(None)

    def take_output(self) -> Tensor:
        """Return the features (1, M, H) that the newest pass has for the next stage."""
        output, self._output = self._output, None
        assert output is not None
        return output

    def enter(self, hidden_1MH: Tensor) -> Tensor:
        """Return the features with which the first layer begins; `hidden_1MH` if none were fed."""
        if self._fed is None:
            return hidden_1MH
        hidden_MH = self._fed[self._is_plain]
        assert hidden_MH is not None
        return hidden_MH[self._window][None]

    def leave(self, hidden_1MH: Tensor) -> None:
        """Keep the features for the next stage."""
        self._output = hidden_1MH


class PassingLayer(AbsentModule):
    """Stands in for a layer of another rank.

    Args:
        absent: what stands in for it so far.
        enters: ends of the stage that begins behind it; None: none does.
        leaves: ends of the stage that stops before it; None: none does.
        in_tuple: whether the class takes the first result of a layer.
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
    """Stands in for the embedding where features come from another stage.

    Without any, as when a rank is timed alone or a model's class is probed, every token gets
    features of its own, so that different tokens differ.

    Args:
        absent: what stands in for the embedding so far.
        dtype: type in which the stages compute.
        device: on which they compute.
    """

    ends: StageEnds | None = None
    """Ends of this rank's stage, once it is opened."""

    def __init__(self, absent: AbsentModule, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(absent)
        self._dtype = dtype
        # Llama 4 moves token ids to where it is.
        self.weight = torch.empty(0, dtype=dtype, device=device)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return (1, M, H) for token ids (1, M): zeros that nobody reads, or made-up features."""
        ids_1M = hidden
        width: Any = self.embedding_dim
        if self.ends is not None and self.ends.is_fed:
            zero = torch.zeros((), dtype=self._dtype, device=ids_1M.device)
            return zero.expand(*ids_1M.shape, width)
        place_H = torch.arange(1, width + 1, device=ids_1M.device)
        return torch.sin(((ids_1M[..., None] + 1) * place_H).double()).to(self._dtype)
