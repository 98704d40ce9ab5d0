"""Compute the activations of some decoder layers a second time, because memory is short.

Each layer that does so costs about a third more of its time and keeps only its input, so no more of
them do it than memory forces. The first layers come first: theirs would be held the longest.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from agents.trainer.model import TrainedModel


class Recomputing:
    """Says which decoder layers of a model compute their activations twice."""

    def __init__(self, model: TrainedModel) -> None:
        self._model = model
        self._layers = [
            module
            for module in model.module.modules()
            if isinstance(module, GradientCheckpointingLayer)
        ]
        self._plain = [layer.forward for layer in self._layers]
        self.num_layers = 0
        """How many layers do it now."""

    @property
    def most_layers(self) -> int:
        """How many layers could; 0: this model's class does not let its layers do it."""
        return len(self._layers)

    def set(self, num_layers: int) -> None:
        """Let the first `num_layers` do it, or all that there are.

        Transformers' own switch works in training mode only, in which its dropouts would be on.
        """
        self.num_layers = min(num_layers, self.most_layers)
        for place, (layer, plain) in enumerate(zip(self._layers, self._plain, strict=True)):
            layer.forward = self._twice(plain) if place < self.num_layers else plain

    def _twice(self, plain: object) -> object:
        return partial(
            checkpoint,
            plain,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), self._model.clock.again()),
        )

    def do_more(self) -> bool:
        """Let more layers do it: a quarter, a half, then all; False when all do already."""
        if self.num_layers >= self.most_layers:
            return False
        quarter = -(-self.most_layers // 4)
        self.set(max(quarter, 2 * self.num_layers))
        return True
