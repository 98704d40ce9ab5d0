"""The seam between the trainer and the ways to divide a run over its ranks.

The trainer knows what a step is; a strategy knows which rank holds which parameters and computes
which part of a batch. A run calls it in this order: `choose_layers` before weights are read,
`divide` and `place` once the model is loaded, `join` once all ranks have loaded, `import_state` on
a resume, `start` when the device is tuned, then for each step `choose_batch`, `add_gradients`,
`reduce`, `average_gradients`, `step_optimizer`, `learn`. A checkpoint is `equalize`, then
`export_state`. Every method is called by all ranks at the same point, since most of them hold
collectives; a strategy may therefore rely on their order, and must not vary it by anything that
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
        """Values of all of them, flat."""

    @property
    def views(self) -> Mapping[str, Tensor]:
        """Part of `values` for each parameter by name, in its own shape and in that order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedState:
    """All that training has changed, still in use by the next step."""

    parameters: TrainedValues
    optimizer: dict[str, Tensor]
    """Tensors of the optimizer's state, by `INDEX/NAME`."""
    plain: dict[str, Any]
    """Values of the optimizer's state that are not tensors."""
    carried: dict[str, Tensor]
    """What lossy compression has left over for later steps; empty without it."""


class Strategy(Protocol):
    """One way to divide a model and its batches over the ranks."""

    @property
    def shares(self) -> tuple[float, ...]:
        """Weight of each rank in the division of a batch, in rank order."""

    def use_shares(self, shares: Sequence[float]) -> None:
        """Divide the next batches by these weights, as a verified resume does."""

    def choose_layers(self, outline: ModelOutline) -> LayerHoldings:
        """Return which frozen weights this rank holds, and where, before they are read.

        Raises:
            ExpectedError: the model cannot be divided in this way.
        """

    @property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """First layer of each rank and the one after its last; empty: every rank has all layers."""

    @property
    def work_share(self) -> float:
        """Part of the work of a token that this rank does, 0 to 1; all of it: 1."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every trained parameter of the run, by name; this rank may hold some only."""

    def divide(self, model: TrainedModel) -> TrainedModel:
        """Return the model as this rank computes it.

        Raises:
            ExpectedError: this model cannot be divided so.
        """

    def place(self, model: TrainedModel, layout: Layout) -> TrainedParameters:
        """Take over the trained parameters of this rank, and make their optimizer.

        Args:
            model: loaded, on the device.
            layout: order of the parameters in the state, which a checkpoint prescribes.

        Raises:
            ExpectedError: the optimizer needs a package that is not installed.
        """

    def join(self) -> None:
        """Learn what the other ranks hold; all of them have loaded.

        Raises:
            PeerLost: another rank has gone.
        """

    def copy_first_values(self) -> None:
        """Let ranks that hold the same parameters begin with the same values.

        Needed where these depend on the processor that computed them.
        """

    def make_reserve(self) -> Reserve:
        """Return what the optimizer will need of the device beside what it has allocated."""

    def start(
        self,
        executor: Executor,
        examples: Examples,
        *,
        shares: Sequence[float] | None,
        tokens_per_s: Sequence[float],
    ) -> None:
        """Begin to train with this executor.

        Args:
            executor: over the parameters that `place` returned.
            examples: training data, the same on all ranks.
            shares: those of the checkpoint when the same devices continue; None: choose.
            tokens_per_s: measured speed of each rank alone.
        """

    def choose_batch(self, step: int) -> Batch:
        """Return the batch of a step (from 1), divided alike on every rank."""

    def add_gradients(self, batch: Batch, loss_scale: float | None) -> None:
        """Compute this rank's part of the summed gradients, from zero.

        Args:
            batch: as `choose_batch` returned it.
            loss_scale: factor on the gradients of the batch's mean loss (fp16); None: unscaled.

        Raises:
            ExpectedError: a single example does not fit the memory.
        """

    def take_waited_s(self) -> float:
        """Return for how long this rank waited for others while it computed, in seconds.

        Counts since the last call; on a GPU it waits for its passes.
        """

    def reduce(self) -> None:
        """Wait until the gradients are summed over the ranks.

        Raises:
            PeerLost: another rank has gone.
        """

    def average_gradients(self) -> Tensor:
        """Turn the sums into the gradients of the batch's mean; return their norm, a scalar."""

    def step_optimizer(self, norm: Tensor, learning_rate: float) -> None:
        """Clip the gradients of this norm, and take one optimizer step.

        Separate from `average_gradients`, since in fp16 the norm decides whether to step at all.
        """

    def learn(self, seconds: Sequence[float], tokens: Sequence[float]) -> None:
        """Adapt the shares to what each rank needed for its part of the step before."""

    def evaluate(self, examples: Examples, first_place: int) -> Tensor:
        """Return the objective's sums over all examples, the same on all ranks.

        Args:
            examples: evaluation data.
            first_place: index of the first one for the objective (see `Part.places`).

        Raises:
            PeerLost: another rank has gone.
        """

    def equalize(self, flag: bool) -> int:
        """Make the trained state of all ranks equal to the last bit, before it is saved.

        Returns:
            The number of ranks whose `flag` was set; it travels with the same all-reduce.

        Raises:
            PeerLost: another rank has gone.
        """

    def regroup(self, kept: Sequence[int]) -> None:
        """Go on with some of the ranks, after the others were lost in the middle of a step.

        The group has only them by now; the step that was begun is done again from its batch.

        Args:
            kept: positions that they had in the group before, in order.
        """

    def find_gap(self) -> str:
        """Return why this rank alone does not hold the trained state; empty: it does."""

    def export_state(self) -> TrainedState:
        """Return the trained state; what is carried is that of the last `equalize`."""

    def import_state(
        self,
        values: Iterable[tuple[str, Tensor]],
        optimizer: dict[str, Tensor],
        plain: dict[str, Any],
        carried: dict[str, Tensor],
    ) -> None:
        """Continue with a saved state: see `TrainedState`, with the parameters by name."""
