"""Count the memory and work that the experts of a mixture add to a layer.

The trainer sorts tokens by expert and multiplies them in two grouped products
(agents/trainer/kernels/grouped_linear_op.py). Each token has one row per expert it is routed to: as
input of the first product, as output of the second, and once more while results are put back in
order. NF4 weights of all experts of one matrix are dequantized for each product.
"""

from __future__ import annotations

from dataclasses import dataclass

from agents.contract.spec import RunSpec
from app.planning.shape.model_shape import LayerShape, ModelShape

# Copies of all rows, as wide as the hidden features, in a product.
_ROW_COPIES = 1
# The larger matrix of a layer's experts holds gate and up, of gate, up and down.
_LARGER_SHARE = 2 / 3
# Bytes per value of one matrix's adapters while they are differentiated: the fp32 gradient.
_ADAPTER_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsMemory:
    """Bytes that the experts of a layer add to those that `layers` counts for its MLP."""

    kept_bytes: float = 0.0
    """Activations saved for the backward pass, in bytes."""
    pass_bytes: float = 0.0
    """Temporaries at the fullest moment of the MLP's backward pass, in bytes."""


def count_experts(
    shape: ModelShape, layer: LayerShape, spec: RunSpec, *, width: int, tokens: int
) -> ExpertsMemory:
    """Return the memory of a layer's experts beyond an MLP of the same inner width.

    Args:
        shape: the model's sizes.
        layer: the layer.
        spec: the run.
        width: bytes of one feature in products.
        tokens: number of tokens in the micro-batch.

    With NF4, a layer of Qwen3-30B-A3B dequantizes 128 x 2 x 768 x 2,048 weights, 768 MiB:

    >>> count_unpacked(128 * 3 * 768 * 2048, 2) >> 20
    768
    """
    if not layer.num_experts_params:
        return ExpertsMemory()
    more = tokens * width * _ROW_COPIES * shape.num_experts_met * shape.hidden
    if spec.adapter.kind == "qlora" and shape.has_usual_experts:
        more += count_unpacked(layer.num_experts_params, width)
    kept = 0
    if spec.adapter.experts and shape.has_usual_experts:
        one_matrix = spec.adapter.rank * shape.num_experts * (shape.hidden + 2 * shape.expert_ffn)
        more += _ADAPTER_BYTES * one_matrix
        # The gradients of the experts' adapters need the inputs of both products.
        kept = tokens * width * (shape.hidden + shape.num_experts_met * shape.expert_ffn)
    return ExpertsMemory(kept_bytes=kept, pass_bytes=more)


def count_unpacked(num_weights: int, width: int) -> int:
    """Return the bytes of a layer's larger matrix of experts, dequantized.

    Args:
        num_weights: weights of all experts of the layer.
        width: bytes of one weight.
    """
    return round(width * _LARGER_SHARE * num_weights)


def count_met_adapter(shape: ModelShape, spec: RunSpec) -> int:
    """Return the number of adapter values that one token is multiplied with."""
    adapter = spec.adapter
    return shape.count_adapter(
        adapter.rank,
        adapter.targets,
        dora=adapter.dora,
        experts=shape.num_experts_met if adapter.experts else 0,
    )
