"""Quantize layers by gptqmodel's GPTQ, as it is and as exports mend it; print how they compare.

`python -m tests.agents.quantizers.both_gptq`, with gptqmodel on the path: a JSON line per layer.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from agents.quantizers.formats.by_gptqmodel import let_few_cores_work
from agents.quantizers.formats.gptq_by_gptqmodel import mended_gptq
from tests.draws import seed

NUM_INPUTS, OUTPUTS = 512, (256, 128)
NAMES = ("weight", "scales", "zeros", "groups")


def main() -> None:
    """Print the share of equal values of each result, and both losses, of layers on one input."""
    let_few_cores_work()
    torch.set_num_threads(1)
    torch.manual_seed(seed(2))
    mix = torch.randn(NUM_INPUTS, NUM_INPUTS) / NUM_INPUTS**0.5
    batches = [
        (torch.randn(1, 100 + length, NUM_INPUTS) @ mix * (1 + 3 * torch.rand(NUM_INPUTS)))
        .bfloat16()
        .index_fill_(2, torch.tensor([5]), 0.0)
        for length in range(8)
    ]
    weights = [0.05 * torch.randn(outputs, NUM_INPUTS) for outputs in OUTPUTS]
    usual, mended = (_quantize(weights, batches, is_mended=mend) for mend in (False, True))
    for one, other in zip(usual, mended, strict=True):
        pairs = zip(NAMES, one[:4], other[:4], strict=True)
        same = {name: float(a.isclose(b, rtol=1e-5).double().mean()) for name, a, b in pairs}
        print(json.dumps({**same, "losses": (one[5], other[5]), "damping": (one[6], other[6])}))


def _quantize(weights: list[Tensor], batches: list[Tensor], *, is_mended: bool) -> list[Any]:
    from gptqmodel import QuantizeConfig
    from gptqmodel.quantization.gptq import GPTQ, SharedHessianFactorCache

    with mended_gptq() if is_mended else nullcontext():
        tasks = []
        for weight in weights:
            layer = nn.Linear(NUM_INPUTS, len(weight), bias=False, dtype=torch.bfloat16)
            layer.weight.data = weight.bfloat16()
            task = GPTQ(layer, QuantizeConfig(bits=4, group_size=64, offload_to_disk=False))
            task.quantizer.configure(perchannel=True)
            tasks.append(task)
        leader, follower = tasks
        with torch.inference_mode():
            for batch in batches:
                leader.add_batch(batch, None)
        follower.adopt_hessian_from(leader)
        cache = SharedHessianFactorCache(1, "leader")
        for task in tasks:
            task.attach_shared_hessian_cache(cache)
        return [task.quantize() for task in tasks]


if __name__ == "__main__":
    main()
