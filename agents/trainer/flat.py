"""All trained parameters, and their gradients, in one flat tensor each.

The parameters of the model become views into them. So a step has one buffer to zero, one to
all-reduce, one norm, and one tensor for the optimizer, whatever the number of layers; and since the
layout is fixed by names, a resumed run adds numbers up in the same order as an uninterrupted one.
Parameters that take weight decay (matrices) come first, the others (norms, biases) after them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class FlatParameters:
    """Own the storage of the trained parameters of one model."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], device: torch.device) -> None:
        ordered = sorted(named, key=lambda item: (item[1].dim() < 2, item[0]))
        dtype = ordered[0][1].dtype
        num_values = sum(parameter.numel() for _, parameter in ordered)
        self.values = torch.empty(num_values, dtype=dtype, device=device)
        self.gradients = torch.zeros(num_values, dtype=dtype, device=device)
        self.views: dict[str, Tensor] = {}
        """Name of each parameter -> its part of `values`, in its own shape."""
        self.num_decayed = 0
        start = 0
        for name, parameter in ordered:
            stop = start + parameter.numel()
            view = self.values[start:stop].view_as(parameter)
            view.copy_(parameter.data)
            parameter.data = view
            parameter.grad = self.gradients[start:stop].view_as(parameter)
            self.views[name] = view
            self.num_decayed = stop if parameter.dim() >= 2 else self.num_decayed
            start = stop

    def groups(self, weight_decay: float) -> list[dict[str, object]]:
        """Return the optimizer's parameter groups: one flat parameter for each kind of decay."""
        cuts = ((slice(0, self.num_decayed), weight_decay), (slice(self.num_decayed, None), 0.0))
        groups: list[dict[str, object]] = []
        for cut, decay in cuts:
            parameter = nn.Parameter(self.values[cut])
            if parameter.numel():
                parameter.grad = self.gradients[cut]
                groups.append({"params": [parameter], "weight_decay": decay})
        return groups
