"""Trained state of all stages in the layout of a rank that holds everything.

Checkpoints have the single-process layout, so a run can resume with any number of stages. Each
stage sends its values and moments to the ranks that write, which hold them in host memory. The
optimizer is Adam: its moments are as long as the values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from agents.trainer.optim.flat_parameters import FlatParameters, Layout, order_names
from agents.trainer.optim.optimizer import export_state, import_state
from agents.trainer.parallel.strategy import TrainedState

# Names and order of Adam's state in torch; they are keys of the checkpoint.
_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = "step"
NUM_ROWS = 1 + len(_MOMENTS)
"""Number of rows per trained value: the value and its moments."""


class WholeValues:
    """All trained parameters of a run, in host memory; see `TrainedValues`."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], layout: Layout) -> None:
        num_dims = {name: len(shape) for name, shape in shapes.items()}
        self.spans: dict[str, slice] = {}
        """Span of each parameter in the buffer, by name."""
        start = self.num_decayed = 0
        for name in order_names(num_dims, layout):
            stop = start + torch.Size(shapes[name]).numel()
            self.spans[name] = slice(start, stop)
            self.num_decayed = stop if num_dims[name] >= 2 else self.num_decayed
            start = stop
        self.num_values = start
        self._shapes = dict(shapes)
        self.values = torch.empty(0)

    def allocate(self, dtype: torch.dtype) -> Tensor:
        """Allocate the values; return a tensor with them and the moments (3, N)."""
        rows = torch.zeros(NUM_ROWS, self.num_values, dtype=dtype)
        self.values = rows[0]
        return rows

    @property
    def views(self) -> dict[str, Tensor]:
        """Part of `values` of each parameter, by name, in its own shape."""
        return {
            name: self.values[span].view(self._shapes[name]) for name, span in self.spans.items()
        }


class WholeState:
    """Values and moments of the whole model on a rank that writes checkpoints."""

    def __init__(self, whole: WholeValues, dtype: torch.dtype) -> None:
        self._whole = whole
        self._rows = whole.allocate(dtype)
        self._step: Tensor | None = None

    def count(self, names: Sequence[str]) -> int:
        """Return the number of values of some parameters."""
        spans = [self._whole.spans[name] for name in names]
        return sum(span.stop - span.start for span in spans)

    def put(self, row: int, names: Sequence[str], numbers: Tensor) -> None:
        """Store numbers of some parameters, concatenated, on the CPU.

        Args:
            row: 0 for the values, then the moments.
            names: names of the parameters, in order.
            numbers: their numbers, flat.
        """
        start = 0
        for name in names:
            span = self._whole.spans[name]
            stop = start + span.stop - span.start
            self._rows[row, span] = numbers[start:stop]
            start = stop

    def note_step(self, step: Tensor | None) -> None:
        """Store the number of optimizer steps; None before the first one."""
        self._step = step

    def export(self) -> TrainedState:
        """Return the state as a rank that holds everything would."""
        optimizer: dict[str, Tensor] = {}
        if self._step is not None:
            for index, span in enumerate(_cut_groups(self._whole)):
                optimizer[f"{index}/{_STEP}"] = self._step
                for row, moment in enumerate(_MOMENTS, start=1):
                    optimizer[f"{index}/{moment}"] = self._rows[row, span]
        return TrainedState(parameters=self._whole, optimizer=optimizer, plain={}, carried={})


def read_rows(flat: FlatParameters, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the values of a stage and its moments, each flat in the order of its buffer.

    Before the first step there are only values.
    """
    tensors, _ = export_state(optimizer)
    if not tensors:
        return [flat.values]
    # One group with weight decay and one without; either may be missing on a stage.
    indices = range(len(flat.groups(0.0)))
    moments = [torch.cat([tensors[f"{index}/{name}"] for index in indices]) for name in _MOMENTS]
    return [flat.values, *moments]


def write_rows(rows: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Write back the moments of `read_rows`; its values already are the stage's own."""
    tensors, _ = export_state(optimizer)
    for name, row in zip(_MOMENTS, rows[1:], strict=False):
        start = 0
        for key in sorted(key for key in tensors if key.endswith(f"/{name}")):
            stop = start + tensors[key].numel()
            # In place, since the optimizer owns these tensors.
            tensors[key].copy_(row[start:stop])
            start = stop


def read_step(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """Return the number of optimizer steps as a scalar; None before the first one."""
    tensors, _ = export_state(optimizer)
    return tensors.get(f"0/{_STEP}")


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    flat: FlatParameters,
    whole: WholeValues,
    tensors: Mapping[str, Tensor],
) -> None:
    """Restore the part of a whole optimizer state that belongs to these parameters."""
    if not tensors:
        return
    groups = _cut_groups(whole)
    moments = {
        name: torch.cat([tensors[f"{index}/{name}"] for index in range(len(groups))])
        for name in _MOMENTS
    }
    mine: dict[str, Tensor] = {}
    start = 0
    for index, group in enumerate(flat.groups(0.0)):
        (parameter,) = _parameters(group)
        # Cloned, since each group counts its own steps in place.
        mine[f"{index}/{_STEP}"] = tensors[f"0/{_STEP}"].clone()
        names = _names_between(flat, start, start + parameter.numel())
        for name in _MOMENTS:
            parts = [moments[name][whole.spans[each]] for each in names]
            mine[f"{index}/{name}"] = torch.cat(parts)
        start += parameter.numel()
    import_state(optimizer, mine, {})


def _parameters(group: Mapping[str, Any]) -> list[Tensor]:
    parameters: list[Tensor] = group["params"]
    return parameters


def _names_between(flat: FlatParameters, start: int, stop: int) -> list[str]:
    """Return the parameters of a span of the buffer, in order."""
    names, end = [], 0
    for name, view in flat.views.items():
        if start <= end < stop:
            names.append(name)
        end += view.numel()
    return names


def _cut_groups(whole: WholeValues) -> list[slice]:
    """Return the spans of the optimizer's groups: with weight decay and without."""
    cuts = (slice(0, whole.num_decayed), slice(whole.num_decayed, whole.num_values))
    return [cut for cut in cuts if cut.stop > cut.start]
