"""Sum the gradients of all ranks, bucket by bucket, while the last backward pass still runs.

A bucket is sent as soon as its last gradient is final in the last micro-batch; every rank sends the
buckets in the same order, so a rank that has no work, or that finishes them in another order, only
sends them later. The sums are the same whether a rank was early or late: which values meet in one
collective is fixed by the layout, never by time.

When memory runs out after some buckets were sent, the other ranks already count on them. Those sums
are saved, the rest is computed again and sent, and at the end the saved sums are restored.
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
    """Whether `start` may be called while other gradients are still computed."""
    is_lossy: bool
    """Whether the sums are not exact; a single rank then has to lose what several would."""

    def start(self, index: int, gradients: Tensor, divisor: float) -> Finish:
        """Begin to sum in place; the returned function waits for the sum.

        Args:
            index: number of the bucket.
            gradients: those of this rank, flat; not to be touched before the wait has returned.
            divisor: number that the sum will be divided by. What is carried to other steps is kept
                in units of the quotient, since the divisor differs from step to step.
        """
        ...

    def exchange_carried(self) -> dict[str, Tensor]:
        """Spread evenly over the ranks what is carried to later steps, and return it.

        All ranks call this together and get the same, so one of them can save it for all. The
        tensors still belong to the transport, and stay as they are until the next step.

        Raises:
            PeerLost: another rank has gone.
        """
        ...

    def load(self, carried: dict[str, Tensor]) -> None:
        """Continue with what `exchange_carried` returned, on any number of ranks."""
        ...


class ExactTransport:
    """Sends the gradients as they are."""

    overlaps = True
    is_lossy = False

    def __init__(self, group: Group) -> None:
        self._group = group

    def start(self, index: int, gradients: Tensor, divisor: float) -> Finish:
        """Begin to sum in place."""
        return self._group.start_sum(gradients)

    def exchange_carried(self) -> dict[str, Tensor]:
        """Return nothing: no step leaves a rest."""
        return {}

    def load(self, carried: dict[str, Tensor]) -> None:
        """Do nothing: there is no rest."""


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
        # Sums of the first buckets, on the CPU while the rest is computed again.
        self._saved: list[Tensor] = []
        self.divisor = 1.0
        """Number that the sums of this step will be divided by."""
        # With one rank no hook is registered: nothing would be sent, and each costs time.
        for index, bucket in enumerate(flat.buckets if self._shared else ()):
            for name in bucket.names:
                hook = partial(self._count_down, index)
                flat.parameters[name].register_post_accumulate_grad_hook(hook)

    def begin(self) -> None:
        """Prepare for an attempt at the gradients of a step: the first one, or a repeat.

        What an earlier attempt has sent is waited for and saved; its place in the buffer is free.
        """
        self._armed = False
        # The other ranks wait for these sums, so they are finished, though not needed now.
        for finish in self._in_flight:
            finish()
            self._saved.append(self._part(len(self._saved)).to("cpu", copy=True))
        self._in_flight = []
        self._missing = [len(bucket.names) for bucket in self._flat.buckets]

    def arm(self) -> bool:
        """Announce that the next backward pass is the last one; return whether it reports."""
        self._armed = self._shared and self._transport.overlaps
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
        for finish in self._in_flight:
            finish()
        for index, sums in enumerate(self._saved):
            self._part(index).copy_(sums)
        self._in_flight, self._saved = [], []

    def abandon(self) -> None:
        """Forget the step whose sums another rank's loss has ended, once they write no more."""
        self._armed = False
        self._in_flight, self._saved = [], []

    @property
    def _num_sent(self) -> int:
        return len(self._saved) + len(self._in_flight)

    def _part(self, index: int) -> Tensor:
        bucket = self._flat.buckets[index]
        return self._flat.gradients[bucket.start : bucket.stop]

    def _count_down(self, index: int, _: Tensor) -> None:
        """Count a gradient of a bucket as final; send the buckets that are complete, in order."""
        if not self._armed:
            return
        # Strictly in the order of the layout: NCCL and Gloo match collectives by their order, and
        # another rank may finish its buckets in another one.
        self._missing[index] -= 1
        while self._num_sent < len(self._missing) and self._missing[self._num_sent] == 0:
            self._send()

    def _send(self) -> None:
        index = self._num_sent
        self._in_flight.append(self._transport.start(index, self._part(index), self.divisor))
