"""Count the bytes of one compiled decoder layer: those kept between its passes, and its peaks.

The rules were derived, buffer by buffer, from the code that torch.compile generates for the
trainer's layers, in which linear layers of one input are fused. A kept layer saves its input, the
inputs of norms and adapters, queries, keys, values, attention's output and the two halves of the
gated MLP. Tests compare the rules with the compiler's own partition and with the buffers of its
code, for several families, targets and dropouts. Most functions count features of one token, each
as wide as the type of the matrix products. For layers that are not compiled see `eager_layers`.

Dropout costs memory: each adapter saves its own input after dropout, and a layer that recomputes
its activations holds the random bits of all masks, as large as the inputs themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agents.contract.spec import RunSpec
from app.planning.memory.attention_scratch import (
    Heads,
    count_attention_scratch,
    count_cudnn_scratch,
)
from app.planning.memory.experts import ExpertsMemory
from app.planning.memory.mixers import MixerMemory, count_mixer
from app.planning.shape.model_shape import LayerShape, ModelShape, choose_targets

_NO_EXPERTS = ExpertsMemory()
_READERS = {
    "attention": (
        *("q_proj", "k_proj", "v_proj", "qkv_proj", "in_proj"),
        *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba"),
    ),
    "o": ("o_proj", "out_proj"),
    "mlp": ("gate_proj", "up_proj", "gate_up_proj", "input_linear"),
    "down": ("down_proj", "output_linear"),
}
# Families whose activation is GELU.
_GELU = ("gemma", "gemma2", "gemma3_text")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerMemory:
    """Memory of one layer for all tokens of a micro-batch."""

    kept_bytes: float
    """Activations saved for the backward pass if the layer keeps them, in bytes."""
    input_bytes: float
    """The layer's input, which is all that a layer keeps if it recomputes, in bytes."""
    backward_bytes: float
    """Peak of the backward pass beyond the kept activations, in bytes."""
    again_bytes: float
    """Peak of the backward pass of a recomputed layer, its input included, in bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Properties of a layer and its adapters that the rules depend on."""

    hidden: int
    queries: int
    keys: int
    ffn: int
    """Inner width of the MLP, or of the experts that one token is routed to."""
    num_heads: int
    has_head_norms: bool
    """True if queries and keys are normalized; the inputs of these norms are saved too."""
    has_four_norms: bool
    """True if norms also follow attention and MLP; one more input is saved then."""
    num_scales: int
    """Number of fp32 scales of all norms, per token."""
    num_attention: int
    """Number of adapters on the inputs of attention."""
    has_o: bool
    num_mlp: int
    """Number of adapters on gate and up, or on the layer that fuses both."""
    has_down: bool
    has_dropout: bool
    rank: int
    """Rank of the adapters."""
    num_adapter: int
    """Number of trained values of the layer's adapters."""
    num_weights: int
    """Number of weights of all linear layers."""
    largest_weights: int
    """Number of weights of the largest linear layer."""
    has_fused_gate: bool = False
    """True if gate and up are one layer, whose output is kept whole."""
    has_fused_heads: bool = False
    """True if queries, keys and values are one layer, whose output is kept whole."""
    has_gelu: bool = False
    """True if the activation is GELU, whose gradient takes one more buffer with dropout."""
    has_softcap: bool = False
    """True if attention's scores are capped."""
    num_dora_outputs: int = 0
    """Number of output features of the layers with a DoRA adapter."""
    num_down: int = 0
    """Number of values of the adapters' down projections."""
    num_small: int = 0
    """Bytes per token of the router and of the order of its rows."""
    has_gates: bool = False
    """True if attention's output is multiplied by gates."""
    mixer: MixerMemory = field(default_factory=MixerMemory)
    """Memory of a mixer with a state, instead of attention or in addition to it."""

    @property
    def heads(self) -> Heads:
        """Sizes of attention."""
        return Heads(num=self.num_heads, queries=self.queries, keys=self.keys)


