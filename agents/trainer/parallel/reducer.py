"""Sum the gradients of all ranks, bucket by bucket, during the last backward pass.

A bucket is sent when its last gradient is final in the last micro-batch. Every rank sends the
buckets in the same order; a rank without work, or with another order of completion, only sends them
later. The layout alone fixes which values are summed in one collective, so timing does not change
the sums.

If memory runs out after some buckets were sent, the other ranks already rely on them. Their sums
are saved, the rest is computed again and sent, and the saved sums are restored at the end.
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
    """Sums the gradients of one bucket over all ranks."""

    overlaps: bool
    """True if `start` may be called while other gradients are still computed."""
    is_lossy: bool
    """True if the sums are inexact; a single rank then has to lose what several would."""

    def start(self, index: int, gradients: Tensor, divisor: float) -> Finish:
        """Start the sum in place; the returned function waits for it.

        Args:
            index: number of the bucket.
            gradients: gradients of this rank, flat; not to be touched before the wait returns.
            divisor: later divisor of the sum. Carried errors are kept in units of the quotient,
                since the divisor differs from step to step.
        """
        ...

    def exchange_carried(self) -> dict[str, Tensor]:
        """Spread the state for later steps evenly over the ranks, and return it.

        All ranks call this together and get the same, so one of them can save it for all. The
        tensors belong to the transport and do not change until the next step.

        Raises:
            PeerLost: another rank is gone.
        """
        ...

    def load(self, carried: dict[str, Tensor]) -> None:
        """Restore the state that `exchange_carried` returned, on any number of ranks."""
        ...


class ExactTransport:
    """Sends the gradients unchanged."""

    overlaps = True
    is_lossy = False

    def __init__(self, group: Group) -> None:
        self._group = group

    def start(self, index: int, gradients: Tensor, divisor: float) -> Finish:
        """Start the sum in place."""
        return self._group.start_sum(gradients)

    def exchange_carried(self) -> dict[str, Tensor]:
        """Return nothing: no step leaves an error."""
        return {}

    def load(self, carried: dict[str, Tensor]) -> None:
        """Do nothing: no error is carried."""


class Reducer:
    """Owns the hooks on the parameters and the sums in flight; a `GradientOverlap`."""

    def __init__(
        self, flat: FlatParameters, transport: GradientTransport, *, world_size: int
    ) -> None:
        self._flat = flat
        self._transport = transport
        self._shared = world_size > 1 or transport.is_lossy
        self._armed = False
        # Number of gradients of each bucket that are not final yet.
        self._missing: list[int] = []
        self._in_flight: list[Finish] = []
        # Sums of the first buckets, on the CPU while the others are computed again.
        self._saved: list[Tensor] = []
        self.divisor = 1.0
        """Divisor of the sums of this step."""
        # A single rank registers no hooks: it would send nothing, and each hook costs time.
        for index, bucket in enumerate(flat.buckets if self._shared else ()):
            for name in bucket.names:
                hook = partial(self._count_down, index)
                flat.parameters[name].register_post_accumulate_grad_hook(hook)

    def begin(self) -> None:
        """Prepare to compute the gradients of a step, for the first time or again.

        Sums that an earlier attempt started are finished and saved, which frees their part of the
        buffer.
        """
        self._armed = False
        # The other ranks wait for these collectives, so they are finished even though they come too
        # early.
        for finish in self._in_flight:
            finish()
            self._saved.append(self._part(len(self._saved)).to("cpu", copy=True))
        self._in_flight = []
        self._missing = [len(bucket.names) for bucket in self._flat.buckets]

    def arm(self) -> bool:
        """Announce that the next backward pass is the last; return whether it overlaps sends."""
        self._armed = self._shared and self._transport.overlaps
        return self._armed

    def finish(self) -> None:
        """Send the remaining buckets and wait until the flat buffer holds the sums.

        Raises:
            PeerLost: another rank is gone.
        """
        self._armed = False
        if not self._shared:
            return
        while self._num_sent < len(self._flat.buckets):
            self._send()
        for finish in self._in_flight:
            finish()
        for index, sums in enumerate(self._saved):
            self._part(index).copy_(sums)
        self._in_flight, self._saved = [], []

    def abandon(self) -> None:
        """Drop the step that the loss of a rank has ended, once its sums no longer write."""
        self._armed = False
        self._in_flight, self._saved = [], []

    @property
    def _num_sent(self) -> int:
        return len(self._saved) + len(self._in_flight)

    def _part(self, index: int) -> Tensor:
        bucket = self._flat.buckets[index]
        return self._flat.gradients[bucket.start : bucket.stop]

    def _count_down(self, index: int, _: Tensor) -> None:
        """Count a gradient of a bucket as final; send complete buckets in order."""
        if not self._armed:
            return
        # Strictly in the order of the layout: NCCL and Gloo match collectives by call order, and
        # another rank may complete its buckets in a different order.
        self._missing[index] -= 1
        while self._num_sent < len(self._missing) and self._missing[self._num_sent] == 0:
            self._send()

    def _send(self) -> None:
        index = self._num_sent
        self._in_flight.append(self._transport.start(index, self._part(index), self.divisor))
