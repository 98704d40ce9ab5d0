"""Count what a token costs in one decoder layer, independent of the card.

Costs of experts, DoRA and mixers with a state were fitted to half of the rows of a few layers each
on an H100 (`tests.bench.bench_planning --families`), and held against the other half.
"""

from __future__ import annotations

from agents.contract.spec import RunSpec
from app.planning.memory.mixers import count_mixer
from app.planning.shape.model_shape import LayerShape, ModelShape, choose_targets

UNPACKED_EXPERT = 2.0
"""Time to unpack a 4-bit weight of an expert, relative to one of a linear layer."""
# Values read and written for each feature that dropout decides about, in each of three passes: the
# masked copy is written, read by the product and by that of the gradient, whose own masked copy is
# written and read. The hash takes no longer than that.
_DROPOUT_VALUES = 5.0 / 3
# The same for each output that DoRA multiplies by a magnitude, in fp32.
_DORA_VALUES = 3.25
# The same for each feature that is handed to an expert: rows are gathered, multiplied by their
# weights and added up.
_ROUTED_VALUES = 10
# Time of the experts' products beyond that of large ones, as a share: each gets few rows.
_EXPERT_LOSS = 1.48
# Traffic of a mixer's operator, both passes, as a multiple of the most that its backward pass has
# at once; and of repeating its forward pass.
_MIXER_TRAFFIC = {"delta": (21.5, 5.5), "mamba": (12.0, 4.6), "both": (12.0, 4.6)}


def count_met_weights(layer: LayerShape) -> int:
    """Return the weights of one layer that a token is multiplied with."""
    return sum(one.num_weights for one in layer.linears) + layer.num_router + layer.num_met_params


def count_products(layer: LayerShape, spec: RunSpec) -> int:
    """Return the same, with weights that see two inputs twice: those of DoRA with dropout."""
    adapter = spec.adapter
    if adapter.kind == "full" or not (adapter.dora and adapter.dropout):
        return count_met_weights(layer)
    twice = sum(one.num_weights for one in choose_targets(layer, adapter.targets))
    return count_met_weights(layer) + twice


def count_lost_products(layer: LayerShape) -> float:
    """Return the weights of large products that take as long as what experts lose."""
    return _EXPERT_LOSS * layer.num_met_params


def count_operand_bytes(layer: LayerShape) -> float:
    """Return the bytes of inputs and outputs of one layer's products per token, forward."""
    return 2.0 * sum(one.num_inputs + one.num_outputs for one in layer.linears)


def count_traffic_bytes(shape: ModelShape, layer: LayerShape, spec: RunSpec) -> float:
    """Return the bytes that one layer reads and writes between its products per token, forward.

    Norms and residuals: ten times the hidden features; rotary positions: queries and keys read and
    written; the gate: two read and one written. Adapters read the input
    that they share, and add to their outputs.
    """
    heads = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    inner = shape.ffn
    values: float = 10 * shape.hidden + 4 * heads
    if layer.num_met_params:
        inner = layer.num_met_params // (3 * shape.hidden)
        values += _ROUTED_VALUES * shape.num_experts_met * shape.hidden
    values += 3 * inner
    if spec.adapter.kind != "full":
        targets = choose_targets(layer, spec.adapter.targets)
        # Layers that share an input read it once for all of their adapters.
        values += sum({one.num_inputs for one in targets})
        values += 2 * sum(one.num_outputs for one in targets)
        if spec.adapter.dropout:
            # Each adapter drops features of its own: a copy is written and read.
            values += _DROPOUT_VALUES * sum(one.num_inputs for one in targets)
        if spec.adapter.dora:
            values += _DORA_VALUES * sum(one.num_outputs for one in targets)
    return 2.0 * values


def count_mixer_bytes(layer: LayerShape) -> tuple[float, float]:
    """Return the traffic of a layer's operator with a state per token, and of repeating it."""
    both, again = _MIXER_TRAFFIC.get(layer.kind, (0.0, 0.0))
    scratch_bytes = count_mixer(layer, 2).scratch_bytes
    return both * scratch_bytes, again * scratch_bytes
