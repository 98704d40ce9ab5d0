"""Blocks of host memory from which the GPU can copy by itself: pinned, as far as the system lets.

The memory is registered with the driver where it is, because torch's own allocator of pinned
memory rounds every block up to a power of two: a layer of a 70B model of 441 MB would take 512.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from agents.contract.layer_plan import STREAMED_SHARE
from agents.trainer.rank.host_memory import read_available_bytes
from agents.trainer.streaming.layout import allocate_block

# What layers leave in any case of the memory that is available when a run starts, in bytes.
# Activations that are offloaded need some, the system as well.
_LEFT_BYTES = 3 << 30


class HostMemory:
    """Hands out blocks of host memory within a budget.

    Args:
        device: Of the rank. On a CPU nothing is pinned.
        budget_bytes: Limit of all blocks that last, in bytes.
        warn: Called with a message and a hint where memory cannot be pinned.
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
        """Memory that was taken and could not be pinned, in bytes."""

    def take(self, num_bytes: int) -> Tensor:
        """Return a block (num_bytes,) of uint8 that begins a page and is never given back."""
        return self.hold(allocate_block(num_bytes))

    def hold(self, block: Tensor) -> Tensor:
        """Count and pin a block (num_bytes,) that begins a page, and return it."""
        self.budget_bytes -= len(block)
        if self._device.type == "cuda" and not (self._may_pin and self._pin(block)):
            self.pageable_bytes += len(block)
        return block

    def can_pin(self, block: Tensor) -> bool:
        """Return whether memory of this kind may be pinned, by pinning a block of it."""
        return self._device.type != "cuda" or not self._register(block)

    def _register(self, block: Tensor) -> int:
        """Pin a block; return the error, 0 without one."""
        code = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), len(block), 0))
        if code:
            # It stays the driver's last error, and would be reported by the next kernel.
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
    """Return how many bytes of host memory the layers of one rank may take.

    Args:
        num_local_ranks: ranks on this PC, which share its memory.
    """
    available = read_available_bytes()
    return max(0, int(min(available * STREAMED_SHARE, available - _LEFT_BYTES) / num_local_ranks))
