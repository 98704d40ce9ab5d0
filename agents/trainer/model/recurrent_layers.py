"""Recurrent layers over flat rows: Mamba 2, delta rule and others.

Their state passes from token to token. Transformers' classes call three functions of their own
modules, which take packed rows only with kernels that not every card has. They forward the model's
arguments: a call with the segments of a flat row goes to `linear_attention`, any other to the
original function. `Forward` detects a class that calls other functions, since its segments affect
each other.

Shape letters: M tokens of the flat row, F features, H heads, G groups of heads, K and V widths.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from transformers.activations import ACT2FN

from agents.trainer.kernels.linear_attention import attend_linearly, convolve

_MARK = "rackless_plain"


def route(model: nn.Module) -> bool:
    """Let the layers of a model take flat rows; return whether it has such layers.

    The model's arguments must include `segment_M` and `place_M` (see `find_places`).
    """
    has_layers = False
    for name in {type(module).__module__ for module in model.modules()}:
        # The functions are globals of the module that defines the layer's class.
        source = sys.modules[name]
        for function, ours in _FUNCTIONS.items():
            plain = getattr(source, function, None)
            if plain is None:
                continue
            has_layers = True
            if not hasattr(plain, _MARK):
                setattr(source, function, _choose(plain, ours))
    return has_layers


def find_places(bounds_S: Tensor, position_1M: Tensor) -> dict[str, Tensor]:
    """Return the number of each token's segment and its place in it, both int32 (M,)."""
    token_M = torch.arange(position_1M.shape[1], device=bounds_S.device, dtype=torch.int32)
    segment_M = torch.bucketize(token_M, bounds_S[1:], out_int32=True, right=True)
    return {"segment_M": segment_M, "place_M": position_1M[0].int()}


def _choose(plain: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (ours if "segment_M" in kwargs else plain)(*args, **kwargs)

    # Marks the replaced function, so that a second model does not wrap it again.
    setattr(run, _MARK, plain)
    return run


def _convolve(
    x_1FM: Tensor,
    weight_FJ: Tensor,
    bias_F: Tensor | None = None,
    activation: str | None = None,
    *,
    place_M: Tensor,
    **_: Any,
) -> Tensor:
    sum_1FM = convolve(x_1FM, weight_FJ, bias_F, place_M)
    sum_1FM = sum_1FM if activation is None else ACT2FN[activation](sum_1FM)
    return sum_1FM.to(x_1FM.dtype)


def _follow_delta_rule(
    query_1MGK: Tensor,
    key_1MGK: Tensor,
    value_1MHV: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    segment_M: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    out_MHV = attend_linearly(
        query_1MGK[0], key_1MGK[0], value_1MHV[0], g[0], beta[0], segment_M,
        query_1MGK.shape[-1] ** -0.5, use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return out_MHV.unsqueeze(0), None


def _scan(  # noqa: PLR0913 - Transformers calls it with these
    x_1MHV: Tensor,
    dt_1MH: Tensor,
    rate_H: Tensor,
    in_1MGK: Tensor,
    out_1MGK: Tensor,
    *,
    segment_M: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Tensor:
    """Mamba 2's layer: a state that decays by dt * A and is written with x * dt."""
    dt_1MH = dt_1MH if dt_bias is None else dt_1MH + dt_bias.to(dt_1MH.dtype)
    dt_1MH = (F.softplus(dt_1MH) if dt_softplus else dt_1MH).clamp(*dt_limit).float()
    x_1MHV = x_1MHV.float()
    decay_1MH = rate_H.float() * dt_1MH
    written_1MHV = x_1MHV * dt_1MH.unsqueeze(-1)
    out_MHV = attend_linearly(
        out_1MGK[0], in_1MGK[0], written_1MHV[0], decay_1MH[0], None, segment_M, 1.0, False
    )
    out_1MHV = out_MHV.unsqueeze(0)
    return out_1MHV if D is None else out_1MHV + D[:, None] * x_1MHV


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _follow_delta_rule,
    "mamba2_chunk_scan": _scan,
}
