"""The seam between the trainer and the strategies that divide a run over its ranks.

The trainer knows what a step is; a strategy knows which rank holds which parameters and computes
which part of a batch. A run calls it in this order: `choose_layers` before weights are read,
`divide` and `place` once the model is loaded, `join` once all ranks have loaded, `import_state` on
a resume, `start` when the device is tuned, then for each step `choose_batch`, `add_gradients`,
`reduce`, `average_gradients`, `step_optimizer`, `learn`. A checkpoint is `equalize`, then
`export_state`. All ranks call every method at the same point, since most methods contain
collectives. A strategy may therefore rely on their order, and must not vary it by anything that
only one rank knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from agents.trainer.data.examples import Examples
from agents.trainer.execution.executor import Executor
from agents.trainer.model.layer_holdings import LayerHoldings, ModelOutline
from agents.trainer.model.model import TrainedModel
from agents.trainer.optim.flat_parameters import Layout, TrainedParameters
from agents.trainer.optim.optimizer_reserve import Reserve
from agents.trainer.parallel.batch import Batch


class TrainedValues(Protocol):
    """Trained parameters of a whole run in one tensor."""

    @property
    def values(self) -> Tensor:
        """Values of all parameters, flat."""

    @property
    def views(self) -> Mapping[str, Tensor]:
        """Part of `values` of each parameter, by name, in its own shape and in that order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedState:
    """Everything that training has changed; the next step overwrites it."""

    parameters: TrainedValues
    optimizer: dict[str, Tensor]
    """Tensors of the optimizer's state, by `INDEX/NAME`."""
    plain: dict[str, Any]
    """Values of the optimizer's state that are not tensors."""
    carried: dict[str, Tensor]
    """Error of lossy compression for later steps; empty without compression."""


class Strategy(Protocol):
    """Division of a model and its batches over the ranks."""

    @property
    def shares(self) -> tuple[float, ...]:
        """Weight of each rank in the division of a batch, in rank order."""

    def use_shares(self, shares: Sequence[float]) -> None:
        """Divide the next batches by these weights, as a verified resume does."""

    def choose_layers(self, outline: ModelOutline) -> LayerHoldings:
        """Return the frozen weights that this rank holds, and where, before they are read.

        Raises:
            ExpectedError: this strategy cannot divide the model.
        """

    @property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """First layer of each rank and the one after its last; empty: all ranks have all layers."""

    @property
    def work_share(self) -> float:
        """Fraction of a token's work that this rank does, above 0 to 1."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every trained parameter of the run, by name; this rank may hold only some."""

    def divide(self, model: TrainedModel) -> TrainedModel:
        """Return the model as this rank computes it.

        Raises:
            ExpectedError: this strategy cannot divide the model.
        """

    def place(self, model: TrainedModel, layout: Layout) -> TrainedParameters:
        """Take over the trained parameters of this rank and create their optimizer.

        Args:
            model: loaded model on the device.
            layout: order of the parameters in the state, which a checkpoint prescribes.

        Raises:
            ExpectedError: the optimizer needs a package that is not installed.
        """

    def join(self) -> None:
        """Exchange what the ranks hold; all of them have loaded.

        Raises:
            PeerLost: another rank is gone.
        """

    def copy_first_values(self) -> None:
        """Give equal values to all ranks that hold the same parameters.

        Needed where initial values depend on the processor that computed them.
        """

    def make_reserve(self) -> Reserve:
        """Return the device memory that the optimizer will need in addition to what it has
        allocated.
        """

    def start(
        self,
        executor: Executor,
        examples: Examples,
        *,
        shares: Sequence[float] | None,
        tokens_per_s: Sequence[float],
    ) -> None:
        """Start to train with this executor.

        Args:
            executor: executor of the parameters that `place` returned.
            examples: training data, the same on all ranks.
            shares: shares of the checkpoint if the same devices resume; None chooses new ones.
            tokens_per_s: measured speed of each rank alone.
        """

    def choose_batch(self, step: int) -> Batch:
        """Return the batch of a step (from 1), divided identically on every rank."""

    def add_gradients(self, batch: Batch, loss_scale: float | None) -> None:
        """Compute this rank's part of the summed gradients, from zero.

        Args:
            batch: result of `choose_batch`.
            loss_scale: factor on the gradients of the batch's mean loss (fp16); None if unscaled.

        Raises:
            ExpectedError: a single example does not fit into memory.
        """

    def take_waited_s(self) -> float:
        """Return the time that this rank waited for others while it computed, in seconds.

        Counts since the last call; on a GPU this blocks until its passes are done.
        """

    def reduce(self) -> None:
        """Wait until the gradients are summed over the ranks.

        Raises:
            PeerLost: another rank is gone.
        """

    def average_gradients(self) -> Tensor:
        """Turn the sums into gradients of the batch's mean; return their norm, a scalar."""

    def step_optimizer(self, norm: Tensor, learning_rate: float) -> None:
        """Clip the gradients by their norm and take one optimizer step.

        Separate from `average_gradients`, since in fp16 the norm decides whether to step.
        """

    def learn(self, seconds: Sequence[float], tokens: Sequence[float]) -> None:
        """Adapt the shares to the time of each rank for its part of the step before."""

    def evaluate(self, examples: Examples, first_place: int) -> Tensor:
        """Return the objective's sums over all examples, the same on all ranks.

        Args:
            examples: evaluation data.
            first_place: index of the first example for the objective (see `BatchPart.places`).

        Raises:
            PeerLost: another rank is gone.
        """

    def equalize(self, flag: bool) -> int:
        """Make the trained state of all ranks bit-equal before it is saved.

        Returns:
            The number of ranks whose `flag` was set; it travels with the same all-reduce.

        Raises:
            PeerLost: another rank is gone.
        """

    def regroup(self, kept: Sequence[int]) -> None:
        """Continue with some ranks after the others were lost in the middle of a step.

        The group has already shrunk to them; the interrupted step starts again from its batch.

        Args:
            kept: their former positions in the group, in order.
        """

    def find_gap(self) -> str:
        """Return why this rank alone does not hold the trained state; empty if it does."""

    def export_state(self) -> TrainedState:
        """Return the trained state; its carried error is that of the last `equalize`."""

    def import_state(
        self,
        values: Iterable[tuple[str, Tensor]],
        optimizer: dict[str, Tensor],
        plain: dict[str, Any],
        carried: dict[str, Tensor],
    ) -> None:
        """Restore a saved state: see `TrainedState`, with the parameters by name."""