def read_sizes(shape: ModelShape, layer: LayerShape, spec: RunSpec) -> Sizes:
    """Return the properties of a layer that the rules depend on."""
    linears = {linear.name: linear for linear in layer.linears}
    names = {linear.name for linear in choose_targets(layer, spec.adapter.targets)}
    full = spec.adapter.kind == "full"
    attends = layer.kind in ("attention", "both")
    # Norms of heads are the only ones whose sizes are no multiple of the residual stream.
    has_head_norms = attends and layer.num_norms % shape.hidden != 0
    counts = {
        kind: 0 if full else len(names.intersection(readers)) for kind, readers in _READERS.items()
    }
    rank = spec.adapter.rank
    targets = () if full else choose_targets(layer, spec.adapter.targets)
    queries = shape.num_heads * shape.head_dim * int(attends)
    return Sizes(
        hidden=shape.hidden,
        queries=queries,
        keys=shape.num_kv_heads * shape.head_dim * int(attends),
        ffn=_count_inner(shape, layer),
        num_heads=shape.num_heads * int(attends),
        has_head_norms=has_head_norms,
        has_four_norms=layer.num_norms >= 4 * shape.hidden,
        num_scales=layer.num_norms // shape.hidden
        + (shape.num_heads + shape.num_kv_heads if has_head_norms else 0),
        num_attention=counts["attention"],
        has_o=bool(counts["o"]),
        num_mlp=counts["mlp"],
        has_down=bool(counts["down"]),
        has_dropout=spec.adapter.dropout > 0 and not full,
        rank=rank,
        num_adapter=sum(rank * (linear.num_inputs + linear.num_outputs) for linear in targets),
        num_weights=sum(linear.num_weights for linear in layer.linears),
        largest_weights=max(linear.num_weights for linear in layer.linears),
        has_fused_gate="gate_up_proj" in linears,
        has_fused_heads="qkv_proj" in linears,
        has_gelu=shape.family in _GELU,
        has_softcap=shape.has_softcap,
        num_dora_outputs=sum(linear.num_outputs for linear in targets) if spec.adapter.dora else 0,
        num_down=sum(rank * linear.num_inputs for linear in targets),
        num_small=_count_routing(shape) if layer.num_router else 0,
        # Gates double the outputs of the queries' projection.
        has_gates=attends and "q_proj" in linears and linears["q_proj"].num_outputs == 2 * queries,
        mixer=count_mixer(layer, 4 if spec.precision == "fp32" else 2),
    )


def _count_inner(shape: ModelShape, layer: LayerShape) -> int:
    """Return the inner width of the MLP, or of a token's experts and the shared one together."""
    if not layer.num_router:
        return shape.ffn if layer.num_mlp else 0
    shared = max(
        (linear.num_inputs for linear in layer.linears if linear.name == "down_proj"), default=0
    )
    return shape.expert_ffn * shape.num_experts_met + shared


def _count_routing(shape: ModelShape) -> int:
    """Return the bytes per token that a router and the order of its experts' rows save."""
    # Logits and fp32 sums; then for each expert of a token its index (8), its weight in fp32 (4)
    # and in the products' type (2), and its positions in two orders (16).
    return 2 * shape.num_experts + 12 + (8 + 4 + 2 + 16) * shape.num_experts_met


def count_kept(sizes: Sizes, width: int) -> int:
    """Return the bytes that a kept layer saves for each token, its input included.

    Llama-2-7B with LoRA r=16 on q, k, v and o, no dropout: 3 x 4,096 (input, the norm's output,
    the middle of the residual stream) + 2 x 4,096 (queries, attention's output) + 2 x 4,096 (keys,
    values) + 2 x 11,008 (gate, up) in bf16, 4 x 32 for the inner values of the adapters, 128 for
    the softmax and 8 for the norms:

    >>> llama = Sizes(hidden=4096, queries=4096, keys=4096, ffn=11008, num_heads=32,
    ...     has_head_norms=False, has_four_norms=False, num_scales=2, num_attention=3,
    ...     has_o=True, num_mlp=0, has_down=False, has_dropout=False, rank=16, num_adapter=524288,
    ...     num_weights=202375168, largest_weights=45088768)
    >>> count_kept(llama, 2)
    101640
    """
    hidden = 2 + _inputs(sizes.num_attention, sizes) + _inputs(sizes.num_mlp, sizes)
    hidden += int(sizes.has_four_norms)
    queries = 2 + int(sizes.has_head_norms) + int(sizes.has_gates)
    # With a mask or gates, the input of `o` differs from attention's output and is saved too.
    queries += int(sizes.has_o and (sizes.has_dropout or sizes.has_gates))
    keys = 2 + int(sizes.has_head_norms)
    if sizes.has_fused_heads:
        # The saved values are a view of the fused output, so all of it stays allocated.
        queries, keys = queries + 1, keys + 1
    ffn = 2 + int(sizes.has_down)
    wide = hidden * sizes.hidden + queries * sizes.queries + keys * sizes.keys + ffn * sizes.ffn
    kept = width * (wide + _dora_outputs(sizes)) + _small(sizes)
    return kept + int(sizes.mixer.kept_bytes)


def count_kept_full(sizes: Sizes, width: int, wide_width: int) -> int:
    """Return the same for full training, in which the residual stream is fp32."""
    # Narrow: both norms' outputs, attention's projection, queries, keys, values, attention's
    # output, gate, up and their product.
    wide = 3 * sizes.hidden + 2 * sizes.queries + 2 * sizes.keys + 3 * sizes.ffn
    return wide_width * sizes.hidden + width * wide + _small(sizes)


