"""Rows of embeddings and output layer for new tokens, and their training next to an adapter.

New rows begin as the mean of the rows before them, so that a new token is at first neither likely
nor unlikely. Models with a padded vocabulary have room for some of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn

from agents.contract.spec import AlsoTrained
from agents.errors import ExpectedError

# Rows summed at once: float64 takes twice the memory of the weights.
_ROWS_AT_ONCE = 4096


def find_ends(model: Any) -> dict[AlsoTrained, Any]:
    """Return the modules of a causal language model that read and write tokens."""
    found: dict[AlsoTrained, Any] = {"embed_tokens": model.get_input_embeddings()}
    last = model.get_output_embeddings()
    return found if last is None else {**found, "lm_head": last}


def resize(model: Any, num_rows: int) -> None:
    """Give a model another number of tokens; rows that it had keep their values."""
    grown: dict[int, nn.Parameter] = {}
    for module in find_ends(model).values():
        for name in ("weight", "bias"):
            value = getattr(module, name, None)
            if isinstance(value, nn.Parameter) and len(value) != num_rows:
                # Tied weights stay one.
                grown.setdefault(id(value), _resized(value, num_rows))
                setattr(module, name, grown[id(value)])
        sizes = ("num_embeddings", "out_features")
        for name in (name for name in sizes if hasattr(module, name)):
            setattr(module, name, num_rows)
    for config in (model.config, model.config.get_text_config()):
        if hasattr(config, "vocab_size"):
            config.vocab_size = num_rows
    if hasattr(model, "vocab_size"):
        model.vocab_size = num_rows


@contextmanager
def resized(model: Any, num_rows: int | None) -> Iterator[None]:
    """Resize a model inside a block, except that its config keeps the new size; None: do not."""
    before = [(end, dict(end.__dict__), dict(end._parameters)) for end in find_ends(model).values()]
    if num_rows is not None:
        resize(model, num_rows)
    try:
        yield
    finally:
        for end, attributes, parameters in before:
            end.__dict__.update(attributes)
            end._parameters.update(parameters)


def _resized(value: nn.Parameter, num_rows: int) -> nn.Parameter:
    rows = value.new_zeros((num_rows, *value.shape[1:]))
    rows[: len(value)] = value.detach()[:num_rows]
    return nn.Parameter(rows, requires_grad=value.requires_grad)


def add_rows(model: Any, tokenizer: Any, tokens: Sequence[str]) -> None:
    """Add rows for new tokens to a model of which every parameter is frozen.

    Args:
        model: base model.
        tokenizer: its tokenizer with the tokens, as `load_tokenizer` returns it.
        tokens: the new tokens; those that the model knows keep their values.

    Raises:
        ExpectedError: embeddings and output layer have other numbers of rows.
    """
    if not tokens:
        return
    ends = find_ends(model)
    sizes = {len(module.weight) for module in ends.values()}
    if len(sizes) != 1 or not isinstance(ends["embed_tokens"], nn.Embedding):
        raise ExpectedError(
            "The embeddings of this model are of a kind that cannot grow.",
            "Leave data.new_tokens out, or use a model that has the tokens",
        )
    (before,) = sizes
    ids = tokenizer.convert_tokens_to_ids(list(tokens))
    new = [token for token in ids if token in tokenizer.new_token_ids or token >= before]
    if not new:
        return
    resize(model, max(before, max(ids) + 1))
    num_known = min(before, *new)
    filled: set[int] = set()
    with torch.no_grad():
        for module in ends.values():
            for value in (module.weight, getattr(module, "bias", None)):
                if value is not None and id(value) not in filled:
                    filled.add(id(value))
                    mean = _mean(value, num_known)
                    value[before:] = mean
                    value[new] = mean


def _mean(value: Tensor, num_rows: int) -> Tensor:
    # In float64, so that all devices round to the same value.
    total = torch.zeros(value.shape[1:], dtype=torch.float64, device=value.device)
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        total += value[start : min(num_rows, start + _ROWS_AT_ONCE)].double().sum(0)
    return (total / num_rows).to(value.dtype)


def train_ends(model: Any, names: Sequence[AlsoTrained], lora: LoraConfig) -> None:
    """Train whole matrices next to an adapter, in the layout of PEFT's `modules_to_save`.

    Args:
        model: base model, with its adapter.
        names: matrices to train.
        lora: settings of the adapter, which get the names of their modules.

    Raises:
        ExpectedError: the model has none, or an adapter on them.
    """
    ends = find_ends(model)
    trained: set[int] = set()
    for name in names:
        module: Any = ends.get(name)
        is_plain = isinstance(module, (nn.Embedding, nn.Linear))
        if not is_plain or not module.weight.is_floating_point():
            raise ExpectedError(
                f"adapter.also_train: this model has no plain {name} without an adapter.",
                "Leave it out of adapter.targets, or of adapter.also_train",
            )
        for value in module.parameters(recurse=False):
            # Master weights: autocast computes in half precision. A copy, since weights on a CPU
            # may be pages of a file.
            if not value.requires_grad:
                wide = torch.promote_types(value.dtype, torch.float32)
                value.data = value.detach().to(wide, copy=True)
            value.requires_grad_(True)
        trained.add(id(module.weight))
    # Tied weights are one matrix, which has the names of both modules.
    saved = {id(module) for module in ends.values() if id(module.weight) in trained}
    lora.modules_to_save = [name for name, one in model.named_modules() if id(one) in saved]
    lora.ensure_weight_tying = len(saved) > len(trained)
