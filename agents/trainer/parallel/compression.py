"""Lossy compression of gradients for slow links; never the default.

The error of a step stays on its rank and is added to the gradients of the next step (error
feedback: Karimireddy et al. 2019, arXiv:1901.09847), in units of the batch's mean. Later steps
depend only on the sum over the ranks. A checkpoint therefore sums the errors exactly and gives
every rank an equal part, so one rank can save it for all. A resumed run is bit-equal to an
uninterrupted one if both save at the same steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agents.contract.spec import Compression
from agents.trainer.optim.flat_parameters import FlatParameters
from agents.trainer.parallel.reducer import ExactTransport, Finish, GradientTransport
from agents.trainer.rank.group import Group

# Rank of PowerSGD's approximation: Vogels et al. 2019 (arXiv:1905.13727) need 1 to 4.
_RANK = 4
# Minimum compression ratio; other matrices are sent uncompressed (torch: `min_compression_rate`).
_MIN_SAVING = 2
# Avoids a division by zero for a column of zeros.
_EPSILON = 1e-8
# Names of tensors in checkpoints; saved runs depend on them.
_ERROR, _RANKS = "kept", "num_ranks"


def make_transport(
    kind: Compression, flat: FlatParameters, group: Group, seed: int
) -> GradientTransport:
    """Return the transport that a spec names.

    Args:
        kind: value of `compression` in the spec.
        flat: parameters whose gradients are sent.
        group: all ranks.
        seed: seed of PowerSGD's first factors.
    """
    if kind == "bf16":
        return Bf16Transport(flat, group)
    if kind == "powersgd":
        return PowerSgdTransport(flat, group, seed)
    return ExactTransport(group)


class CarriedError:
    """Accumulated compression error of this rank, one value per gradient; zero at first."""

    def __init__(self, flat: FlatParameters, group: Group) -> None:
        self._group = group
        self._whole = torch.zeros_like(flat.gradients)
        self._parts = [self._whole[bucket.start : bucket.stop] for bucket in flat.buckets]

    def add_to(self, index: int, gradients: Tensor, divisor: float) -> Tensor:
        """Add the error of a bucket to its gradients; return the buffer for the new error."""
        gradients.add_(self._parts[index], alpha=divisor)
        return self._parts[index]

    def exchange_carried(self) -> dict[str, Tensor]:
        """Give every rank an equal part of the summed error; return that part and the number of
        parts.
        """
        self._group.sum(self._whole)
        self._whole.div_(self._group.world_size)
        return {_ERROR: self._whole, _RANKS: torch.tensor(float(self._group.world_size))}

    def load(self, carried: dict[str, Tensor]) -> None:
        """Restore this rank's part from `exchange_carried`, for any number of ranks."""
        if _ERROR in carried:
            self._whole.copy_(carried[_ERROR])
            # The saved part was 1/N of the sum for the N ranks of that time.
            self._whole.mul_(carried[_RANKS].item() / self._group.world_size)


class Bf16Transport:
    """Sends half the bytes: gradients are rounded to bf16 and summed in bf16."""

    overlaps = True
    is_lossy = True

    def __init__(self, flat: FlatParameters, group: Group) -> None:
        self._group = group
        self._error = CarriedError(flat, group)

    def start(self, index: int, gradients: Tensor, divisor: float) -> Finish:
        """Start the sum; see `GradientTransport`."""
        error = self._error.add_to(index, gradients, divisor)
        sent = gradients.to(torch.bfloat16)
        _keep(error, gradients - sent, divisor)
        wait = self._group.start_sum(sent)

        def finish() -> None:
            wait()
            gradients.copy_(sent)

        return finish

    def exchange_carried(self) -> dict[str, Tensor]:
        """Spread the error over the ranks; see `GradientTransport`."""
        return self._error.exchange_carried()

    def load(self, carried: dict[str, Tensor]) -> None:
        """Restore a saved error; see `GradientTransport`."""
        self._error.load(carried)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Matrix:
    """A gradient that is sent as the product of two thin matrices."""

    name: str
    cut: slice
    """Position in the bucket."""
    rows: int
    columns: int
    right: Tensor
    """Right factor (columns, rank) of the last step, where the next power iteration starts."""