def measure_layer(  # noqa: PLR0913 - all that a layer's memory depends on
    sizes: Sizes,
    *,
    kind: str,
    width: int,
    tokens: int,
    num_segments: int,
    num_multiprocessors: int,
    is_exact: bool,
    is_hopper: bool = False,
    experts: ExpertsMemory = _NO_EXPERTS,
) -> LayerMemory:
    """Return the memory of a layer.

    Args:
        sizes: sizes of the layer.
        kind: kind of adapter: lora, qlora or full.
        width: bytes of one feature in products.
        tokens: number of tokens in the micro-batch.
        num_segments: number of sequences in the micro-batch.
        num_multiprocessors: multiprocessors of the card; see `count_attention_scratch`.
        is_exact: whether attention's backward pass is deterministic.
        is_hopper: whether cuDNN may compute it; see `count_cudnn_scratch`.
        experts: additional memory of the layer's experts.
    """
    heads = sizes.heads
    scratch = count_attention_scratch(
        heads, tokens, num_segments, num_multiprocessors if is_exact else 0
    )
    if is_exact and is_hopper and heads.num:
        scratch = max(scratch, count_cudnn_scratch(heads, tokens, num_segments))
    if kind == "full":
        return _measure_full(sizes, width, tokens, scratch)
    # With dropout each adapter's down projection is cast within the layer; otherwise the model's
    # permanent copies are used (see `forecast.count_copies`).
    casts = width * sizes.num_down if sizes.has_dropout else 0
    kept = tokens * count_kept(sizes, width) + casts + experts.kept_bytes
    unpacked = width * sizes.largest_weights if kind == "qlora" else 0
    wait = max(0, unpacked - tokens * width * sizes.ffn)  # reuses one MLP-wide buffer
    grown = 4 * sizes.num_adapter  # fp32 gradients of the adapters
    more = _mlp_hidden(sizes) * sizes.hidden + _mlp_more(sizes) * sizes.ffn
    mlp = tokens * width * more + wait + experts.pass_bytes
    mixer = sizes.mixer
    # Layers with attention and a mixer run their backward passes one after the other.
    scratch = max(scratch, int(tokens * mixer.scratch_bytes))
    masked = 2 * sizes.hidden if mixer.scratch_bytes and sizes.has_dropout else 0
    extra = width * masked + mixer.other_bytes
    attention = tokens * (width * _attention_more(sizes) + extra) + scratch
    small = _small(sizes) + mixer.kept_bytes
    again = tokens * (width * _count_again(sizes) + small) + wait
    again += experts.kept_bytes + experts.pass_bytes
    extra = width * masked + mixer.other_again_bytes
    again_attention = tokens * (width * _again_attention(sizes) + small + extra) + scratch
    return LayerMemory(
        kept_bytes=kept,
        input_bytes=tokens * width * sizes.hidden,
        backward_bytes=max(mlp, attention) + grown,
        again_bytes=max(again, again_attention) + grown + casts,
    )


def _inputs(count: int, sizes: Sizes) -> int:
    """Return the number of copies of their input that `count` adapters save."""
    # Each adapter has its own dropout mask; without dropout all share one input.
    return count if sizes.has_dropout else min(count, 1)


def _small(sizes: Sizes) -> int:
    """Return the bytes of the norms' scales, the softmax's sums and the adapters' inner values."""
    targets = sizes.num_attention + sizes.has_o + sizes.num_mlp + sizes.has_down
    scales = 4 * (sizes.num_scales + sizes.num_heads)
    return scales + 2 * sizes.rank * targets + sizes.num_small


def _dora_outputs(sizes: Sizes) -> int:
    """Return the features that DoRA saves for the gradients of its magnitudes."""
    outputs = sizes.num_dora_outputs
    if not outputs or sizes.has_dropout:
        return outputs
    # Without dropout the compiler saves the outputs of gate and up instead of the values computed
    # from them, and one output of `o` or `down` instead of the middle of the residual stream.
    followed = sizes.num_mlp * (2 if sizes.has_fused_gate else 1) * sizes.ffn
    return outputs - followed - int(sizes.has_down or sizes.has_o) * sizes.hidden


