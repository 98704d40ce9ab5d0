"""The memory of the GPU that the optimizer takes for each of its steps, kept free for it.

While settings are tried and weights are unpacked it is held, so that a pass runs then as it will in
the run. Were it only counted, the allocator would use it for pieces it keeps, and a setting that
fills the card would be measured faster than it is between two steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from agents.layer_plan import OPTIMIZER_COPIES
from agents.trainer.flat import FlatParameters
from agents.trainer.optimizer import export_state


class Reserve:
    """Knows what the optimizer still takes, and can hold it.

    Args:
        flat: what is trained.
        optimizer: over it.
        device: where it is; nothing is held on a CPU.
    """

    def __init__(
        self, flat: FlatParameters, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> None:
        self._most_bytes = OPTIMIZER_COPIES * flat.values.nbytes if device.type != "cpu" else 0
        self._optimizer = optimizer
        self._device = device
        self._held: torch.Tensor | None = None

    @property
    def missing_bytes(self) -> int:
        """What the optimizer takes beside what is allocated now."""
        if self._held is not None:
            return 0
        states, _ = export_state(self._optimizer)
        here = self._device.type
        taken_bytes = sum(state.nbytes for state in states.values() if state.device.type == here)
        return max(0, self._most_bytes - taken_bytes)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Take it for the block; where it is not free, it stays missing."""
        with contextlib.suppress(torch.OutOfMemoryError):
            if size := self.missing_bytes:
                self._held = torch.empty(size, dtype=torch.uint8, device=self._device)
        try:
            yield
        finally:
            if self._held is not None:
                self._held = None
                torch.cuda.empty_cache()  # in one piece it would be of no use
