"""AWQ's searches for clippings and for scales: ours beside gptqmodel's own, in the same run.

    python3 -m tests.bench.bench_awq_search --outputs 1024 --inputs 2816 [--device cuda:0]

Clippings of one linear layer by 512 tokens, scales of two that share their inputs (as gate and up
do) by `--tokens`. Needs gptqmodel beside the training environment, as a node has it once it has
made AWQ. Prints seconds of either, their ratio, the memory that a GPU gave for it, and whether the
same came out.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from agents.quantizers.formats.awq_by_gptqmodel import find_clips, find_scales
from agents.quantizers.formats.by_gptqmodel import let_few_cores_work

GROUP, TOKENS, ROW, ROWS_AT_ONCE = 128, 512, 256, 8
TIMES = 3
Measured = tuple[float, int, Any]


class Gated(nn.Module):  # type: ignore[misc, unused-ignore]
    """Two layers with one input, as in the middle of a decoder layer."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(inputs, outputs, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(self.gate(x)) * self.up(x)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outputs", type=int, default=1024)
    parser.add_argument("--inputs", type=int, default=2816)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    let_few_cores_work()
    from gptqmodel.looper.awq_processor import AWQProcessor

    engine = object.__new__(AWQProcessor)
    engine.qcfg = SimpleNamespace(group_size=GROUP, sym=False, bits=4)
    engine.duo_scaling, engine.max_chunk_memory = True, 1 << 30
    engine._scale_context, engine._quant_batch_size = threading.local(), ROWS_AT_ONCE
    engine._get_root_rotary, engine.gptq_model = lambda: None, None
    for search in (compare_clips, compare_scales):
        theirs, ours, alike = search(engine, args)
        print(f"{search.__name__.removeprefix('compare_')}: {describe(theirs, ours, args.device)}")
        print(f"  {alike}")
    return 0


def compare_clips(engine: Any, args: argparse.Namespace) -> tuple[Measured, Measured, str]:
    """Return what either took for the clippings of one layer, and how many are alike."""
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(args.outputs, args.inputs, generator=draw) * 0.02
    inputs = torch.randn(TOKENS, args.inputs, generator=draw)
    weight, inputs = (one.to(args.device, torch.bfloat16) for one in (weight, inputs))
    round_into = engine._pseudo_quantize_tensor_into
    theirs = measure(args.device, lambda: engine._compute_best_clip(weight, inputs))
    ours = measure(args.device, lambda: find_clips(weight, inputs, GROUP, round_into))
    alike = (ours[2] == theirs[2].view_as(ours[2])).double().mean()
    return theirs, ours, f"{100 * alike:.1f} % of the groups are clipped alike"


def compare_scales(engine: Any, args: argparse.Namespace) -> tuple[Measured, Measured, str]:
    """Return what either took for the scales of two layers, and whether they are the same."""
    torch.manual_seed(1)
    block = Gated(args.inputs, args.outputs).to(args.device, torch.bfloat16).requires_grad_(False)
    num_rows = -(-args.tokens // ROW)
    x = torch.randn(num_rows, ROW, args.inputs).bfloat16()  # in host memory, as theirs
    x[..., ::13] *= 20
    with torch.inference_mode():
        wanted = [one.cpu() for one in engine._iter_module_forward_outputs(x, block, {})]
    given = x, torch.rand(args.inputs), x.abs().float().mean((0, 1)).bfloat16(), block
    layers = [block.gate, block.up]
    theirs = measure(
        args.device, lambda: engine._compute_best_scale(*given, layers, wanted, {}), times=1
    )
    ours = measure(args.device, lambda: find_scales(engine, *given, layers, wanted, {}), times=1)
    alike = torch.equal(ours[2][0], theirs[2][0]) and ours[2][1] == theirs[2][1]
    return theirs, ours, "the same to the bit" if alike else "NOT the same"


def describe(theirs: Measured, ours: Measured, device: str) -> str:
    """Return a line of both."""
    said = f"gptqmodel {theirs[0]:.3f} s, ours {ours[0]:.3f} s: {theirs[0] / ours[0]:.1f} times"
    if device == "cpu":
        return said
    return f"{said}; memory {theirs[1] / 1e6:,.0f} MB and {ours[1] / 1e6:,.0f}"


def measure(device: str, work: Callable[[], Any], times: int = TIMES) -> Measured:
    """Return the least seconds of some, the most bytes of a GPU, and what came out."""
    best_s, peak_bytes, made = float("inf"), 0, None
    for _ in range(times):
        before = 0
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