def _dora_again(sizes: Sizes) -> int:
    """Return the features that DoRA adds to the fullest moment of a recomputed layer."""
    if not sizes.num_dora_outputs:
        return 0
    # Outputs of queries, keys and values, and three buffers of the MLP. Dropout adds the separate
    # products of the plain and the masked input.
    heads = (sizes.queries + 2 * sizes.keys) * int(sizes.num_attention > 0)
    has_mlp = int(sizes.num_mlp > 0 or sizes.has_down)
    if not sizes.has_dropout:
        return heads + 3 * has_mlp * sizes.ffn
    return heads + 2 * int(sizes.has_o) * sizes.hidden + 7 * has_mlp * sizes.ffn


def _dora_more(sizes: Sizes) -> int:
    """Return the MLP-wide buffers that DoRA adds to a backward pass, which computes in fp32."""
    return 5 if sizes.num_dora_outputs and (sizes.num_mlp or sizes.has_down) else 0


def _mlp_hidden(sizes: Sizes) -> int:
    """Return the buffers as wide as the residual stream that the MLP's backward pass adds."""
    # The incoming gradient, and three buffers for the gradient of a norm after the MLP.
    count = 1 + 3 * int(sizes.has_four_norms)
    # Without adapters in the MLP, the gradient of its output also stays alive.
    return count + int(not sizes.num_mlp and not sizes.has_down)


def _mlp_more(sizes: Sizes) -> int:
    """Return the MLP-wide buffers that the backward pass adds to the kept ones."""
    more = 2
    if sizes.has_down:
        # Without dropout the product of gate and up is kept, and reused for its gradient.
        more = 3 if sizes.has_dropout else 1
    return more + int(sizes.has_fused_gate and sizes.num_mlp > 0) + _dora_more(sizes)


def _attention_more(sizes: Sizes) -> int:
    """Return the features that attention's backward pass adds, minus those freed before it."""
    # Freed: the middle of the residual stream and all of the MLP. Added: gradients of the output,
    # the residual stream, attention's output, queries, keys and values.
    gone = (1 + _inputs(sizes.num_mlp, sizes)) * sizes.hidden
    gone += (2 + int(sizes.has_down)) * sizes.ffn
    return 2 * sizes.hidden + 2 * sizes.queries + 2 * sizes.keys - gone


def _count_again(sizes: Sizes) -> int:
    """Return the features at the fullest moment of a recomputed layer, in its MLP."""
    masked = 2 if sizes.has_dropout else 1
    hidden = 3 + int(sizes.has_four_norms)
    for count in (sizes.num_attention, sizes.num_mlp):
        hidden += masked * _inputs(count, sizes)
    heads = int(sizes.has_head_norms) + int(sizes.has_fused_heads)
    queries = 2 + heads + (2 if sizes.has_o and sizes.has_dropout else 0)
    # Without dropout one buffer less than in the compiler's code for a CPU, which tests read.
    ffn = 4 + (masked * int(sizes.has_down) if sizes.has_dropout else 0)
    ffn += int(sizes.has_fused_gate) + int(sizes.has_gelu and sizes.has_dropout)
    wide = _dora_again(sizes) + queries * sizes.queries + (2 + heads) * sizes.keys
    return hidden * sizes.hidden + wide + ffn * sizes.ffn


def _again_attention(sizes: Sizes) -> int:
    """Return the features in attention's backward pass of a recomputed layer."""
    hidden = 3 + (2 * sizes.num_attention if sizes.has_dropout else 0)
    return hidden * sizes.hidden + 5 * sizes.queries + 6 * sizes.keys


def _measure_full(sizes: Sizes, width: int, tokens: int, scratch: int) -> LayerMemory:
    """Return the memory of a layer whose weights are trained."""
    wide = 4
    # The fp32 weights are cast within the layer, so a kept layer also holds the narrow copies.
    kept = tokens * count_kept_full(sizes, width, wide) + width * sizes.num_weights
    mlp = tokens * (wide * sizes.hidden + width * sizes.ffn) + wide * sizes.largest_weights
    gone = tokens * width * (2 * sizes.hidden + 3 * sizes.ffn) + width * 3 * sizes.largest_weights
    attention = tokens * (2 * wide * sizes.hidden + width * 2 * (sizes.queries + sizes.keys))
    attention += scratch + wide * 3 * sizes.largest_weights - gone
    # At the end of the pass the fp32 gradients of all weights are allocated.
    end = wide * (2 * sizes.hidden * tokens + sizes.num_weights)
    again = 8 * sizes.hidden + 2 * sizes.queries + 2 * sizes.keys + 6 * sizes.ffn
    casts = width * (sizes.num_weights - sizes.largest_weights)
    again_bytes = tokens * (width * again + _small(sizes)) + casts
    return LayerMemory(
        kept_bytes=kept,
        input_bytes=tokens * wide * sizes.hidden,
        backward_bytes=max(mlp, attention, end - kept),
        again_bytes=max(again_bytes, end + wide * sizes.hidden * tokens),
    )
