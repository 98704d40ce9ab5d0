"""Host memory within a budget, pinned as far as the system lets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from agents.trainer.streaming import host_memory
from agents.trainer.streaming.host_memory import HostMemory, choose_budget

GIB = 2**30


def test_a_system_that_pins_no_more_costs_one_warning(monkeypatch):
    """As WSL2 does from about half of the memory on; training goes on, from pageable memory."""
    asked, cleared, messages = [], [], []

    def register(address, num_bytes, flags):
        asked.append((address % 4096, num_bytes))
        return 0 if len(asked) == 1 else 2

    def report_last_error(*size, device):
        cleared.append(device)
        raise RuntimeError("CUDA error: out of memory")

    cudart = SimpleNamespace(cudaHostRegister=register)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch, "zeros", report_last_error)
    memory = HostMemory(
        torch.device("cuda:0"), 10 * 8192, lambda message, hint: messages.append((message, hint))
    )
    blocks = [memory.take(8192) for _ in range(3)]
    assert asked == [(0, 8192), (0, 8192)]  # the third is not tried
    assert len(cleared) == 1
    assert memory.pageable_bytes == 2 * 8192
    assert memory.budget_bytes == 7 * 8192
    assert all(len(block) == 8192 and block.data_ptr() % 4096 == 0 for block in blocks)
    assert not memory.can_pin(blocks[0])
    ((message, hint),) = messages
    assert "lets no more host memory be pinned (CUDA error 2)" in message
    assert ".wslconfig" in hint


@pytest.mark.parametrize(
    ("available_gib", "ranks", "budget_gib"), [(60, 1, 36), (60, 2, 18), (4, 1, 1), (2, 1, 0)]
)
def test_the_budget_leaves_memory_to_others(monkeypatch, available_gib, ranks, budget_gib):
    monkeypatch.setattr(host_memory, "read_available_bytes", lambda: available_gib * GIB)
    assert choose_budget(ranks) == pytest.approx(budget_gib * GIB)
