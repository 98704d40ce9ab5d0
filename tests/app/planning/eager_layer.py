"""What PyTorch keeps alive between the passes of a layer that is not compiled, found on a CPU.

The trainer's layer runs with its linear layers fused. Attention is replaced by a function that
saves what the GPU's kernels save: queries, keys, values, the output and the sums of the softmax.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface

from agents.contract.spec import RunSpec
from tests.app.planning import compiled_layer
from tests.app.planning.live_bytes import LiveBytes

TOKENS = 256
_NAME = "saved_for_planning"


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value):
        out, sums = torch.empty_like(query), torch.empty(query.shape[1], query.shape[0])
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


def _attend(module, query, key, value, mask, **_):
    query, key = query.to(value.dtype), key.to(value.dtype)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return _Attend.apply(q, k, v).unsqueeze(0), None


def count_kept(family: str, spec: RunSpec, sizes: dict[str, int]) -> float:
    """Return the bytes that a layer keeps for each token, without its input and output."""
    made, layer, hidden, settings = compiled_layer.make_layer(family, spec, sizes, TOKENS)
    if made.lora is not None:
        compiled_layer.fuse_linear(made)
    AttentionInterface.register(_NAME, _attend)
    base = made.module if made.lora is None else made.module.get_base_model()
    base.set_attn_implementation(_NAME)
    settings = {name: one for name, one in settings.items() if not name.endswith("bounds_S")}
    source = hidden.detach().requires_grad_()
    with LiveBytes() as live, torch.autocast("cpu", torch.bfloat16, enabled=made.autocast):
        given = source * 1
        found = layer(given, **settings)
        ends = given.untyped_storage().nbytes() + found.untyped_storage().nbytes()
        return (live.now - ends) / TOKENS
