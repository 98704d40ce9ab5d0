"""The linear layers and other parameters of mixers that carry a state from token to token."""

from __future__ import annotations

from app.planning.shape.config_reader import ConfigReader
from app.planning.shape.layer_shape import LayerParts, Linear, Mixer


def follow_delta_rule(layer: LayerParts, config: ConfigReader, *, is_split: bool) -> None:
    """Add the gated delta rule of Qwen3-Next, or of Qwen3.5, which splits its projections."""
    heads, groups = config.number("linear_num_value_heads"), config.number("linear_num_key_heads")
    value_dim = config.number("linear_value_head_dim")
    keys, values = groups * config.number("linear_key_head_dim"), heads * value_dim
    mixed = 2 * keys + values
    widths = {"in_proj_qkvz": mixed + values, "in_proj_ba": 2 * heads}
    if is_split:
        widths = {"in_proj_qkv": mixed, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    part = "linear_attn"
    layer.attention += [
        Linear(name=n, num_inputs=layer.hidden, num_outputs=w, part=part) for n, w in widths.items()
    ]
    layer.attention.append(
        Linear(name="out_proj", num_inputs=values, num_outputs=layer.hidden, part=part)
    )
    layer.kind = "delta"
    layer.mixer = Mixer(
        num_groups=groups, num_heads=heads, key_dim=keys // groups, value_dim=value_dim
    )
    # Convolution; decay and its bias for each head; norm.
    layer.num_other += mixed * config.number("linear_conv_kernel_dim") + 2 * heads + value_dim


def pass_through_mamba(
    layer: LayerParts,
    config: ConfigReader,
    *,
    prefix: str,
    part: str,
    has_norm: bool,
    output_bias: str = "",
    is_output_adapted: bool = True,
) -> None:
    """Add a Mamba 2 mixer.

    Args:
        layer: layer to which it is added.
        config: the model's config.
        prefix: prefix of its keys in families that also have attention.
        part: module that holds it.
        has_norm: whether its result is normalized.
        output_bias: key of the switch for a bias of the last projection; empty: that of the first.
        is_output_adapted: whether PEFT adapts the last projection.
    """
    heads = config.number("mamba_n_heads", "mamba_num_heads", "num_heads")
    width = config.count("mamba_d_head", "mamba_head_dim") or config.count("head_dim")
    inner = config.count("mamba_d_ssm")
    if not inner:
        expand = config.count("mamba_expand") if prefix else 0
        inner = expand * layer.hidden or heads * width
    state = config.number("mamba_d_state", "ssm_state_size", "state_size")
    groups = config.number("mamba_n_groups", "n_groups")
    mixed = inner + 2 * groups * state
    bias = config.has(f"{prefix}proj_bias") if prefix else config.has("use_bias")
    last_bias = config.has(output_bias) if output_bias else bias
    layer.attention += [
        Linear(name="in_proj", num_inputs=layer.hidden, num_outputs=inner + mixed + heads,
               has_bias=bias, part=part),
        Linear(name="out_proj", num_inputs=inner, num_outputs=layer.hidden, has_bias=last_bias,
               part=part, is_adapted=is_output_adapted),
    ]  # fmt: skip
    layer.kind = "mamba"
    layer.mixer = Mixer(num_groups=groups, num_heads=heads, key_dim=state, value_dim=inner // heads)
    taps = config.number("mamba_d_conv", "conv_kernel")
    has_bias = config.has("mamba_conv_bias") if prefix else config.has("use_conv_bias")
    # Convolution; decay, step and skip of each head; norm.
    layer.num_other += mixed * (taps + int(has_bias)) + 3 * heads + (inner if has_norm else 0)


def convolve(layer: LayerParts, config: ConfigReader) -> None:
    """Add LFM2's short convolution."""
    bias, hidden = config.has("conv_bias"), layer.hidden
    layer.attention += [
        Linear(name="in_proj", num_inputs=hidden, num_outputs=3 * hidden, has_bias=bias,
               part="conv"),
        Linear(name="out_proj", num_inputs=hidden, num_outputs=hidden, has_bias=bias, part="conv"),
    ]  # fmt: skip
    layer.kind = "convolution"
    layer.num_other += hidden * (config.number("conv_L_cache") + int(bias))
