"""Forecast the time that a step spends on the network, and the part that computation hides.

A ring all-reduce of B bytes over N ranks sends 2 (N-1)/N B over every link in each direction
(Patarasuk and Yuan 2009), and no algorithm sends less. Gradients travel in buckets while the last
micro-batch's backward pass still runs (see agents/trainer/parallel/reducer.py), so ranks wait only
for what exceeds that pass, and always for the last bucket.
"""

from __future__ import annotations

import math

from agents.contract.spec import Compression, RunSpec
from app.planning.hardware.cluster import LinkSpeed
from app.planning.memory.forecast import count_trained
from app.planning.shape.model_shape import ModelShape, choose_targets

NUM_BUCKETS = 8
"""Number of buckets into which the trainer cuts the gradients."""
# Share of a micro-batch's time that remains when its first gradients are final.
_BACKWARD_SHARE = 2 / 3
# Rank of PowerSGD's factors, as in agents/trainer/parallel/compression.py.
_POWER_RANK = 4
# Bytes on the wire for each gradient value; PowerSGD sends fp32 factors.
_VALUE_BYTES: dict[Compression, int] = {"none": 4, "bf16": 2, "powersgd": 4}


def ring_s(num_bytes: float, link: LinkSpeed, num_ranks: int) -> float:
    """Return the seconds of an all-reduce.

    The gradients of Llama-2-7B's LoRA r=16 on q, k, v and o, 67.1 MB in fp32, between three PCs
    over Gigabit Ethernet; then 1.6 GB of gradients, which take far longer than a step.

    >>> from app.planning.hardware.cluster import ethernet
    >>> round(ring_s(67.1e6, ethernet(1.0, 0.0), 3), 2), round(ring_s(1.6e9, ethernet(1.0), 3), 1)
    (0.76, 18.2)
    """
    if num_ranks < 2:
        return 0.0
    wire_s = 2 * (num_ranks - 1) / num_ranks * num_bytes / link.bytes_per_s
    # The latency is a round trip; each step of the ring crosses the link in one direction.
    return wire_s + 2 * (num_ranks - 1) * link.latency_s / 2


def gather_s(num_bytes: float, link: LinkSpeed, num_ranks: int) -> float:
    """Return the seconds of an all-gather of `num_bytes` that are sharded over the ranks.

    A 70B model in 4 bit (35.4 GB) over seven PCs with Gigabit Ethernet; a micro-step gathers it
    twice, for the forward pass and for the backward pass.

    >>> from app.planning.hardware.cluster import ethernet
    >>> round(2 * gather_s(35.35e9, ethernet(1.0, 0.0), 7))
    516
    """
    if num_ranks < 2:
        return 0.0
    wire_s = (num_ranks - 1) / num_ranks * num_bytes / link.bytes_per_s
    # One way only, as in `ring_s`.
    return wire_s + (num_ranks - 1) * link.latency_s / 2


def hide(seconds: float, last_pass_s: float) -> float:
    """Return the seconds of a reduction that are not hidden behind the last backward pass.

    Args:
        seconds: duration of the whole reduction.
        last_pass_s: duration of the last micro-batch, both passes.

    >>> hide(0.8, 6.0), hide(8.0, 6.0)
    (0.1, 4.0)
    """
    return max(seconds / NUM_BUCKETS, seconds - _BACKWARD_SHARE * last_pass_s)


def gradient_bytes(shape: ModelShape, spec: RunSpec) -> float:
    """Return the bytes of one exchange of gradients.

    >>> from agents.contract.spec import AdapterSpec, DataSpec, RunSpec
    >>> from app.planning.shape.model_shape import read_shape
    >>> shape = read_shape({"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096,
    ...     "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32})
    >>> gradient_bytes(shape, RunSpec(model="m", data=DataSpec(train="d"))) / 1e6
    159.90784
    """
    values: float = count_trained(shape, spec)
    if spec.compression == "powersgd":
        values = min(values, _power_values(shape, spec))
    return float(_VALUE_BYTES[spec.compression] * values)


def _power_values(shape: ModelShape, spec: RunSpec) -> float:
    """Return the number of values in the low-rank factors of all matrices."""
    total = 0.0
    for layer, count in shape.kinds:
        if spec.adapter.kind == "full":
            sizes = [(linear.num_inputs, linear.num_outputs) for linear in layer.linears]
        else:
            rank = spec.adapter.rank
            targets = choose_targets(layer, spec.adapter.targets)
            sizes = [
                pair
                for linear in targets
                for pair in _factors(linear.num_inputs, linear.num_outputs, rank)
            ]
        # A small matrix is sent whole if its factors would be larger.
        total += count * sum(min(a * b, _POWER_RANK * (a + b)) for a, b in sizes)
    return total


def _factors(num_inputs: int, num_outputs: int, rank: int) -> tuple[tuple[int, int], ...]:
    return (rank, num_inputs), (num_outputs, rank)


def statistics_s(link: LinkSpeed, num_ranks: int) -> float:
    """Return the seconds of the small all-reduce that ends a step.

    >>> from app.planning.hardware.cluster import ethernet
    >>> round(statistics_s(ethernet(1.0, 0.0005), 3), 4)
    0.001
    """
    return math.ceil(math.log2(num_ranks)) * link.latency_s if num_ranks > 1 else 0.0
