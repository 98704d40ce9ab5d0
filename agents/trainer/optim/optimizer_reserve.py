"""GPU memory that the optimizer will need, reserved for it.

The memory of its state, which it allocates at its first step, is held while settings are tried and
weights are unpacked, so that passes run as in the run. If it were only subtracted, the allocator
would use it as cache, and a setting that fills the card would look too fast. Temporary memory of a
step is subtracted, since the activations are gone by then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from agents.contract.spec import OptimizerKind
from agents.trainer.optim.optimizer import export_state

OPTIMIZER_COPIES = 5
"""Peak memory of the optimizer in copies of the trained values: two moments, three temporaries."""


class Reserve:
    """Knows the optimizer's future allocations, and can hold those that last.

    Args:
        kind: name of the optimizer in the spec.
        trained: values of the trained parameters on this rank.
        optimizer: optimizer over these parameters.
        device: their device; nothing is reserved on a CPU.
    """

    def __init__(
        self,
        kind: OptimizerKind,
        trained: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        device: torch.device,
    ) -> None:
        trained_bytes = sum(values.nbytes for values in trained)
        self._peak_bytes = OPTIMIZER_COPIES * trained_bytes if device.type != "cpu" else 0
        self._state_bytes = {
            "adamw": 2 * trained_bytes,
            "adamw_8bit": 2 * sum(values.numel() for values in trained),
            "paged_adamw_8bit": 0,  # in unified memory, which the driver pages to the host
        }[kind]
        self._optimizer = optimizer
        self._device = device
        self._held: torch.Tensor | None = None

    @property
    def missing_bytes(self) -> int:
        """Bytes that the optimizer takes at its peak beyond its current and held memory."""
        held_bytes = self._held.nbytes if self._held is not None else 0
        return max(0, self._peak_bytes - self._taken_bytes() - held_bytes)

    @property
    def lasting_bytes(self) -> int:
        """Part of `missing_bytes` that the optimizer keeps between steps, in bytes."""
        held_bytes = self._held.nbytes if self._held is not None else 0
        return min(self.missing_bytes, max(0, self._state_bytes - self._taken_bytes() - held_bytes))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the memory of its state inside the block, if that much is free."""
        size = self.lasting_bytes
        with contextlib.suppress(torch.OutOfMemoryError):
            if size:
                self._held = torch.empty(size, dtype=torch.uint8, device=self._device)
        try:
            yield
        finally:
            if self._held is not None:
                self._held = None
                # The allocator would keep it as one piece, which fits nothing else.
                torch.cuda.empty_cache()

    def _taken_bytes(self) -> int:
        states, _ = export_state(self._optimizer)
        here = self._device.type
        # Paged state and counters are on the CPU.
        return sum(state.nbytes for state in states.values() if state.device.type == here)
