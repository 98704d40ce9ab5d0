"""Compute the experts of Llama 4, whose class is different, by grouped products.

Its layer repeats every token for every expert, with zeros where the router did not choose it, and
multiplies all of them in batched products. `experts` sends each token only to its experts. The
router's weights scale the input of an expert, not its output: they are applied after the first
product, which is linear.

Weights are stored as (E, I, O). PEFT takes every parameter of three dimensions for (E, O, I) unless
the module says otherwise, which this class does not: in its adapters on these experts the two
projections are swapped.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_MODULE = "transformers.models.llama4.modeling_llama4"


def is_llama4_experts(module: Any) -> bool:
    """Return whether a module holds the experts of a Llama 4 layer."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == (_MODULE, "Llama4TextExperts")


def apply_gate(module: Any, y_SO: Tensor) -> Tensor:
    """Return the activated gate times the other half of the first product (S, O / 2)."""
    gate_SI, up_SI = y_SO.chunk(2, dim=-1)
    gated_SI: Tensor = up_SI * module.act_fn(gate_SI)
    return gated_SI


def turn_adapter(down: Tensor, up: Tensor, num_experts: int, rank: int) -> list[Tensor]:
    """Return projections in the layout of `grouped_linear_op`, from PEFT's swapped ones.

    Args:
        down: PEFT's A (E * Q, O), which is the output projection here.
        up: PEFT's B (I, Q * E), which is the input projection.
        num_experts: E.
        rank: Q.

    Returns:
        Projections (E * Q, I) and (O, Q * E).
    """
    down_EQO = down.view(num_experts, rank, down.shape[1])
    up_IQE = up.view(up.shape[0], rank, num_experts)
    return [
        up_IQE.permute(2, 1, 0).reshape(num_experts * rank, up.shape[0]),
        down_EQO.permute(2, 1, 0).reshape(down.shape[1], rank * num_experts),
    ]
