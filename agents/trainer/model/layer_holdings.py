"""Which layers of a model a rank holds, and where: decided before any weight is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from agents.errors import ExpectedError

Holding = Literal["resident", "streamed", "absent"]
"""Where the frozen weights of a layer are: on the device, elsewhere and copied there for each
pass, or on other ranks alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOutline:
    """What is known of a model before its weights are read."""

    class_name: str
    """Class of the model, for messages."""
    layer_bytes: tuple[int, ...]
    """Memory of the frozen weights of each decoder layer, as this run holds them, in bytes; empty:
    its layers cannot be told apart."""
    embedding_bytes: int
    """Memory of the embeddings in bytes."""
    head_bytes: int
    """Memory of the head in bytes; 0: it is the embeddings."""
    shared_weight: str = ""
    """Name of a parameter that a layer shares with another one, as in Zamba; empty: none does."""

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layer_bytes)

    def require_layers(self, parallel: str) -> None:
        """Check that the model has layers which can be held apart.

        Args:
            parallel: mode of the run file that needs them.

        Raises:
            ExpectedError: it has none, or they share weights.
        """
        if self.shared_weight:
            raise ExpectedError(
                f"parallel: {parallel} needs layers with weights of their own, and those of "
                f"{self.class_name} share {self.shared_weight}.",
                "Use parallel: data, or another model",
            )
        if not self.layer_bytes:
            raise ExpectedError(
                f"parallel: {parallel} needs a model that is a stack of layers, and those of "
                f"{self.class_name} cannot be told apart.",
                "Use parallel: data, or another model",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerHoldings:
    """What one rank holds of the frozen weights."""

    layers: tuple[Holding, ...]
    """Place of each decoder layer, in the order of the model."""
    embedding: bool = True
    """Whether it has the embeddings. A head that is the embeddings brings them in any case."""
    head: bool = True
    """Whether it has the head."""

    @property
    def is_whole(self) -> bool:
        """Whether everything is on the device, as in a run on one GPU."""
        return self.embedding and self.head and set(self.layers) <= {"resident"}

    def find(self, holding: Holding) -> tuple[int, ...]:
        """Return the indices of the layers that are held like this."""
        return tuple(place for place, found in enumerate(self.layers) if found == holding)


ChooseLayers = Callable[[ModelOutline], LayerHoldings]
"""Decides what a rank holds; called once, before the weights are read."""


def hold_everything(outline: ModelOutline) -> LayerHoldings:
    """Return the holdings of a rank that has the whole model on its device."""
    everywhere: Holding = "resident"
    return LayerHoldings(layers=(everywhere,) * outline.num_layers)
