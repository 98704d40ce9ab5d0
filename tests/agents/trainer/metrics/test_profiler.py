"""What a profile is made of: own times, the longest first, and kernels where there is a GPU."""

from __future__ import annotations

import gzip
import json

import pytest
import torch

from agents.trainer.metrics.profiler import (
    own_times,
    rank_rows,
    start_profile,
    summarise,
    write_trace,
)


def test_time_of_what_was_called_counts_once_and_threads_stay_apart():
    operations = [
        (1, 0, 100, "outer"),
        (1, 10, 40, "inner"),
        (1, 20, 10, "deep"),
        (1, 60, 20, "inner"),
        (1, 100, 5, "after"),
        (2, 0, 50, "other"),
    ]
    total: dict[str, int] = {}
    for name, own_ns in own_times(operations):
        total[name] = total.get(name, 0) + own_ns
    assert total == {"outer": 40, "inner": 50, "deep": 10, "after": 5, "other": 50}


def test_long_names_are_cut_and_nothing_is_a_table_too():
    assert rank_rows([]) == []
    (row,) = rank_rows([("x" * 500, 7)])
    assert (len(row.name), row.count, row.seconds, row.share) == (120, 1, 7e-9, 1.0)
    assert len(rank_rows([(str(number), number) for number in range(50)])) == 10


@pytest.mark.gpu
def test_a_profile_of_a_gpu_names_its_kernels(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    device = torch.device("cuda")
    values = torch.randn(1024, 1024, device=device)
    made = start_profile(device)
    for _ in range(20):
        values = (values @ values).tanh()
    torch.cuda.synchronize()
    made.stop()
    path = tmp_path / "trace.json.gz"
    assert write_trace(made, path) == path.stat().st_size
    rows = summarise(made)
    assert any("gemm" in row.name.lower() for row in rows)
    assert not any(row.name.startswith("aten::") for row in rows), "kernels, not operations"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert sum(event.get("cat") == "kernel" for event in events) >= 40
