"""Sum the gradients of all ranks, bucket by bucket, while the last backward pass still runs.

A bucket is sent as soon as its last gradient is final in the last micro-batch; every rank sends the
buckets in the same order, so a rank that has no work, or that finishes them in another order, only
sends them later. The sums are the same whether a rank was early or late: which values meet in one
collective is fixed by the layout, never by time.

When memory runs out after some buckets were sent, the other ranks already count on them. Those sums
are put aside, the rest is computed again and sent, and at the end the sums are put back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor

from agents.trainer.optim.flat_parameters import FlatParameters
from agents.trainer.rank.group import Group

Finish = Callable[[], None]


class GradientTransport(Protocol):
    """How the gradients of one bucket become their sum over all ranks."""

    overlaps: bool
    """Whether `start` may come while other gradients are still computed."""
    is_lossy: bool
    """Whether the sums are not exact, so that they are made so with a single rank, too."""

    def start(self, index: int, gradients: Tensor, divisor: float) -> Finish:
        """Begin to sum in place; the answer waits for the sum.

        Args:
            index: which bucket.
            gradients: those of this rank, flat; untouched by others until the answer was called.
            divisor: what the sum will be divided by, the unit of what is carried to other steps.
        """
        ...

    def exchange_carried(self) -> dict[str, Tensor]:
        """Share out evenly what is carried to later steps, and return it; see `load`.

        All ranks call this together and get the same, so one of them can save it for all. What is
        returned stays the wire's own, and is as it is until the next step.

        Raises:
            PeerLost: another rank has gone.
        """
        ...

    def load(self, carried: dict[str, Tensor]) -> None:
        """Go on with what `exchange_carried` returned, on as many ranks as then or on others."""
        ...


class ExactTransport:
    """The gradients as they are."""

    overlaps = True
    is_lossy = False

    def __init__(self, group: Group) -> None:
        self._group = group

    def start(self, index: int, gradients: Tensor, divisor: float) -> Finish:
        """Begin to sum in place."""
        return self._group.start_sum(gradients)

    def exchange_carried(self) -> dict[str, Tensor]:
        """Return nothing: no step leaves anything over."""
        return {}

    def load(self, carried: dict[str, Tensor]) -> None:
        """Take nothing."""


class Reducer:
    """Owns the hooks on the parameters, and what is under way in the present step."""

    def __init__(self, flat: FlatParameters, wire: GradientTransport, *, world_size: int) -> None:
        self._flat = flat
        self._wire = wire
        self._shared = world_size > 1 or wire.is_lossy
        self._armed = False
        self._missing: list[int] = []
        """Gradients of each bucket that are not final yet."""
        self._under_way: list[Finish] = []
        self._kept: list[Tensor] = []
        """Sums of the first buckets, put aside while the rest is computed again."""
        self.divisor = 1.0
        """What the sums of this step will be divided by."""
        for index, bucket in enumerate(flat.buckets if self._shared else ()):
            for name in bucket.names:
                hook = partial(self._count_down, index)
                flat.parameters[name].register_post_accumulate_grad_hook(hook)

    def begin(self) -> None:
        """Get ready for a try to compute the step's gradients, the first one or another."""
        self._armed = False
        for finish in self._under_way:
            finish()
            self._kept.append(self._part(len(self._kept)).to("cpu", copy=True))
        self._under_way = []
        self._missing = [len(bucket.names) for bucket in self._flat.buckets]

    def arm(self) -> None:
        """Say that the next backward pass is the last one of this try."""
        self._armed = self._shared and self._wire.overlaps

    @property
    def is_armed(self) -> bool:
        """Whether the hooks on the parameters wait for their gradients."""
        return self._armed

    def finish(self) -> None:
        """Send what is not sent yet, and wait until the flat buffer holds the sums.

        Raises:
            PeerLost: another rank has gone.
        """
        self._armed = False
        if not self._shared:
            return
        while self._num_sent < len(self._flat.buckets):
            self._send()
        for finish in self._under_way:
            finish()
        for index, sums in enumerate(self._kept):
            self._part(index).copy_(sums)
        self._under_way, self._kept = [], []

    @property
    def _num_sent(self) -> int:
        return len(self._kept) + len(self._under_way)

    def _part(self, index: int) -> Tensor:
        bucket = self._flat.buckets[index]
        return self._flat.gradients[bucket.start : bucket.stop]

    def _count_down(self, index: int, _: Tensor) -> None:
        """Note that a gradient of a bucket is final; send what can be sent in order."""
        if not self._armed:
            return
        self._missing[index] -= 1
        while self._num_sent < len(self._missing) and self._missing[self._num_sent] == 0:
            self._send()

    def _send(self) -> None:
        index = self._num_sent
        self._under_way.append(self._wire.start(index, self._part(index), self.divisor))
