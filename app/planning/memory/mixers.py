"""Count the bytes of mixers that carry a state from token to token: Mamba 2, the gated delta rule.

The kept tensors were derived from the compiler's partition: the convolution keeps its input in
fp32, the operator its inputs, and the gated norm both of its factors. The operator
(agents/trainer/kernels/linear_attention.py) saves nothing else: its backward pass repeats the
forward pass in fp32, which causes a peak of its own. Tests compare both with the trainer's code.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.planning.shape.model_shape import LayerShape, Mixer

# Tokens of a chunk; a token has a weight for every token of its chunk, and a chunk has one state.
_CHUNK_TOKENS = 64
_WIDE = 4  # bytes of fp32
# Number of fp32 copies at the fullest moment of the operator's backward pass: of keys for each head
# of values, of values, of keys, and of the weights within a chunk. Fractions come from tensors that
# are alive for a part of that moment.
_SCRATCH_DELTA, _SCRATCH_MAMBA = (10.0, 7.6, 4.9, 3.8), (5.0, 5.3, 1.2, 3.6)
# Number of fp32 copies of values in the layer's other gradients at that moment: in a layer that
# keeps its activations, and in one that recomputes. Measured with layers of Qwen3.5-9B, and of
# Granite 4 with QLoRA, on an H100.
_OTHER_DELTA, _OTHER_MAMBA = (3.25, 3.3), (4.0, 2.2)


@dataclass(frozen=True, kw_only=True, slots=True)
class MixerMemory:
    """Memory of a mixer, in bytes per token."""

    kept_bytes: float = 0.0
    """Tensors saved for the backward pass, without the inputs of the first adapters."""
    scratch_bytes: float = 0.0
    """Peak of the operator's backward pass, its results included."""
    other_bytes: float = 0.0
    """Other gradients of the layer during that peak: of the convolution and of the operator's
    result."""
    other_again_bytes: float = 0.0
    """The same gradients in a layer that recomputes."""


def count_mixer(layer: LayerShape, width: int) -> MixerMemory:
    """Return the memory of a layer's mixer; 0 for attention, which `layers` counts.

    Args:
        layer: the layer.
        width: bytes of one feature in products.

    Qwen3.5-9B (16 heads of keys and 32 of values, all of 128 features): the fp32 input of the
    convolution, 4 x 8,192; queries and keys, which are repeated for each head of values, 2 x 2 x
    4,096; values, result, gate and gated result, 2 x 4 x 4,096; 12 for each head.

    >>> from app.planning.shape.model_shape import Mixer
    >>> delta = Mixer(num_groups=16, num_heads=32, key_dim=128, value_dim=128)
    >>> _count_delta(delta, 2) == 4 * 8192 + 2 * 2 * 4096 + 2 * 4 * 4096 + 12 * 32
    True
    """
    mixer = layer.mixer
    if mixer is None:
        return MixerMemory()
    keys, values = mixer.num_groups * mixer.key_dim, mixer.num_heads * mixer.value_dim
    convolved = (_WIDE + width) * (2 * keys + values)
    is_delta = layer.kind == "delta"
    copies, copies_again = _OTHER_DELTA if is_delta else _OTHER_MAMBA
    return MixerMemory(
        kept_bytes=(_count_delta if is_delta else _count_mamba)(mixer, width),
        scratch_bytes=_count_scratch(mixer, _SCRATCH_DELTA if is_delta else _SCRATCH_MAMBA),
        other_bytes=convolved + copies * _WIDE * values,
        other_again_bytes=convolved + copies_again * _WIDE * values,
    )


def _count_delta(mixer: Mixer, width: int) -> int:
    keys, values = mixer.num_groups * mixer.key_dim, mixer.num_heads * mixer.value_dim
    heads = (2 * width + 2 * _WIDE) * mixer.num_heads
    repeated = mixer.num_heads * mixer.key_dim
    return _WIDE * (2 * keys + values) + width * (2 * repeated + 4 * values) + heads


def _count_mamba(mixer: Mixer, width: int) -> int:
    keys, values = mixer.num_groups * mixer.key_dim, mixer.num_heads * mixer.value_dim
    # Convolved keys and values are fp32; the gate, the input and the gated result are narrow.
    wide = _WIDE * (2 * keys + values) + 2 * _WIDE * values
    # The saved gate and decays are views of one projection's output, so all of it stays allocated.
    whole = 2 * values + 2 * keys + mixer.num_heads
    heads = _WIDE * mixer.num_heads
    return wide + width * (whole + 2 * keys + 2 * values) + heads + _WIDE


def _count_scratch(mixer: Mixer, copies: tuple[float, float, float, float]) -> float:
    """Return the bytes per token of the operator's backward pass, with copies as above."""
    heads = mixer.num_heads
    of_keys, of_values, of_groups, of_pairs = copies
    features = of_keys * heads * mixer.key_dim + of_values * heads * mixer.value_dim
    features += of_groups * mixer.num_groups * mixer.key_dim + of_pairs * heads * _CHUNK_TOKENS
    # States of the chunks and their gradients.
    states = 1.5 * heads * mixer.key_dim * mixer.value_dim / _CHUNK_TOKENS
    return _WIDE * (features + states)
