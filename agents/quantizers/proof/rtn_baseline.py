"""Round to nearest: the control that a quantizer has to beat.

Every linear weight but the head's is rounded to 4 bits in groups of 128 with a zero point, with no
calibration at all. A method whose result is further from the original than this has damaged it.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor, nn

BITS = 4
GROUP = 128


def round_weights(model: Any, bits: int = BITS, group: int = GROUP) -> int:
    """Round the linear weights of `model` in place; return how many.

    The head stays, as in every method that it is compared with. Weights that come to the device for
    each pass (see `models.load_model`) are rounded whenever they have come.
    """
    head = model.get_output_embeddings()
    count = 0
    with torch.no_grad():
        for module in model.modules():
            if not isinstance(module, nn.Linear) or module is head:
                continue
            if module.weight.is_meta:
                add_hook_to_module(module, _Rounding(bits, group), append=True)
            else:
                module.weight.copy_(round_to_nearest(module.weight, bits, group))
            count += 1
    return count


class _Rounding(ModelHook):
    def __init__(self, bits: int, group: int) -> None:
        self._bits, self._group = bits, group

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        # Not in place: on a CPU what has come shares its memory with what it came of.
        module.weight.data = round_to_nearest(module.weight.data, self._bits, self._group)
        return args, kwargs


def round_to_nearest(weight_OI: Tensor, bits: int = BITS, group: int = GROUP) -> Tensor:
    """Return weights (O, I) as they come back from integers of `bits` with a zero point per group.

    A row whose length is no multiple of `group` has a shorter last group.

    >>> round_to_nearest(torch.tensor([[0.0, 1.0, 7.4, 15.0]])).tolist()
    [[0.0, 1.0, 7.0, 15.0]]
    """
    parts = [_round(part_OG, bits) for part_OG in weight_OI.float().split(group, dim=1)]
    return torch.cat(parts, dim=1).to(weight_OI.dtype)


def _round(part_OG: Tensor, bits: int) -> Tensor:
    most = 2**bits - 1
    # The range always includes 0, so that zero weights stay exactly 0.
    low_O1 = part_OG.amin(dim=1, keepdim=True).clamp(max=0)
    high_O1 = part_OG.amax(dim=1, keepdim=True).clamp(min=0)
    scale_O1 = ((high_O1 - low_O1) / most).clamp(min=torch.finfo(torch.float32).tiny)
    zero_O1 = (-low_O1 / scale_O1).round()
    whole_OG = (part_OG / scale_O1 + zero_O1).round().clamp(0, most)
    return (whole_OG - zero_O1) * scale_O1
