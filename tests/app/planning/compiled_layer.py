"""What torch.compile really saves between the passes of a layer of the trainer, found on a CPU.

A layer is traced and cut into its two passes by the compiler's own partitioner, as for a GPU; then
the attempt ends, before any code is made. Attention is the trainer's operation, which only a GPU
can run but every machine can trace.
"""

from __future__ import annotations

import torch
import torch._dynamo
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from transformers import CONFIG_MAPPING, AttentionInterface, AutoModelForCausalLM

from agents.contract.spec import RunSpec
from agents.trainer.execution import layers
from agents.trainer.kernels import compiling, flash_attention
from agents.trainer.model import model, recurrent_layers
from agents.trainer.model.attention import Segments
from agents.trainer.model.forward import Forward

TOKENS = 1024
_NAME = "traced_for_planning"


class _Cut(Exception):
    """Raised when both passes are known."""


def _attend(module, query, key, value, mask, *, bounds_S, host_extent_2, **_):  # noqa: N803
    query, key = query.to(value.dtype), key.to(value.dtype)  # as attention.attend_segments does
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return flash_attention.flash_attention(q, k, v, bounds_S, host_extent_2, 1.0, 0).unsqueeze(
        0
    ), None


def make_layer(family: str, spec: RunSpec, sizes: dict[str, int], num_tokens: int = TOKENS):
    """Return the only layer of a model as the trainer makes it, with its input and settings."""
    config = CONFIG_MAPPING[family](
        num_hidden_layers=1, vocab_size=64, pad_token_id=0, eos_token_id=1, bos_token_id=1, **sizes
    )
    AttentionInterface.register(_NAME, _attend)
    wide = torch.float32 if spec.adapter.kind == "full" else torch.bfloat16
    base = AutoModelForCausalLM.from_config(config, dtype=wide).eval()
    base.requires_grad_(False)
    base.set_attn_implementation(_NAME)
    recurrent_layers.route(base)
    made = model.build_trained_model(
        spec, base, None, plain_template=False, device=torch.device("cpu")
    )
    body = (base if made.lora is None else made.module.get_base_model()).base_model
    made.clock.set([0], [num_tokens], num_tokens, torch.device("cpu"))
    hidden = torch.zeros(1, num_tokens, config.hidden_size, dtype=wide, requires_grad=True)
    places = torch.arange(num_tokens)[None]
    # Granite 4 has none.
    angles = body.rotary_emb(hidden, places) if body.rotary_emb is not None else ()
    for tensor in (hidden, places, *angles, made.clock.tokens_BT1):
        torch._dynamo.maybe_mark_dynamic(tensor, 1)
    segments = Segments.of([num_tokens], torch.device("cpu"))
    in_rows = recurrent_layers.find_places(segments.bounds_S, places)
    for tensor in in_rows.values():
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    settings = {
        "attention_mask": None,
        "position_ids": places,
        "use_cache": False,
        "position_embeddings": angles or None,
        "bounds_S": segments.bounds_S,
        "host_bounds_S": segments.host_bounds_S,
        "host_extent_2": segments.host_extent_2,
        **in_rows,
    }
    return made, body.layers[0], hidden, settings


def fuse_linear(made) -> None:
    """Fuse linear layers that share their input, as the trainer does on a GPU."""
    base = made.module.get_base_model()
    tokens, made.clock.tokens_BT1 = made.clock.tokens_BT1, None
    base.set_attn_implementation("sdpa")
    Forward(made, torch.device("cpu")).fuse_linear()
    made.clock.tokens_BT1 = tokens
    base.set_attn_implementation(_NAME)


def count_saved(family: str, spec: RunSpec, sizes: dict[str, int]) -> int:
    """Return the bytes that a kept layer saves for each token, its input included."""
    made, layer, hidden, settings = make_layer(family, spec, sizes)
    if made.lora is not None:
        fuse_linear(made)
    compiling.fix_settings()
    found: list[torch.Tensor] = []

    def cut(joint, inputs, **more):
        forward, _ = min_cut_rematerialization_partition(
            joint, inputs, **{**more, "compiler": "inductor"}
        )
        (returned,) = (node for node in forward.graph.nodes if node.op == "output")
        seen = set()
        for node in returned.args[0]:
            if node is None or node.op == "placeholder":
                continue
            value = node.meta["val"]
            source = _storage_of(node)
            if isinstance(value, torch.Tensor) and source not in seen:
                seen.add(source)
                found.append(value)
        raise _Cut

    def backend(graph, inputs):
        return aot_module_simplified(
            graph, inputs, fw_compiler=None, partition_fn=cut,
            decompositions=select_decomp_table(),
        )  # fmt: skip

    torch._dynamo.reset()
    compiled = torch.compile(layers._compute, backend=backend, fullgraph=True)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=made.autocast):
            compiled(layer, hidden, (), settings)
    except Exception as error:
        if "_Cut" not in repr(error) + repr(error.__cause__):
            raise
    finally:
        torch._dynamo.reset()
    # The output of a layer is the input of the next one: each counts one of them.
    return sum(
        one.dtype.itemsize * _per_token(one.shape)
        for one in found
        if any(isinstance(size, torch.SymInt) for size in one.shape)
    )


_VIEWS = ("view", "alias", "unsqueeze", "squeeze", "reshape", "permute", "detach")


def _storage_of(node):
    """Follow views of a tensor to what made it."""
    while node.op == "call_function" and any(
        getattr(node.target, "__name__", "").startswith(name) for name in _VIEWS
    ):
        node = node.args[0]
    return node


def _per_token(shape) -> int:
    size = 1
    for one in shape:
        # A dimension may hold all heads of all tokens.
        size *= one.node.hint // TOKENS if isinstance(one, torch.SymInt) else int(one)
    return size
