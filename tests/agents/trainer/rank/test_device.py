"""How much of a GPU a rank lets itself take."""

import platform

import pytest
import torch

from agents.trainer.rank.device import limit_memory

GIB = 2**30


@pytest.mark.parametrize(
    ("system", "most_gib", "expected"),
    [
        ("6.1.0-amd64", None, None),
        ("6.1.0-amd64", 6.0, 0.5),
        ("6.1.0-amd64", 16.0, None),
        ("5.15.153.1-microsoft-standard-WSL2", None, 0.75),
        ("5.15.153.1-microsoft-standard-WSL2", 6.0, 0.5),
        ("5.15.153.1-microsoft-standard-WSL2", 11.0, 0.75),
    ],
)
def test_no_more_is_taken_than_is_there(system, most_gib, expected, monkeypatch):
    shares = []
    monkeypatch.setattr(platform, "release", lambda: system)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (9 * GIB, 12 * GIB))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: shares.append(share)
    )
    limit_memory(torch.device("cpu"), most_gib)
    assert shares == []
    limit_memory(torch.device("cuda", 0), most_gib)
    assert shares == ([] if expected is None else [expected])
