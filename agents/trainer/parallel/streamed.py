"""Data parallel with frozen layers that are streamed to the device while it computes.

Only the location of the frozen weights differs: gradients, shares and checkpoints are those of
`DataParallel`. So a run can resume in either mode, and ranks that hold all layers can take part.
"""

from __future__ import annotations

from agents.contract.spec import RunSpec
from agents.trainer.model.layer_holdings import (
    Holding,
    LayerHoldings,
    ModelOutline,
    hold_everything,
)
from agents.trainer.parallel.data_parallel import DataParallel
from agents.trainer.rank.context import RankContext
from agents.trainer.rank.device import read_most_bytes

# Fraction of the GPU's memory up to which the whole model stays there: activations, the optimizer
# and CUDA graphs need the rest.
_WHOLE_SHARE = 0.55


class Streamed(DataParallel):
    """Strategy in which every rank trains all adapters and streams layers that do not fit."""

    def __init__(self, spec: RunSpec, context: RankContext) -> None:
        super().__init__(spec, context)
        self._attempt = context.attempt

    def choose_layers(self, outline: ModelOutline) -> LayerHoldings:
        """Stream all layers, unless the plan or the memory says that the device holds all.

        The executor decides later which layers stay on the device, when it has measured the memory
        of passes. So a plan's number counts only if it is that of all layers.

        Raises:
            ExpectedError: the model has no layers that can be streamed.
        """
        outline.require_layers("streamed")
        if self._plans_all(outline.num_layers):
            return hold_everything(outline)
        if self._device.type == "cuda":
            total_bytes = sum(outline.layer_bytes) + outline.embedding_bytes + outline.head_bytes
            if total_bytes < _WHOLE_SHARE * read_most_bytes(self._device):
                return hold_everything(outline)
        elsewhere: Holding = "streamed"
        return LayerHoldings(layers=(elsewhere,) * outline.num_layers)

    def _plans_all(self, num_layers: int) -> bool:
        cut = self._attempt.intent.cut
        stages = cut.stages if cut is not None else ()
        return bool(stages) and stages[self._attempt.rank].num_resident == num_layers
