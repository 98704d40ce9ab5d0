"""Forward and backward passes of one rank over its slice of a batch.

The loss is the SUM over the tokens that count, so sums over micro-batches and ranks add up to the
sum over the batch exactly; the division by the batch's number of tokens comes after the all-reduce.

When memory runs out, the slice is done again in smaller pieces: half the tokens at once, down to
single rows, then with activations computed a second time. The batch stays the same.

Shape letters: B rows, T tokens (padded), V words, N tokens that count.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import Tensor

from agents.errors import UserError
from agents.trainer.flat import FlatParameters
from agents.trainer.micro import group_rows
from agents.trainer.model import TrainedModel, recompute_activations
from agents.trainer.tokens import Sample

Warn = Callable[[str, str], None]
_LESS_MEMORY = (
    "use adapter: {kind: qlora} or a lower adapter.rank, close other programs on that PC, or leave "
    "that node out"
)
_WIDTH_MULTIPLE = 8
"""On GPUs rows are padded to a multiple of this many tokens: tensor cores like it."""


class Computer:
    """Adds the gradients of samples to the flat buffer, and their loss to `loss_sum`."""

    def __init__(
        self,
        model: TrainedModel,
        flat: FlatParameters,
        device: torch.device,
        *,
        micro_tokens: int,
        recompute: bool,
        warn: Warn,
        beat: Callable[[], None],
    ) -> None:
        self._model = model
        self._flat = flat
        self._device = device
        self._warn = warn
        self._beat = beat
        self.micro_tokens = micro_tokens
        self.recompute = recompute and recompute_activations(model.module)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)

    def add_gradients(self, samples: Sequence[Sample], positions: Sequence[int]) -> None:
        """Start from zero and do the forward and backward passes of a slice.

        Args:
            samples: the rows of the slice; none is allowed.
            positions: place of each row in the global order of samples, for the dropout.

        Raises:
            UserError: a single row does not fit the memory.
        """
        while True:
            self._flat.gradients.zero_()
            self.loss_sum.zero_()
            groups = group_rows([len(s.ids) for s in samples], self.micro_tokens)
            if self._try_groups(samples, positions, groups):
                return
            self._shrink(samples, groups)

    def _try_groups(
        self, samples: Sequence[Sample], positions: Sequence[int], groups: list[list[int]]
    ) -> bool:
        """Return False when memory ran out. The frame that held the tensors is gone by then."""
        try:
            for group in groups:
                self._beat()
                rows = [samples[i] for i in group]
                loss = self._loss(rows, [positions[i] for i in group])
                loss.backward()
                self.loss_sum += loss.detach()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            self._model.clock.clear()
        return True

    def _shrink(self, samples: Sequence[Sample], groups: list[list[int]]) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        padded = max(len(samples[group[0]].ids) * len(group) for group in groups)
        if any(len(group) > 1 for group in groups):
            self.micro_tokens = min(padded, self.micro_tokens) // 2
            self._warn(
                f"Memory ran out; from now on at most {self.micro_tokens} tokens are computed at "
                "once on this rank. The batch stays the same.",
                "",
            )
        elif not self.recompute and recompute_activations(self._model.module):
            self.recompute = True
            self._warn(
                "Memory ran out with a single row; from now on activations are computed twice on "
                "this rank, which is slower and needs less.",
                "",
            )
        else:
            raise UserError(
                f"Memory ran out on {self._device} with a single row of {padded} tokens.",
                f"Lower sequence_tokens, or {_LESS_MEMORY}",
            )

    def evaluate(self, samples: Sequence[Sample]) -> None:
        """Start from zero and add the loss of the samples, without dropout or gradients."""
        self.loss_sum.zero_()
        with torch.no_grad():
            for group in group_rows([len(s.ids) for s in samples], self.micro_tokens):
                self._beat()
                self.loss_sum += self._loss([samples[i] for i in group], None)

    def _loss(self, samples: list[Sample], positions: list[int] | None) -> Tensor:
        """Return the sum of the losses of all tokens that count."""
        ids_BT, target_N, label_N = self._build(samples)
        if positions is None:
            self._model.clock.clear()
        else:
            self._model.clock.set(positions, ids_BT.shape[1], self._device)
        autocast = torch.autocast(self._device.type, torch.bfloat16)
        with autocast if self._model.autocast else nullcontext():
            # No attention mask: padding stands on the right, so a causal model never looks at it
            # from a real token, and the faster attention kernels want none.
            logits_BTV = self._model.module(input_ids=ids_BT, use_cache=False).logits
        logits_NV = logits_BTV.flatten(0, 1).index_select(0, target_N)
        if logits_NV.dtype != torch.float64:
            logits_NV = logits_NV.float()
        return F.cross_entropy(logits_NV, label_N, reduction="sum")

    def _build(self, samples: list[Sample]) -> tuple[Tensor, Tensor, Tensor]:
        """Return padded ids, and of each token that counts: where it is predicted, and its id."""
        width = max(len(sample.ids) for sample in samples)
        if self._device.type == "cuda":
            width = -(-width // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
        ids_BT = np.zeros((len(samples), width), dtype=np.int64)
        is_target_BT = np.zeros((len(samples), width), dtype=np.bool_)
        for row, sample in enumerate(samples):
            ids_BT[row, : len(sample.ids)] = sample.ids
            is_target_BT[row, : len(sample.ids)] = sample.is_target
        place_N = np.flatnonzero(is_target_BT)
        label_N = ids_BT.reshape(-1)[place_N]
        tensors = (torch.from_numpy(array) for array in (ids_BT, place_N - 1, label_N))
        ids, predicted_at, labels = (t.to(self._device, non_blocking=True) for t in tensors)
        return ids, predicted_at, labels


@contextmanager
def memory_in_words(device: torch.device) -> Iterator[None]:
    """Say it in words when memory runs out inside the block where nothing smaller can be tried.

    Raises:
        UserError: it did.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"Memory ran out on {device}: the model with its trained parameters does not fit.",
            _LESS_MEMORY[0].upper() + _LESS_MEMORY[1:],
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether memory ran out, on a GPU or on the CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return "can't allocate memory" in text or "CUDA out of memory" in text
