"""Messages between replicas of a pipeline: gradients and states.

Replicas may be cut differently, so gradients are summed per stretch of layers by the ranks that
hold it. Each rank sends its gradients to all other holders and adds in the order of the replicas.
So all get bit-equal sums, and a group of two sends no more bytes than a ring would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from agents.trainer.optim.flat_parameters import FlatParameters
from agents.trainer.parallel.pipeline.cut import Replicas
from agents.trainer.parallel.pipeline.whole_state import NUM_ROWS, WholeState
from agents.trainer.rank.group import Group

# First tag of these messages; those of micro-batches are lower.
_TAG = 1 << 20


class Stretches:
    """Parameters of this rank per stretch of layers, with the other ranks that hold them.

    Args:
        group: all ranks.
        replicas: stages of all ranks.
        flat: trained parameters of this rank.
        layers: index of the layer of each parameter, by name.
    """

    def __init__(
        self, group: Group, replicas: Replicas, flat: FlatParameters, layers: Mapping[str, int]
    ) -> None:
        self._group = group
        self._flat = flat
        # Number, holders and spans in the buffer of each stretch that another rank holds, too.
        self._mine: list[tuple[int, tuple[int, ...], list[slice]]] = []
        for number, stretch in enumerate(replicas.stretches()):
            spans = _find_spans(flat, layers, stretch.first, stretch.stop)
            if group.rank in stretch.holders and len(stretch.holders) > 1 and spans:
                self._mine.append((number, stretch.holders, spans))

    def sum_gradients(self) -> None:
        """Sum the gradients of all replicas, in place.

        Raises:
            PeerLost: another rank is gone.
        """
        for number, holders, spans in self._mine:
            packed = torch.cat([self._flat.gradients[span] for span in spans])
            parts = _exchange_all(self._group, packed, holders, number)
            # In the order of the replicas on every rank: float sums depend on the order.
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            _unpack(self._flat.gradients, spans, total)

    def copy_from_first(self, rows: Sequence[Tensor]) -> None:
        """Replace numbers of this rank by those of the first replica, in place.

        Args:
            rows: numbers of all parameters of this rank, each in the order of its buffer.

        Raises:
            PeerLost: another rank is gone.
        """
        for number, holders, spans in self._mine:
            for place, row in enumerate(rows):
                tag = NUM_ROWS * number + place
                packed = torch.cat([row[span] for span in spans])
                if holders[0] == self._group.rank:
                    message = packed.cpu()
                    _wait_all([_start_send(self._group, message, to, tag) for to in holders[1:]])
                else:
                    _unpack(row, spans, _receive(self._group, packed, holders[0], tag))


def gather(
    group: Group,
    replicas: Replicas,
    rows: Sequence[Tensor],
    names: Mapping[int, Sequence[str]],
    writers: Sequence[int],
    state: WholeState | None,
) -> None:
    """Bring the state of the first replica to the ranks that write it.

    Args:
        group: all ranks.
        replicas: stages of all ranks.
        rows: numbers of this rank's parameters; see `read_rows`.
        names: parameters of each rank of the first replica, in the order of its buffer.
        writers: ranks that write.
        state: destination of the numbers if this rank writes, else None.

    Raises:
        PeerLost: another rank is gone.
    """
    for stage in replicas.rows[0]:
        for row in range(len(rows)):
            if group.rank == stage.rank:
                message = rows[row].cpu()
                if state is not None:
                    state.put(row, names[stage.rank], message)
                others = [writer for writer in writers if writer != stage.rank]
                _wait_all([_start_send(group, message, to, row) for to in others])
            elif state is not None:
                like = rows[row].new_empty(state.count(names[stage.rank]))
                received = _receive(group, like, stage.rank, row)
                state.put(row, names[stage.rank], received.cpu())


def _find_spans(
    flat: FlatParameters, layers: Mapping[str, int], first: int, stop: int
) -> list[slice]:
    """Return the spans in the buffer of the parameters of layers `first` to `stop` - 1."""
    # Layers of a stretch need not be adjacent in the buffer: vectors lie after all matrices.
    spans, start = [], 0
    for name, view in flat.views.items():
        end = start + view.numel()
        if first <= layers[name] < stop:
            spans.append(slice(start, end))
        start = end
    return spans


def _exchange_all(group: Group, mine: Tensor, holders: Sequence[int], tag: int) -> list[Tensor]:
    """Return the tensors of all holders in their order; each holder sends its own to the others."""
    found = {group.rank: mine}
    # Gloo sends from host memory alone.
    message = mine.cpu()
    waits: list[Callable[[], None]] = []
    for other in holders:
        if other != group.rank:
            found[other], wait = _start_receive(group, mine, other, tag)
            waits += [wait, _start_send(group, message, other, tag)]
    _wait_all(waits)
    return [found[holder].to(mine.device) for holder in holders]


def _unpack(row: Tensor, spans: Sequence[slice], packed: Tensor) -> None:
    parts = packed.split([span.stop - span.start for span in spans])
    for span, part in zip(spans, parts, strict=True):
        row[span] = part


def _start_send(group: Group, message: Tensor, to: int, tag: int) -> Callable[[], None]:
    wait = group.start_send(message, to, tag=_TAG + tag)

    # The default keeps the message alive: Gloo reads its memory until the wait returns.
    def finish(kept: Tensor = message) -> None:
        wait()

    return finish


def _receive(group: Group, like: Tensor, source: int, tag: int) -> Tensor:
    """Return the message of a rank, with the shape and device of `like`."""
    message, wait = _start_receive(group, like, source, tag)
    wait()
    return message.to(like.device)


def _start_receive(
    group: Group, like: Tensor, source: int, tag: int
) -> tuple[Tensor, Callable[[], None]]:
    """Return the buffer of a message, and a function that waits until it has arrived."""
    message = torch.empty_like(like, device="cpu")
    return message, group.start_receive(message, source, tag=_TAG + tag)


def _wait_all(waits: Sequence[Callable[[], None]]) -> None:
    for wait in waits:
        wait()
