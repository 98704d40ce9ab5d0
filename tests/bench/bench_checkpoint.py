"""How long a checkpoint stops the training, beside a save that waits for the disk, in one run.

The state is that of a LoRA of an 8B model with its optimizer: three float32 values for each of
`--million` parameters. Prints seconds of the copy to the host (all that a step waits for), of the
one that allocates (after the first step, long before the first save), of the first save, and of
copy, write, hash and fsync together, with the ratio.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from torch import nn

from agents.node.files import describe_file
from agents.state import sync_file
from agents.trainer.checkpoint.state import HostCopy
from agents.trainer.optim.flat_parameters import FlatParameters
from agents.trainer.optim.optimizer import export_state, make_optimizer
from agents.trainer.parallel.state_digest import digest
from agents.trainer.parallel.strategy import TrainedState

ROWS = 64
SETTINGS = SimpleNamespace(optimizer="adamw", learning_rate=1e-4, weight_decay=0.0)


def make_state(
    million: float, device: torch.device
) -> tuple[FlatParameters, torch.optim.Optimizer]:
    """Return parameters of that many values, and their optimizer after one step."""
    each = int(million * 1e6) // ROWS // 64
    named = [(f"{n}.weight", nn.Parameter(torch.randn(64, each))) for n in range(ROWS)]
    flat = FlatParameters(named, device)
    optimizer = make_optimizer(SETTINGS, flat)  # type: ignore[arg-type]
    flat.gradients.normal_()
    optimizer.step()
    return flat, optimizer


def wait_for(device: torch.device) -> None:
    """Return when the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def stall(copy: HostCopy, flat: FlatParameters, optimizer: torch.optim.Optimizer) -> float:
    """Compare by digest and copy, as a step does at a save; return seconds."""
    wait_for(flat.values.device)
    start_s = time.perf_counter()
    tensors, plain = export_state(optimizer)
    digest([flat.values, *(t for t in tensors.values() if t.dim())]).tolist()
    copy.take(TrainedState(parameters=flat, optimizer=tensors, plain=plain, carried={}))
    return time.perf_counter() - start_s


def write(copy: HostCopy, folder: Path) -> float:
    """Write, sync and hash as a commit does; return seconds."""
    start_s = time.perf_counter()
    for name, tensors in (("model", copy.values), ("optimizer", copy.optimizer)):
        path = folder / f"{name}.safetensors"
        save_file(tensors, path)
        sync_file(path)
        describe_file(folder, path)
    return time.perf_counter() - start_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--million", type=float, default=42.0, help="parameters")
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    device = torch.device(options.device)
    flat, optimizer = make_state(options.million, device)
    copy = HostCopy()
    ready_s = stall(copy, flat, optimizer)
    first_s = stall(copy, flat, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        rounds = [
            (stall(copy, flat, optimizer), write(copy, Path(folder))) for _ in range(options.times)
        ]
    stall_s = statistics.median(item[0] for item in rounds)
    blocking_s = statistics.median(sum(item) for item in rounds)
    size = sum(t.nbytes for t in (flat.values, *copy.optimizer.values()))
    print(f"{device}: {size / 1e9:.2f} GB of state, {options.times} saves, medians")
    print(f"stall {stall_s * 1e3:.1f} ms, first save {first_s * 1e3:.1f} ms")
    print(f"getting the memory for it, after the first step: {ready_s * 1e3:.1f} ms")
    print(f"a save that waits for the disk: {blocking_s * 1e3:.1f} ms, {blocking_s / stall_s:.1f}x")


if __name__ == "__main__":
    main()
