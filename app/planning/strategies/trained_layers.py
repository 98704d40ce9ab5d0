"""Cuts that give every stage of a pipeline trained values, as the trainer requires."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

from agents.contract.spec import RunSpec
from app.planning.shape.model_shape import ModelShape, choose_targets


def list_trained_layers(shape: ModelShape, spec: RunSpec) -> tuple[int, ...]:
    """Return the indices of the layers that get an adapter; the head counts to the last one.

    Args:
        shape: a model with separate kinds for layers that the targets distinguish.
        spec: the spec of a run that trains an adapter.
    """
    adapter = spec.adapter
    has = {
        id(layer): bool(
            choose_targets(layer, adapter.targets) or (adapter.experts and layer.num_router)
        )
        for layer, _ in shape.kinds
    }
    last = shape.num_layers - 1
    # Only a list can name the head; `all-linear` and patterns apply to the decoder layers.
    has_head = not isinstance(adapter.targets, str) and "lm_head" in adapter.targets
    found = tuple(
        number
        for number, layer in enumerate(shape.layers)
        if has[id(layer)] or (has_head and number == last)
    )
    # No match means that the model names its modules differently: count all, the trainer decides.
    return found or tuple(range(shape.num_layers))


def give_each_stage_one(counts: Sequence[int], trained: Sequence[int]) -> tuple[int, ...] | None:
    """Move layers between stages, as few as possible, so that each stage has a trained one.

    None: there are fewer trained layers than stages.

    Args:
        counts: number of layers of each stage.
        trained: indices of the layers with an adapter, in order.

    >>> give_each_stage_one((2, 2), (0, 1, 2, 3))
    (2, 2)
    >>> give_each_stage_one((4, 4, 4), (8, 9, 10, 11))
    (9, 1, 2)
    >>> give_each_stage_one((2, 2), (3,))
    """
    num, num_layers = len(counts), sum(counts)
    if len(trained) < num:
        return None
    ends = [0]
    for place, wanted in enumerate(list(accumulate(counts))[:-1]):
        # The stage ends after its first trained layer and leaves one for each later stage.
        earliest = trained[bisect_left(trained, ends[-1])] + 1
        latest = trained[len(trained) - num + place + 1]
        ends.append(max(earliest, min(wanted, latest)))
    return tuple(stop - first for first, stop in pairwise([*ends, num_layers]))
