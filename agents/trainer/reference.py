"""Log-probabilities of the answers under the model as it was before a full fine-tuning by DPO.

With an adapter the reference model is there all the time: the same weights without the adapter. A
full fine-tuning moves the weights themselves, so the reference is asked once, before the first
step, about every pair that the run will see. A second copy of the model would take its memory all
the time. Each rank asks about its part; the sum over the ranks is the whole table.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from agents.spec import RunSpec
from agents.trainer.data.order import choose_rows, count_steps
from agents.trainer.examples import Examples
from agents.trainer.forward import Forward
from agents.trainer.micro import CPU_TOKENS, build_micro_batch, group_examples
from agents.trainer.objectives import sum_log_probabilities


def needs_reference(spec: RunSpec) -> bool:
    """Tell whether the reference has to be asked before the training."""
    return spec.objective == "dpo" and spec.adapter.kind == "full"


def ask_reference(
    spec: RunSpec,
    forward: Forward,
    sets: tuple[Examples, Examples | None],
    *,
    rank: int,
    world_size: int,
    device: torch.device,
) -> Tensor:
    """Return this rank's part of the table (P, 2): pairs to train on, then those of evaluation.

    Rows that belong to other ranks, or to pairs that no step will see, are zero.
    """
    train, evaluation = sets
    num_train = len(train)
    table_P2 = torch.zeros(num_train + len(evaluation or ()), 2, dtype=torch.float64)
    wanted = _seen(spec, num_train)[rank::world_size]
    _fill(table_P2[:num_train], train, wanted, forward, device)
    if evaluation is not None:
        mine = range(rank, len(evaluation), world_size)
        _fill(table_P2[num_train:], evaluation, mine, forward, device)
    return table_P2


def _seen(spec: RunSpec, num_rows: int) -> list[int]:
    """Return the pairs that a step of the run will see."""
    size = spec.batch_sequences
    steps = count_steps(epochs=spec.epochs, num_rows=num_rows, batch=size, max_steps=spec.max_steps)
    if steps * size >= num_rows:
        return list(range(num_rows))
    batches = (
        choose_rows(seed=spec.seed, step=step, batch=size, num_rows=num_rows)
        for step in range(1, steps + 1)
    )
    return sorted({row for batch in batches for row in batch})


def _fill(
    table_P2: Tensor,
    examples: Examples,
    wanted: Iterable[int],
    forward: Forward,
    device: torch.device,
) -> None:
    places = list(wanted)
    for group in group_examples([int(examples.num_tokens[p]) for p in places], CPU_TOKENS):
        chosen = [places[i] for i in group]
        batch = build_micro_batch([examples[place] for place in chosen], device)
        with torch.no_grad():
            table_P2[chosen] = sum_log_probabilities(forward, batch).double().cpu()
