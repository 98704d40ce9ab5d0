"""Blocks of host memory that a GPU can copy by itself: pinned, as far as the system allows.

The memory is registered with the driver in place, because torch's own allocator of pinned memory
rounds every block up to a power of two: a layer of 441 MB of a 70B model would take 512 MB.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from agents.contract.layer_plan import STREAMED_SHARE
from agents.limits import read_available_bytes
from agents.trainer.streaming.layout import allocate_block

# Memory that layers leave to offloaded activations and the system, of the memory available at the
# start of a run, in bytes.
_LEFT_BYTES = 3 << 30


class HostMemory:
    """Hands out blocks of host memory within a budget.

    Args:
        device: device of the rank. On a CPU nothing is pinned.
        budget_bytes: limit of all permanent blocks, in bytes.
        warn: called with a message and a hint if memory cannot be pinned.
    """

    def __init__(
        self, device: torch.device, budget_bytes: int, warn: Callable[[str, str], None]
    ) -> None:
        self._device = device
        self._warn = warn
        self._may_pin = device.type == "cuda"
        self.budget_bytes = budget_bytes
        """Memory that may still be taken, in bytes."""
        self.pageable_bytes = 0
        """Memory that was taken but could not be pinned, in bytes."""

    def take(self, num_bytes: int) -> Tensor:
        """Return a page-aligned block (num_bytes,) of uint8, which is never given back."""
        return self.hold(allocate_block(num_bytes))

    def hold(self, block: Tensor) -> Tensor:
        """Count and pin a page-aligned block (num_bytes,), and return it."""
        self.budget_bytes -= len(block)
        if self._device.type == "cuda" and not (self._may_pin and self._pin(block)):
            self.pageable_bytes += len(block)
        return block

    def can_pin(self, block: Tensor) -> bool:
        """Return whether memory of this kind can be pinned, by pinning a block of it."""
        return self._device.type != "cuda" or not self._register(block)

    def _register(self, block: Tensor) -> int:
        """Pin a block; return the error, 0 without one."""
        code = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), len(block), 0))
        if code:
            # It stays the driver's last error, and the next kernel would report it.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self._device)
        return code

    def _pin(self, block: Tensor) -> bool:
        code = self._register(block)
        if code == 0:
            return True
        self._may_pin = False
        self._warn(
            f"The system lets no more host memory be pinned (CUDA error {code}), so the GPU waits "
            "for copies of weights from there, which is slower.",
            "Under WSL2, raise memory in .wslconfig: Windows pins at most about half of it",
        )
        return False


def choose_budget(num_local_ranks: int) -> int:
    """Return the bytes of host memory that the layers of one rank may take.

    Args:
        num_local_ranks: number of ranks on this PC, which share its memory.
    """
    available = read_available_bytes()
    return max(0, int(min(available * STREAMED_SHARE, available - _LEFT_BYTES) / num_local_ranks))