class PowerSgdTransport:
    """Sends matrices as products of rank 4, one power iteration per step (Vogels et al. 2019).

    Unlike torch's hook it sums instead of averaging, and compresses from the first step on. Each
    round is linear in the gradients, so the division over ranks changes only the rounding.
    """

    overlaps = False  # the second round needs the sum of the first one
    is_lossy = True

    def __init__(self, flat: FlatParameters, group: Group, seed: int) -> None:
        self._group = group
        self._error = CarriedError(flat, group)
        generator = torch.Generator().manual_seed(seed)
        self._matrices: list[list[_Matrix]] = []
        # Parts of each bucket that are sent uncompressed: vectors and small matrices.
        self._rest: list[list[slice]] = []
        for bucket in flat.buckets:
            self._matrices.append([])
            self._rest.append([])
            start = 0
            for name in bucket.names:
                view = flat.views[name]
                cut = slice(start, start + view.numel())
                start = cut.stop
                rows = view.shape[0] if view.dim() >= 2 else 1
                columns = view.numel() // rows
                if _MIN_SAVING * _RANK * (rows + columns) > view.numel():
                    self._rest[-1].append(cut)
                    continue
                # Drawn on the CPU: all ranks need the same factor, even with different GPUs.
                right = torch.randn(columns, _RANK, generator=generator).to(view)
                self._matrices[-1].append(
                    _Matrix(name=name, cut=cut, rows=rows, columns=columns, right=right)
                )

    def start(self, index: int, gradients: Tensor, divisor: float) -> Finish:
        """Start the first round; the returned function does the second one."""
        error = self._error.add_to(index, gradients, divisor)
        mine = gradients.clone()
        matrices, rest = self._matrices[index], self._rest[index]
        lefts = [mine[m.cut].view(m.rows, m.columns) @ m.right for m in matrices]
        first = _pack([*lefts, *(mine[cut] for cut in rest)], mine)
        wait = self._group.start_sum(first)

        def finish() -> None:
            wait()
            parts = _unpack(first, [*lefts, *(mine[cut] for cut in rest)])
            sums, whole = parts[: len(lefts)], parts[len(lefts) :]
            for left, matrix in zip(sums, matrices, strict=True):
                _orthogonalize(left)
                torch.mm(mine[matrix.cut].view(matrix.rows, -1).T, left, out=matrix.right)
                # Subtract this rank's part of the product: the remainder is its error.
                mine[matrix.cut].view(matrix.rows, -1).sub_(left @ matrix.right.T)
            rights = [matrix.right for matrix in matrices]
            second = _pack(rights, mine)
            self._group.start_sum(second)()
            for left, right, matrix in zip(sums, _unpack(second, rights), matrices, strict=True):
                matrix.right.copy_(right)
                gradients[matrix.cut].view(matrix.rows, -1).copy_(left @ right.T)
            for cut, values in zip(rest, whole, strict=True):
                gradients[cut] = values
                mine[cut] = 0
            _keep(error, mine, divisor)

        return finish

    def exchange_carried(self) -> dict[str, Tensor]:
        """Spread the error over the ranks and add the factors; see `GradientTransport`."""
        return self._error.exchange_carried() | self._rights()

    def load(self, carried: dict[str, Tensor]) -> None:
        """Restore a saved error and its factors; see `GradientTransport`."""
        self._error.load(carried)
        for name, right in self._rights().items():
            if name in carried:
                right.copy_(carried[name])

    def _rights(self) -> dict[str, Tensor]:
        return {f"right/{m.name}": m.right for bucket in self._matrices for m in bucket}


def _keep(error: Tensor, lost: Tensor, divisor: float) -> None:
    torch.div(lost, divisor, out=error)
    # A step that overflows in fp16 is skipped; its infinities must not reach the next one.
    error.nan_to_num_(0.0, 0.0, 0.0)


def _pack(tensors: list[Tensor], like: Tensor) -> Tensor:
    # An empty tensor first: `torch.cat` refuses an empty list.
    return torch.cat([like.new_zeros(0), *(tensor.reshape(-1) for tensor in tensors)])


def _unpack(packed: Tensor, like: list[Tensor]) -> list[Tensor]:
    parts = packed.split([tensor.numel() for tensor in like])
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]


def _orthogonalize(matrix: Tensor) -> None:
    """Make the columns orthonormal by modified Gram-Schmidt, in place."""
    for place in range(matrix.shape[1]):
        column = matrix[:, place : place + 1]
        column.div_(torch.linalg.vector_norm(column) + _EPSILON)
        rest = matrix[:, place + 1 :]
        rest.sub_(column @ (column.T @ rest))
