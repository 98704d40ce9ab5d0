"""Models of random weights as the trainer loads them, and rows of random tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from agents.shared.micro_shapes import group_examples
from agents.trainer.data.examples import BatchPart, Example, Segment
from app.planning.row_lengths import assume_lengths
from tests.bench.planning.planning_jobs import SHAPES, Job, Row

# Mean length of conversations, as a share of their limit.
_MEAN_SHARE = 0.3
_NUM_UNLIKE = 256
_MAX_POSITIONS = 16384


def make_base(job: Job, device: Any) -> Any:
    """Return a frozen model as `load_model` gives it, made on the device."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from agents.trainer.model import experts

    sizes = dict(SHAPES[job.shape])
    config = CONFIG_MAPPING[sizes.pop("model_type")](
        **sizes, max_position_embeddings=_MAX_POSITIONS
    )
    wide = job.kind == "full" or device.type == "cpu"
    torch.set_default_dtype(torch.float32 if wide else torch.bfloat16)
    try:
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.get_default_dtype())
    finally:
        torch.set_default_dtype(torch.float32)
    model.eval()
    model.requires_grad_(False)
    _silence_experts(model)
    if job.kind == "qlora":
        quantize(model, device)
    experts.use_own_products(model)
    return model


def _silence_experts(model: Any) -> None:
    """Let experts return zeros: random routers are so near to ties that rounding would change them.

    Then packed rows would seem to differ from single ones; the time and memory stay the same.
    """
    from agents.trainer.model.nf4_experts import is_experts, name_matrices

    for module in model.modules():
        if is_experts(module):
            getattr(module, name_matrices(module)[1]).data.zero_()
            if getattr(module, "down_proj_bias", None) is not None:
                module.down_proj_bias.data.zero_()


def quantize(model: Any, device: Any) -> None:
    """Put 4-bit weights in the place of those of linear layers and experts, except for routers."""
    import torch
    from bitsandbytes.nn import Linear4bit, Params4bit

    from agents.trainer.model.nf4_experts import (
        PackedExperts,
        find_routers,
        is_experts,
        name_matrices,
    )

    routers = {id(router) for _, router in find_routers(model)}
    for parent in list(model.base_model.modules()):
        if is_experts(parent):
            for name in name_matrices(parent):
                weight = getattr(parent, name)
                packed = PackedExperts(weight.data, weight.dtype)
                setattr(parent, name, packed.make_placeholder())
                parent.add_module(f"{name}_nf4", packed)
        for name, old in list(parent.named_children()):
            if type(old) is not torch.nn.Linear or id(old) in routers or id(parent) in routers:
                continue
            new = Linear4bit(
                old.in_features, old.out_features, bias=False, device="meta",
                compute_dtype=old.weight.dtype, compress_statistics=True, quant_type="nf4",
            )  # fmt: skip
            new.weight = Params4bit(
                old.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4",
                module=new,
            ).to(device)  # fmt: skip
            new.bias = old.bias
            new.training = True  # see model._keep_layout
            setattr(parent, name, new)
    model.is_loaded_in_4bit = True


class Rows:
    """All rows of a run, as `Examples` describes them; those of a step come first."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self._examples = examples

    @property
    def num_tokens(self) -> npt.NDArray[np.int32]:
        """See `Examples`."""
        return np.array([one.num_tokens for one in self._examples], dtype=np.int32)

    @property
    def weights(self) -> npt.NDArray[np.int32]:
        """See `Examples`."""
        return np.array([one.num_targets for one in self._examples], dtype=np.int32)

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        return self._examples[index]


def make_rows(wanted: Row, job: Job, num_micro_batches: int) -> tuple[Rows, BatchPart]:
    """Return the rows of a run, and of them a step of so many micro-batches."""
    sides = 2 if job.objective == "dpo" else 1
    lengths = [(wanted.sequence,) * sides] * (max(1, wanted.batch // sides) * num_micro_batches)
    num_chosen = len(lengths)
    if wanted.unlike:
        capacity = wanted.sequence * wanted.batch
        mean = _MEAN_SHARE * wanted.sequence
        num_chosen = int(num_micro_batches * capacity / (mean * sides))
        while len(group_examples(_sum(lengths), capacity, is_filled=True)) > num_micro_batches or (
            len(lengths) != num_chosen
        ):
            num_chosen -= 1
            lengths = _draw(wanted.sequence, num_chosen, sides)
        lengths = [*lengths, *_draw(wanted.sequence, _NUM_UNLIKE, sides)]
    draw = np.random.default_rng(5)
    vocab = SHAPES[job.shape]["vocab_size"]
    examples = [
        Example(tuple(_make_segment(number, length, vocab, draw) for length in pair))
        for number, pair in enumerate(lengths, 1)
    ]
    places = list(range(num_chosen))
    part = BatchPart(examples=examples[:num_chosen], places=places, positions=places)
    return Rows(examples), part


def _draw(limit: int, count: int, sides: int) -> list[tuple[int, ...]]:
    """Return typical rows; the answers of a pair differ in length, and share their prompt."""
    drawn = assume_lengths(_MEAN_SHARE * limit, limit).draw(count)
    return [(one, max(2, one - one // 4))[:sides] for one in drawn]


def _sum(lengths: Sequence[tuple[int, ...]]) -> list[int]:
    return [sum(one) for one in lengths]


def _make_segment(number: int, length: int, vocab: int, draw: np.random.Generator) -> Segment:
    ids = draw.integers(6, vocab, length).astype(np.int32)
    return Segment(number, ids, np.arange(length) > 0)
