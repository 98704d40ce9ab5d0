"""Layers of a model that a rank holds, and their location; decided before weights are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from agents.errors import ExpectedError

Holding = Literal["resident", "streamed", "absent"]
"""Location of the frozen weights of a layer: on the device; elsewhere and copied there for each
pass; or only on other ranks.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOutline:
    """Facts about a model before its weights are read."""

    class_name: str
    """Class of the model, for messages."""
    layer_bytes: tuple[int, ...]
    """Memory of the frozen weights of each decoder layer in this run, in bytes; empty if its layers
    cannot be distinguished.
    """
    embedding_bytes: int
    """Memory of the embeddings, in bytes."""
    head_bytes: int
    """Memory of the head, in bytes; 0 if it shares the embeddings."""
    shared_weight: str = ""
    """Name of a parameter that two layers share, as in Zamba; empty if none is shared."""

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layer_bytes)

    def require_layers(self, parallel: str) -> None:
        """Check that the model has layers that can be held separately.

        Args:
            parallel: mode of the run file that needs them.

        Raises:
            ExpectedError: it has no such layers, or they share weights.
        """
        if self.shared_weight:
            raise ExpectedError(
                f"parallel: {parallel} needs layers that share no weights, but those of "
                f"{self.class_name} share {self.shared_weight}.",
                "Use parallel: data, or another model",
            )
        if not self.layer_bytes:
            raise ExpectedError(
                f"parallel: {parallel} needs a model that is a stack of layers, but those of "
                f"{self.class_name} cannot be distinguished.",
                "Use parallel: data, or another model",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerHoldings:
    """Frozen weights that one rank holds."""

    layers: tuple[Holding, ...]
    """Location of each decoder layer, in the order of the model."""
    embedding: bool = True
    """True if it has the embeddings; a head that shares them includes them in any case."""
    head: bool = True
    """True if it has the head."""

    @property
    def is_whole(self) -> bool:
        """True if everything is on the device, as in a run on one GPU."""
        return self.embedding and self.head and set(self.layers) <= {"resident"}

    def find(self, holding: Holding) -> tuple[int, ...]:
        """Return the indices of the layers with this location."""
        return tuple(place for place, known in enumerate(self.layers) if known == holding)


ChooseLayers = Callable[[ModelOutline], LayerHoldings]
"""Decides what a rank holds; called once, before the weights are read."""


def hold_everything(outline: ModelOutline) -> LayerHoldings:
    """Return the holdings of a rank that has the whole model on its device."""
    everywhere: Holding = "resident"
    return LayerHoldings(layers=(everywhere,) * outline.num_layers)
