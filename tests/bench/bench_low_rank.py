"""The thin products of adapters on a GPU: ours beside PyTorch's, in the same run.

    python3 -m tests.bench.bench_low_rank [--rank 16] [--tokens 2048,4096,8192]

Queries, keys and values of a 7B (4,096 features), one layer alone, and gate and up (11,008). Each
is recorded as a CUDA graph, so that only the card is measured. Prints microseconds of either and
their ratio; `shrink` and `gather` of a single layer are left to PyTorch, and stand there to show
why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from agents.trainer.kernels import lora_kernels

SETS = ((4096, 4096, 4096), (4096,), (11008, 11008))
REPEATS, TIMES = 20, 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", default="2048,4096,8192")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no GPU here.", file=sys.stderr)
        return 1
    print(torch.cuda.get_device_name())
    for widths in SETS:
        for num_tokens in map(int, args.tokens.split(",")):
            compare(widths, num_tokens, args.rank)
    return 0


def compare(widths: tuple[int, ...], num_tokens: int, rank: int) -> None:
    """Print what each product of a set takes."""

    def make(*size: int) -> Tensor:
        return torch.randn(size, device="cuda").bfloat16()

    low, ups = make(num_tokens, rank * len(widths)), [make(width, rank) for width in widths]
    gradients = [make(num_tokens, width) for width in widths]
    parts = low.split(rank, dim=1)
    out = torch.empty_like(low)

    def shrink() -> None:
        for gradient, up, into in zip(gradients, ups, out.split(rank, 1), strict=True):
            torch.mm(gradient, up, out=into)

    wide = torch.float32
    pairs = {
        "expand": (
            lambda: [part @ up.T for part, up in zip(parts, ups, strict=True)],
            lambda: lora_kernels.expand(low, ups),
        ),
        "shrink": (shrink, lambda: lora_kernels.differentiate_low(gradients, ups)),
        "gather": (
            lambda: [
                torch.mm(gradient.T, part, out_dtype=wide)
                for gradient, part in zip(gradients, parts, strict=True)
            ],
            lambda: lora_kernels.differentiate_ups(gradients, low, ups, 1.0, wide),
        ),
    }
    for name, (plain, ours) in pairs.items():
        plain_us, ours_us = measure(plain), measure(ours)
        print(
            f"{num_tokens} tokens, {widths}, {name}: PyTorch {plain_us:.1f} us, "
            f"ours {ours_us:.1f}: {plain_us / ours_us:.2f} times"
        )


def measure(work: Callable[[], object]) -> float:
    """Return the least microseconds."""
    work()
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best_ms = float("inf")
    for _ in range(TIMES):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best_ms = min(best_ms, begin.elapsed_time(end) / REPEATS)
    return best_ms * 1e3


if __name__ == "__main__":
    sys.exit(main())
