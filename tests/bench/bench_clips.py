"""AWQ's search for clippings: ours beside gptqmodel's own, on one linear layer, in the same run.

    python3 -m tests.bench.bench_clips --outputs 1024 --inputs 2816 [--device cuda:0]

Needs gptqmodel beside the training environment, as a node has it once it has made AWQ. Prints
seconds of either, their ratio, the memory that a GPU gave for it, and how many groups came out
alike.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from agents.quantizers.awq_by_gptqmodel import find_clips
from agents.quantizers.by_gptqmodel import let_few_cores_work

GROUP, TOKENS = 128, 512
TIMES = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outputs", type=int, default=1024)
    parser.add_argument("--inputs", type=int, default=2816)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    let_few_cores_work()
    from gptqmodel.looper.awq_processor import AWQProcessor

    settings = SimpleNamespace(group_size=GROUP, sym=False, bits=4)
    engine = SimpleNamespace(qcfg=settings)

    def round_into(source: Tensor, target: Tensor) -> None:
        AWQProcessor._pseudo_quantize_tensor_into(engine, source, target)

    engine._pseudo_quantize_tensor_into = round_into
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(args.outputs, args.inputs, generator=draw) * 0.02
    inputs = torch.randn(TOKENS, args.inputs, generator=draw)
    weight, inputs = (one.to(args.device, torch.bfloat16) for one in (weight, inputs))
    theirs_s, theirs_bytes, theirs = measure(
        args.device, lambda: AWQProcessor._compute_best_clip(engine, weight, inputs)
    )
    ours_s, ours_bytes, ours = measure(
        args.device, lambda: find_clips(weight, inputs, GROUP, round_into)
    )
    alike = (ours == theirs.view_as(ours)).double().mean()
    print(f"gptqmodel {theirs_s:.3f} s, ours {ours_s:.3f} s: {theirs_s / ours_s:.1f} times as fast")
    print(f"{100 * alike:.1f} % of the groups are clipped alike")
    if args.device != "cpu":
        print(f"memory: gptqmodel {theirs_bytes / 1e6:,.0f} MB, ours {ours_bytes / 1e6:,.0f} MB")
    return 0


def measure(device: str, work: Callable[[], Any]) -> tuple[float, int, Any]:
    """Return the least seconds of some, the most bytes of a GPU, and what came out."""
    best_s, peak_bytes, made = float("inf"), 0, None
    for _ in range(TIMES):
        if device != "cpu":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        started = time.perf_counter()
        made = work()
        if device != "cpu":
            torch.cuda.synchronize()
            peak_bytes = max(peak_bytes, torch.cuda.max_memory_allocated() - before)
        best_s = min(best_s, time.perf_counter() - started)
    return best_s, peak_bytes, made


if __name__ == "__main__":
    sys.exit(main())
