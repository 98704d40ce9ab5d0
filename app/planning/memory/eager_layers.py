"""Count the bytes of one decoder layer that is not compiled, as autograd saves them call by call.

Layers are not compiled with `compile: off`, on cards too old for Triton, and without a C compiler.
Linear layers with the same input are fused in any case. Beyond what a compiled layer keeps (see
`layers`), each norm saves an fp32 copy of its input, the activation its input and its output, and
dropout one byte per feature for each mask. A test compares the rules with the live tensors between
the passes of layers of several families.
"""

from __future__ import annotations

from dataclasses import replace

from app.planning.memory.attention_scratch import count_attention_scratch
from app.planning.memory.experts import ExpertsMemory
from app.planning.memory.layers import LayerMemory, Sizes, measure_layer

_WIDE = 4  # bytes of fp32, in which norms compute
# Bytes that capped scores keep for each pair of tokens and head without an attention kernel: the
# hyperbolic tangent and the weights in half precision, the softmax in fp32.
_SCORE_BYTES = 8
# Copies of the residual stream in a layer of full training, in half-precision equivalents.
_FULL_HIDDEN = 11


def measure_eager_layer(  # noqa: PLR0913 - all that a layer's memory depends on
    sizes: Sizes,
    *,
    kind: str,
    width: int,
    tokens: int,
    longest_tokens: int,
    num_segments: int,
    num_multiprocessors: int,
    is_exact: bool,
    has_kernels: bool,
    experts: ExpertsMemory,
) -> LayerMemory:
    """Return the memory of a layer; other arguments as in `layers.measure_layer`.

    Args:
        longest_tokens: length of the longest segment, whose scores may be kept.
        has_kernels: whether Triton can compile kernels; without them capped scores are kept.
    """
    compiled = measure_layer(
        sizes, kind=kind, width=width, tokens=tokens, num_segments=num_segments,
        num_multiprocessors=num_multiprocessors, is_exact=is_exact, experts=experts,
    )  # fmt: skip
    kept = count_kept_full(sizes, width) if kind == "full" else count_kept(sizes, width)
    if sizes.has_softcap and not has_kernels:
        kept += _SCORE_BYTES * sizes.num_heads * longest_tokens
    if kind == "full":
        whole_bytes = tokens * kept + width * sizes.num_weights
        again = whole_bytes + compiled.backward_bytes
        return replace(compiled, kept_bytes=whole_bytes, again_bytes=again)
    scratch = count_attention_scratch(
        sizes.heads, tokens, num_segments, num_multiprocessors if is_exact else 0
    )
    unpacked = width * sizes.largest_weights if kind == "qlora" else 0
    kept_bytes = tokens * kept + width * sizes.num_adapter + experts.kept_bytes
    more_ffn = 2 if sizes.has_down else 3
    in_mlp = experts.pass_bytes + unpacked
    in_mlp += tokens * width * (sizes.hidden + more_ffn * sizes.ffn)
    # The MLP's own tensors are freed before attention's backward pass begins.
    gone = (4 if sizes.has_down else 3) * sizes.ffn + 2 * sizes.hidden
    in_attention = tokens * width * (3 * sizes.hidden + 3 * sizes.queries + 2 * sizes.keys - gone)
    grown = _WIDE * sizes.num_adapter
    backward = max(in_mlp, in_attention + scratch) + grown
    # A recomputed layer holds its input and its output in addition.
    ends = 2 * tokens * width * sizes.hidden
    return LayerMemory(
        kept_bytes=kept_bytes,
        input_bytes=tokens * width * sizes.hidden,
        backward_bytes=backward,
        again_bytes=kept_bytes + ends + backward,
    )


def count_kept(sizes: Sizes, width: int) -> int:
    """Return the bytes per token that a layer saves if it keeps its activations.

    Llama-2-7B with LoRA r=16 on q, k, v and o, no dropout: 2 x 4,096 in fp32 (inputs of norms),
    3 x 4,096 (input of the adapters on q, k and v; queries; attention's output), 2 x 4,096 (keys,
    values) and 3 x 11,008 (gate, its activation, up) in bf16, 4 x 32 for the inner values of the
    adapters, 128 for the softmax and 8 for the norms:

    >>> llama = Sizes(hidden=4096, queries=4096, keys=4096, ffn=11008, num_heads=32,
    ...     has_head_norms=False, has_four_norms=False, num_scales=2, num_attention=3,
    ...     has_o=True, num_mlp=0, has_down=False, has_dropout=False, rank=16, num_adapter=524288,
    ...     num_weights=202375168, largest_weights=45088768)
    >>> count_kept(llama, 2)
    140040
    """
    inputs = [
        (sizes.num_attention, sizes.hidden),
        (sizes.num_mlp, sizes.hidden),
        (int(sizes.has_o), sizes.queries),
        (int(sizes.has_down), sizes.ffn),
    ]
    # Without dropout, adapters share their input; the input of `o` is kept as attention's output.
    shared = [(min(1, inputs[0][0]), sizes.hidden), (min(1, inputs[1][0]), sizes.hidden), inputs[3]]
    adapters = sum(count * size for count, size in (inputs if sizes.has_dropout else shared))
    masks = sum(count * size for count, size in inputs) if sizes.has_dropout else 0
    norms = (4 if sizes.has_four_norms else 2) * sizes.hidden
    if sizes.has_head_norms:
        norms += sizes.queries + sizes.keys
    heads = 2 * sizes.queries + 2 * sizes.keys
    if sizes.has_fused_heads:
        heads += 2 * sizes.queries + sizes.keys
    # DoRA keeps the outputs of its layers, for the gradients of the magnitudes.
    values = adapters + heads + 3 * sizes.ffn + sizes.num_dora_outputs
    return width * values + _WIDE * norms + masks + _count_small(sizes)


def count_kept_full(sizes: Sizes, width: int) -> int:
    """Return the same for full training."""
    # The residual stream is fp32 then, since the trained weights are.
    heads = 2 * sizes.queries + 2 * sizes.keys
    return width * (_FULL_HIDDEN * sizes.hidden + heads + 4 * sizes.ffn) + _count_small(sizes)


def _count_small(sizes: Sizes) -> int:
    """Return the bytes of the norms' scales, the softmax's sums and the adapters' inner values."""
    targets = sizes.num_attention + sizes.has_o + sizes.num_mlp + sizes.has_down
    return 4 * (sizes.num_scales + sizes.num_heads) + 2 * sizes.rank * targets
