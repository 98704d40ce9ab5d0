"""Count the cost of a token in one decoder layer, independent of the card.

Costs of experts, DoRA and mixers with a state were fitted to half of the measurements of a few
layers each on an H100 (`tests.bench.bench_planning --families`) and verified with the other half.
"""

from __future__ import annotations

from agents.contract.spec import RunSpec
from app.planning.memory.mixers import count_mixer
from app.planning.shape.model_shape import LayerShape, ModelShape, choose_targets

UNPACKED_EXPERT = 2.0
"""Time to unpack a 4-bit weight of an expert, relative to one of a linear layer."""
# Values read and written for each feature under dropout, per each of three passes: the masked copy
# is written, read by the product and by that of the gradient, whose own masked copy is written and
# read. Computing the mask's hash takes no longer than that.
_DROPOUT_VALUES = 5.0 / 3
# Values for each output that DoRA multiplies by a magnitude, in fp32.
_DORA_VALUES = 3.25
# Values for each feature that is routed to an expert: rows are gathered, multiplied by their
# weights and added up.
_ROUTED_VALUES = 10
# Extra time of the experts' products over large ones, as a share, since each has few rows.
_EXPERT_LOSS = 1.48
# Memory traffic of a mixer's operator in both passes and in a repeated forward pass, as multiples
# of its backward pass's scratch memory.
_MIXER_TRAFFIC = {"delta": (21.5, 5.5), "mamba": (12.0, 4.6), "both": (12.0, 4.6)}


def count_met_weights(layer: LayerShape) -> int:
    """Return the number of weights of one layer that a token is multiplied with."""
    return sum(one.num_weights for one in layer.linears) + layer.num_router + layer.num_met_params


def count_products(layer: LayerShape, spec: RunSpec) -> int:
    """Return the number of products per token: weights, some counted twice."""
    # DoRA with dropout multiplies its base weights with the plain and with the masked input.
    adapter = spec.adapter
    if adapter.kind == "full" or not (adapter.dora and adapter.dropout):
        return count_met_weights(layer)
    twice = sum(one.num_weights for one in choose_targets(layer, adapter.targets))
    return count_met_weights(layer) + twice


def count_lost_products(layer: LayerShape) -> float:
    """Return the experts' loss of time, as the number of weights of equally slow large products."""
    return _EXPERT_LOSS * layer.num_met_params


def count_operand_bytes(layer: LayerShape) -> float:
    """Return the bytes of inputs and outputs of one layer's products per token, forward."""
    return 2.0 * sum(one.num_inputs + one.num_outputs for one in layer.linears)


def count_traffic_bytes(shape: ModelShape, layer: LayerShape, spec: RunSpec) -> float:
    """Return the bytes that one layer reads and writes between its products per token, forward.

    Norms and residuals touch the hidden features ten times; rotary positions read and write queries
    and keys; the gate reads two values and writes one. Adapters read their shared input and add to
    their outputs.
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
    """Return a mixer operator's bytes per token in both passes, and in a repeated forward pass."""
    both, again = _MIXER_TRAFFIC.get(layer.kind, (0.0, 0.0))
    scratch_bytes = count_mixer(layer, 2).scratch_bytes
    return both * scratch_bytes, again * scratch_bytes
