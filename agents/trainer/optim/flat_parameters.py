"""All trained parameters, and their gradients, in one flat tensor each.

The parameters of the model become views into them. So a step has one buffer to zero, one norm, and
one tensor for the optimizer, for any number of layers. The layout is fixed by the model alone, so a
resumed run adds numbers in the same order as an uninterrupted one.

Parameters with weight decay (matrices) come first, the others (norms, biases) after them; each kind
in the order in which a backward pass finishes them, the last layer first. A bucket is a span of the
buffer that ends with a parameter: it can be sent while the pass still runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

Layout = Literal["sorted", "backward"]
"""Order of the parameters; checkpoints from before the buckets have theirs `sorted` by name."""
_MAX_BUCKETS = 8
# A smaller message takes as long as this one on a LAN of 1 Gb/s and 5 ms per collective.
_MIN_BUCKET_BYTES = 1 << 20
# Limit of the gradients of one micro-batch that are held to its end and then added in bulk.
_MAX_HELD_BYTES = 1 << 28
# Number of values of a block in a norm. On a CPU, in fp32: 1e-7 relative error and as fast as one
# pass; blocks of 2^20 have an error of 1e-5.
_NORM_BLOCK = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """A span of the flat buffer, final in a backward pass once all its parameters are."""

    start: int
    stop: int
    names: tuple[str, ...]


class TrainedParameters(Protocol):
    """Trained parameters of a rank, for passes over its part of a batch.

    A strategy places them: in one flat buffer, or as its engine needs them.
    """

    @property
    def layout(self) -> Layout:
        """Order of the parameters in the state of a checkpoint."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Parameters by name."""

    @property
    def adds_in_bulk(self) -> bool:
        """True if the gradients of a pass are held to its end and added with `add`; else autograd
        accumulates each one at once.
        """

    def zero_gradients(self) -> None:
        """Reset the gradients of a step to zero."""

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one backward pass, one for each of `parameters`, or None."""


class FlatParameters:
    """Storage of the trained parameters of one model, and of their gradients."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        device: torch.device,
        *,
        layout: Layout = "backward",
        min_bucket_bytes: int = _MIN_BUCKET_BYTES,
    ) -> None:
        """Move the parameters, given in the model's own order, into the buffer."""
        by_name = dict(named)
        names = order_names({name: parameter.dim() for name, parameter in named}, layout)
        ordered = [(name, by_name[name]) for name in names]
        dtype = ordered[0][1].dtype
        num_values = sum(parameter.numel() for _, parameter in ordered)
        self.layout = layout
        self.values = torch.empty(num_values, dtype=dtype, device=device)
        self.gradients = torch.zeros(num_values, dtype=dtype, device=device)
        self.parameters = dict(ordered)
        """Parameters by name, in the order of the buffer."""
        self.views: dict[str, Tensor] = {}
        """Part of `values` of each parameter, by name, in its own shape."""
        self.num_decayed = 0
        start = 0
        for name, parameter in ordered:
            stop = start + parameter.numel()
            view = self.values[start:stop].view_as(parameter)
            view.copy_(parameter.data)
            # The parameter stays the same object, which PEFT and hooks hold; its storage moves.
            parameter.data = view
            parameter.grad = self.gradients[start:stop].view_as(parameter)
            self.views[name] = view
            self.num_decayed = stop if parameter.dim() >= 2 else self.num_decayed
            start = stop
        sizes = {name: view.numel() for name, view in self.views.items()}
        # Rounded up, so that there are at most 8 buckets.
        minimum = max(1, min_bucket_bytes // dtype.itemsize, -(-num_values // _MAX_BUCKETS))
        self.buckets = cut_buckets(sizes, minimum)

    @property
    def adds_in_bulk(self) -> bool:
        """True if the gradients of a pass are small enough to hold them twice."""
        return self.gradients.nbytes <= _MAX_HELD_BYTES

    def zero_gradients(self) -> None:
        """Reset the gradients of a step to zero."""
        self.gradients.zero_()

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one backward pass, one for each of `parameters`, or None."""
        pairs = zip(self.parameters.values(), gradients, strict=True)
        pairs_to_add = [(parameter.grad, new) for parameter, new in pairs if new is not None]
        if pairs_to_add:
            # A few kernels for hundreds of small tensors.
            torch._foreach_add_(
                [into for into, _ in pairs_to_add], [new for _, new in pairs_to_add]
            )

    def groups(self, weight_decay: float) -> list[dict[str, object]]:
        """Return the optimizer's groups: one flat parameter with weight decay, one without."""
        cuts = ((slice(0, self.num_decayed), weight_decay), (slice(self.num_decayed, None), 0.0))
        groups: list[dict[str, object]] = []
        for cut, decay in cuts:
            # A view, so that a step of the optimizer changes the parameters of the model.
            parameter = nn.Parameter(self.values[cut])
            if parameter.numel():
                parameter.grad = self.gradients[cut]
                groups.append({"params": [parameter], "weight_decay": decay})
        return groups


def compute_norm(values: Tensor) -> Tensor:
    """Return the Euclidean norm of a flat tensor, a scalar of its type and on its device."""
    # On a CPU torch adds the squares in a few running sums, for any length: the norm of 134 million
    # fp32 values is 0.5 % too low, or worse, since late squares are lost in a large sum. Blocks
    # avoid that (1e-7) at no cost. A GPU adds in a tree, without such a loss.
    if values.is_cuda or values.numel() <= _NORM_BLOCK:
        return torch.linalg.vector_norm(values)
    blocks = [torch.linalg.vector_norm(block) for block in values.split(_NORM_BLOCK)]
    return torch.linalg.vector_norm(torch.stack(blocks))


def cut_buckets(sizes: dict[str, int], minimum: int) -> tuple[Bucket, ...]:
    """Cut parameters into buckets of at least `minimum` values; the last may have fewer.

    >>> [(b.start, b.stop) for b in cut_buckets({"c": 4, "b": 4, "a": 4}, 5)]
    [(0, 8), (8, 12)]
    """
    buckets: list[Bucket] = []
    names: list[str] = []
    start = stop = 0
    for name, size in sizes.items():
        names.append(name)
        stop += size
        if stop - start >= minimum:
            buckets.append(Bucket(start=start, stop=stop, names=tuple(names)))
            names, start = [], stop
    if names:
        buckets.append(Bucket(start=start, stop=stop, names=tuple(names)))
    return tuple(buckets)


def order_names(num_dims: Mapping[str, int], layout: Layout) -> list[str]:
    """Return the names of parameters in the order of the buffer.

    Args:
        num_dims: number of dimensions of each parameter by name, in the model's own order.
        layout: layout of the buffer.

    >>> order_names({"norm": 1, "first": 2, "second": 2}, "backward")
    ['second', 'first', 'norm']
    """
    if layout == "sorted":
        return sorted(num_dims, key=lambda name: (num_dims[name] < 2, name))
    return sorted(reversed(list(num_dims)), key=lambda name: num_dims[name] < 2)
