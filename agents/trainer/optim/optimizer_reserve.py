"""The memory of the GPU that the optimizer takes, kept free for it.

Its state, which it has from its first step on, is held while settings are tried and weights are
unpacked, so that a pass runs then as it will in the run. Were it only counted, the allocator would
use it for pieces it keeps, and a setting that fills the card would be measured faster than it is.
What a step needs for a moment is only counted: the activations are gone by then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from agents.contract.spec import OptimizerKind
from agents.trainer.optim.flat_parameters import FlatParameters
from agents.trainer.optim.optimizer import export_state

OPTIMIZER_COPIES = 5
"""Two moments and what a step needs beside them, of the size of the trained values."""


class Reserve:
    """Knows what the optimizer still takes, and can hold what it will keep.

    Args:
        kind: of the optimizer.
        flat: what is trained.
        optimizer: over it.
        device: where it is; nothing is reserved on a CPU.
    """

    def __init__(
        self,
        kind: OptimizerKind,
        flat: FlatParameters,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
    ) -> None:
        self._most_bytes = OPTIMIZER_COPIES * flat.values.nbytes if device.type != "cpu" else 0
        self._state_bytes = {
            "adamw": 2 * flat.values.nbytes,
            "adamw_8bit": 2 * flat.values.numel(),
            "paged_adamw_8bit": 0,  # it lies in the PC's own memory
        }[kind]
        self._optimizer = optimizer
        self._device = device
        self._held: torch.Tensor | None = None

    @property
    def missing_bytes(self) -> int:
        """What the optimizer takes at most beside what is allocated now."""
        held_bytes = self._held.nbytes if self._held is not None else 0
        return max(0, self._most_bytes - self._taken_bytes() - held_bytes)

    @property
    def lasting_bytes(self) -> int:
        """What of that it will keep."""
        held_bytes = self._held.nbytes if self._held is not None else 0
        return min(self.missing_bytes, max(0, self._state_bytes - self._taken_bytes() - held_bytes))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Take what its state will be for the block; where it is not free, it stays missing."""
        size = self.lasting_bytes
        with contextlib.suppress(torch.OutOfMemoryError):
            if size:
                self._held = torch.empty(size, dtype=torch.uint8, device=self._device)
        try:
            yield
        finally:
            if self._held is not None:
                self._held = None
                torch.cuda.empty_cache()  # in one piece it would be of no use

    def _taken_bytes(self) -> int:
        states, _ = export_state(self._optimizer)
        here = self._device.type
        return sum(state.nbytes for state in states.values() if state.device.type == here)
