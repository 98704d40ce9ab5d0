"""The decoder layers of families that differ from a Llama by more than a norm or a bias.

Each function derives one layer of a family's class in Transformers from a config: its linear layers
with their names, and the number of its other parameters. Tests compare them with the classes.
`mixer_layers` has the layers that carry a state from token to token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.planning.shape.config_reader import ConfigReader
from app.planning.shape.layer_shape import Experts, LayerParts, LayerShape, Linear
from app.planning.shape.mixer_layers import convolve, follow_delta_rule, pass_through_mamba

_KIND = "layer_types"


def _widths(config: ConfigReader) -> tuple[int, int, int]:
    """Return the width of a head, and the features of all queries and of all keys."""
    heads = config.number("num_attention_heads")
    width = config.count("head_dim") or config.number("hidden_size") // heads
    return width, heads * width, (config.count("num_key_value_heads") or heads) * width


def _attend(
    layer: LayerParts,
    config: ConfigReader,
    *,
    on_qkv: bool | None = None,
    on_output: bool | None = None,
    output: str = "o_proj",
    part: str = "self_attn",
    gates: bool = False,
) -> None:
    """Add attention with separate queries, keys and values, by default with `attention_bias`."""
    _, queries, keys = _widths(config)
    bias = config.has("attention_bias")
    on_qkv, on_output = (bias if given is None else given for given in (on_qkv, on_output))
    # With gates, the projection of the queries also gives a gate for each of their features.
    widths = {"q_proj": queries * (2 if gates else 1), "k_proj": keys, "v_proj": keys}
    layer.attention += [
        Linear(name=n, num_inputs=layer.hidden, num_outputs=w, has_bias=on_qkv, part=part)
        for n, w in widths.items()
    ]
    layer.attention.append(
        Linear(name=output, num_inputs=queries, num_outputs=layer.hidden, has_bias=on_output,
               part=part)
    )  # fmt: skip


def _feed(
    layer: LayerParts,
    width: int,
    *,
    part: str = "mlp",
    bias: bool = False,
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
) -> None:
    """Add an MLP: all but the last of its layers read the same input."""
    *ups, down = names
    layer.mlp += [
        Linear(name=n, num_inputs=layer.hidden, num_outputs=width * (2 if len(ups) == 1 and
               n in ("gate_up_proj", "input_linear") else 1), has_bias=bias, part=part)
        for n in ups
    ]  # fmt: skip
    layer.mlp.append(
        Linear(name=down, num_inputs=width, num_outputs=layer.hidden, has_bias=bias, part=part)
    )


def _route(layer: LayerParts, config: ConfigReader, width: int, *, matrices: int = 3) -> None:
    """Add routed experts without biases."""
    count = config.number("num_experts", "num_local_experts", "n_routed_experts")
    met = config.count("num_experts_per_tok", "top_k_experts") or 1
    one = matrices * layer.hidden * width
    layer.experts = Experts(
        num_router=count * layer.hidden, num_experts_params=count * one, num_met_params=met * one
    )


def _begin(config: ConfigReader, norms: int = 2) -> LayerParts:
    hidden = config.number("hidden_size")
    return LayerParts(hidden=hidden, num_norms=norms * hidden)


def _kind(config: ConfigReader, place: int, name: str = _KIND) -> str:
    kinds = config.each(name, place + 1)
    return str(kinds[place]) if kinds else ""


def read_llama(config: ConfigReader, place: int) -> LayerShape:
    """Return a layer of Llama and similar families."""
    layer = _begin(config)
    _attend(layer, config)
    _feed(layer, config.number("intermediate_size"), bias=config.has("mlp_bias"))
    return layer.finish()


def read_unbiased(config: ConfigReader, place: int) -> LayerShape:
    """Return a layer without any bias, even if the config asks for one (Mistral's)."""
    layer = _begin(config)
    _attend(layer, config, on_qkv=False, on_output=False)
    _feed(layer, config.number("intermediate_size"))
    return layer.finish()


def read_cohere(config: ConfigReader, place: int) -> LayerShape:
    """Return a layer of Cohere, whose attention and MLP are parallel and share one norm."""
    layer = _begin(config, 1)
    _attend(layer, config)
    _feed(layer, config.number("intermediate_size"))
    if config.has("use_qk_norm"):
        layer.num_norms += sum(_widths(config)[1:])
    return layer.finish()


def read_olmo(config: ConfigReader, place: int) -> LayerShape:
    """Return a layer of OLMo 2 and 3, which normalize all queries and all keys at once."""
    layer = _begin(config)
    _attend(layer, config)
    _feed(layer, config.number("intermediate_size"))
    layer.num_norms += sum(_widths(config)[1:])  # one norm over all queries, one over all keys
    return layer.finish()


def read_glm4(config: ConfigReader, place: int) -> LayerShape:
    """Return a layer of GLM-4."""
    layer = _begin(config, 4)
    _attend(layer, config, on_output=False)
    _feed(layer, config.number("intermediate_size"), names=("gate_up_proj", "down_proj"))
    return layer.finish()


def read_glm4_moe(config: ConfigReader, place: int) -> LayerShape:
    """Return a layer of GLM-4.5 to 4.7."""
    layer = _begin(config)
    _attend(layer, config, on_output=False)
    if config.has("use_qk_norm"):
        layer.num_norms += 2 * _widths(config)[0]
    _feed_deepseek(layer, config, place)
    return layer.finish()


def _feed_deepseek(layer: LayerParts, config: ConfigReader, place: int) -> None:
    """Add a dense MLP, or routed and shared experts."""
    kinds = config.each("mlp_layer_types", place + 1)
    is_dense = kinds[place] == "dense" if kinds else place < config.count("first_k_dense_replace")
    if is_dense or not config.count("n_routed_experts"):
        _feed(layer, config.number("intermediate_size"))
        return
    width = config.number("moe_intermediate_size")
    shared = config.count("n_shared_experts")
    if shared:
        _feed(layer, shared * width, part="mlp.shared_experts")
    _route(layer, config, width)


def read_deepseek(config: ConfigReader, place: int) -> LayerShape:
    """Return a layer with latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1)."""
    layer = _begin(config)
    heads = config.number("num_attention_heads")
    nope, rope = config.number("qk_nope_head_dim"), config.number("qk_rope_head_dim")
    value, latent = config.number("v_head_dim"), config.number("kv_lora_rank")
    bias = config.has("attention_bias")

    def add(name: str, inputs: int, outputs: int, *, has_bias: bool = False) -> None:
        layer.attention.append(
            Linear(name=name, num_inputs=inputs, num_outputs=outputs, has_bias=has_bias,
                   part="self_attn")
        )  # fmt: skip

    low = config.count("q_lora_rank")
    if low:
        add("q_a_proj", layer.hidden, low, has_bias=bias)
        add("q_b_proj", low, heads * (nope + rope))
    else:
        add("q_proj", layer.hidden, heads * (nope + rope))
    add("kv_a_proj_with_mqa", layer.hidden, latent + rope, has_bias=bias)
    add("kv_b_proj", latent, heads * (nope + value))
    add("o_proj", heads * value, layer.hidden, has_bias=bias)
    layer.num_norms += low + latent
    _feed_deepseek(layer, config, place)
    return layer.finish()


def read_gpt_oss(config: ConfigReader, place: int) -> LayerShape:
    """Return a layer of gpt-oss, with an attention sink for each head and biased experts."""
    layer = _begin(config)
    _attend(layer, config)
    layer.num_other = config.number("num_attention_heads")  # sinks
    width, count = config.number("intermediate_size"), config.number("num_local_experts")
    one = 3 * layer.hidden * width + 2 * width + layer.hidden  # with biases
    layer.experts = Experts(
        num_router=count * (layer.hidden + 1),
        num_experts_params=count * one,
        num_met_params=config.number("num_experts_per_tok") * one,
    )
    return layer.finish()


def read_llama4(config: ConfigReader, place: int) -> LayerShape:
    """Return a layer of Llama 4."""
    layer = _begin(config)
    _attend(layer, config)
    step = config.count("interleave_moe_layer_step") or 1
    chosen = config.entries("moe_layers")
    if place in chosen if chosen else (place + 1) % step == 0:
        width = config.number("intermediate_size")
        _feed(layer, width, part="feed_forward.shared_expert")
        _route(layer, config, width)
    else:
        _feed(layer, config.number("intermediate_size_mlp"), part="feed_forward")
    return layer.finish()


def read_phi(config: ConfigReader, place: int) -> LayerShape:
    """Return a layer of Phi 1 and 2."""
    layer = _begin(config, 2)  # one norm with a bias
    _attend(layer, config, on_qkv=True, on_output=True, output="dense")
    if config.has("qk_layernorm"):
        layer.num_norms += 4 * _widths(config)[0]
    _feed(layer, config.number("intermediate_size"), bias=True, names=("fc1", "fc2"))
    return layer.finish()


def read_gemma4(config: ConfigReader, place: int) -> LayerShape:
    """Return a layer of Gemma 4: full attention has wider heads, the last layers reuse keys."""
    layer = _begin(config, 4)
    heads, count = config.number("num_attention_heads"), config.number("num_hidden_layers")
    kinds = config.each(_KIND, count)
    is_full = place + 1 == count or (
        kinds[place] == "full_attention" if kinds else (place + 1) % 6 == 0
    )
    numbered = config.mapping("per_layer_config").items()
    own: Any = next((one for key, one in numbered if key.isdecimal() and int(key) == place), {})
    own = ConfigReader(own if isinstance(own, Mapping) else {})
    width, keys = config.number("head_dim"), config.number("num_key_value_heads")
    shares_values = is_full and config.has("attention_k_eq_v")
    if is_full:
        width = own.count("head_dim") or config.number("global_head_dim")
        fewer = own.count("num_key_value_heads") or config.count("num_global_key_value_heads")
        keys = fewer if shares_values and fewer else keys
    reuses = place >= count - config.count("num_kv_shared_layers")
    widths = {"q_proj": heads * width}
    if not reuses:
        widths["k_proj"] = keys * width
        if not shares_values:
            widths["v_proj"] = keys * width
    bias, part = config.has("attention_bias"), "self_attn"
    layer.attention = [
        Linear(name=n, num_inputs=layer.hidden, num_outputs=w, has_bias=bias, part=part)
        for n, w in widths.items()
    ]
    inputs, outputs = heads * width, layer.hidden
    layer.attention.append(
        Linear(name="o_proj", num_inputs=inputs, num_outputs=outputs, has_bias=bias, part=part)
    )
    layer.num_norms += width if reuses else 2 * width
    wide = 2 if reuses and config.has("use_double_wide_mlp") else 1
    _feed(layer, wide * config.number("intermediate_size"))
    _add_per_layer_input(layer, config)
    if config.has("enable_moe_block"):
        _route(layer, config, config.number("moe_intermediate_size"))
        layer.num_norms += 3 * layer.hidden
        layer.num_other += layer.hidden + config.number("num_experts")  # scales of the router
    return layer.finish()


def _add_per_layer_input(layer: LayerParts, config: ConfigReader) -> None:
    width = config.count("hidden_size_per_layer_input")
    if width:
        _add_side(layer, "per_layer_input_gate", layer.hidden, width)
        _add_side(layer, "per_layer_projection", width, layer.hidden)
        layer.num_norms += layer.hidden


def _add_side(layer: LayerParts, place: str, inputs: int, outputs: int) -> None:
    part, _, name = place.rpartition(".")
    layer.mlp.append(Linear(name=name, num_inputs=inputs, num_outputs=outputs, part=part or "."))


def read_gemma3n(config: ConfigReader, place: int) -> LayerShape:
    """Return a layer of Gemma 3n, with the matrices that mix its parallel residual streams."""
    layer = _begin(config, 4)
    width = _widths(config)[0]
    _attend(layer, config)
    layer.num_norms += 2 * width
    if place >= config.number("num_hidden_layers") - config.count("num_kv_shared_layers"):
        layer.attention = [one for one in layer.attention if one.name in ("q_proj", "o_proj")]
        layer.num_norms -= width
    _feed(layer, config.number("intermediate_size"))
    streams, rank = config.number("altup_num_inputs"), config.number("laurel_rank")
    _add_side(layer, "altup.correction_coefs", streams, streams)
    _add_side(layer, "altup.prediction_coefs", streams, streams * streams)
    _add_side(layer, "altup.modality_router", layer.hidden, streams)
    _add_side(layer, "laurel.linear_left", layer.hidden, rank)
    _add_side(layer, "laurel.linear_right", rank, layer.hidden)
    layer.num_norms += 2 * layer.hidden
    layer.num_other += layer.hidden  # scale of the corrected stream
    _add_per_layer_input(layer, config)
    return layer.finish()


def count_per_layer_inputs(config: ConfigReader) -> int:
    """Return the parameters of the per-layer embedding of Gemma 3n and 4."""
    width = config.count("hidden_size_per_layer_input")
    if not width:
        return 0
    wide = width * config.number("num_hidden_layers")
    rows = config.number("vocab_size_per_layer_input") + config.number("hidden_size")
    return wide * rows + width


def count_streams(config: ConfigReader) -> int:
    """Return the same plus the projections of Gemma 3n's parallel residual streams."""
    streams = config.number("altup_num_inputs") - 1
    return 2 * streams * config.number("hidden_size") ** 2 + count_per_layer_inputs(config)


def read_qwen_hybrid(config: ConfigReader, place: int, *, is_split: bool) -> LayerShape:
    """Return a layer of Qwen3-Next, or of Qwen3.5, which splits its projections."""
    layer = _begin(config)
    kind = _kind(config, place)
    interval = config.count("full_attention_interval") or 4
    is_linear = kind == "linear_attention" if kind else (place + 1) % interval != 0
    if is_linear:
        follow_delta_rule(layer, config, is_split=is_split)
    else:
        _attend(layer, config, gates=True)
        layer.num_norms += 2 * _widths(config)[0]
    step = config.count("decoder_sparse_step") or 1
    if (
        not config.count("num_experts")
        or place in config.entries("mlp_only_layers")
        or (place + 1) % step
    ):
        _feed(layer, config.number("intermediate_size"))
        return layer.finish()
    _feed(layer, config.number("shared_expert_intermediate_size"), part="mlp.shared_expert")
    layer.mlp.append(
        Linear(name="shared_expert_gate", num_inputs=layer.hidden, num_outputs=1, part="mlp")
    )
    _route(layer, config, config.number("moe_intermediate_size"))
    return layer.finish()


def read_granite_hybrid(config: ConfigReader, place: int) -> LayerShape:
    """Return a layer of Granite 4."""
    layer = _begin(config)
    kind = _kind(config, place) or _kind(config, place, "layers_block_type")
    if kind in ("full_attention", "attention"):
        _attend(layer, config)
    else:
        pass_through_mamba(layer, config, prefix="mamba_", part="mamba", has_norm=True)
    width = config.number("shared_intermediate_size")
    _feed(layer, width, part="shared_mlp", names=("input_linear", "output_linear"))
    if config.count("num_local_experts"):
        _route(layer, config, config.number("intermediate_size"))
    return layer.finish()


def read_falcon_h1(config: ConfigReader, place: int) -> LayerShape:
    """Return a layer of Falcon-H1, with Mamba and attention in parallel."""
    layer = _begin(config)
    pass_through_mamba(
        layer, config, prefix="mamba_", part="mamba", has_norm=config.has("mamba_rms_norm"),
        output_bias="projectors_bias", is_output_adapted=False,
    )  # fmt: skip
    _attend(layer, config)
    layer.kind = "both"
    bias = config.has("mlp_bias")
    _feed(layer, config.number("intermediate_size"), part="feed_forward", bias=bias)
    return layer.finish()


def read_nemotron_h(config: ConfigReader, place: int) -> LayerShape:
    """Return a layer of Nemotron-H, which is only one of attention, Mamba, MLP and experts."""
    layer = _begin(config, 1)
    kind = _kind(config, place, "layers_block_type") or _kind(config, place)
    bias = config.has("mlp_bias")
    if kind in ("full_attention", "attention"):
        _attend(layer, config, part="mixer")
        return layer.finish()
    if kind in ("linear_attention", "mamba"):
        pass_through_mamba(
            layer, config, prefix="", part="mixer", has_norm=True, is_output_adapted=False
        )
        return layer.finish()
    layer.kind = "none"
    names = ("up_proj", "down_proj")
    if kind == "moe":
        shared = config.number("moe_shared_expert_intermediate_size")
        _feed(layer, shared, part="mixer.shared_experts", bias=bias, names=names)
        _route(layer, config, config.number("moe_intermediate_size"), matrices=2)
    else:
        _feed(layer, config.number("intermediate_size"), part="mixer", bias=bias, names=names)
    return layer.finish()


def with_layer_list(known: dict[str, Any]) -> dict[str, Any]:
    """Return a config of Nemotron-H with the list and number of its layers."""
    # Older configs have a string with one letter per layer instead of the list.
    pattern = known.get("hybrid_override_pattern")
    if isinstance(pattern, str) and "layers_block_type" not in known and _KIND not in known:
        named = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
        known = {**known, "layers_block_type": [named.get(one, "mlp") for one in pattern]}
    listed = known.get("layers_block_type") or known.get(_KIND)
    listed = listed or ["linear_attention", "moe", "full_attention", "mlp"]
    return {**known, "layers_block_type": listed, "num_hidden_layers": len(listed)}


def read_mamba2(config: ConfigReader, place: int) -> LayerShape:
    """Return a layer of Mamba 2."""
    layer = _begin(config, 1)
    pass_through_mamba(
        layer, config, prefix="", part="mixer", has_norm=True, is_output_adapted=False
    )
    return layer.finish()


def find_lfm2_ffn(config: ConfigReader) -> int:
    """Return the width of the MLP that LFM2's class derives from `intermediate_size`."""
    width = config.number("block_ff_dim", "intermediate_size")
    if not config.has("block_auto_adjust_ff_dim"):
        return width
    width = int(config.ratio("block_ffn_dim_multiplier") * int(2 * width / 3))
    multiple = config.count("block_multiple_of") or 256
    return -(-width // multiple) * multiple


def read_lfm2(config: ConfigReader, place: int) -> LayerShape:
    """Return a layer of LFM2."""
    layer = _begin(config)
    chosen = config.entries("full_attn_idxs")
    kind = _kind(config, place)
    is_full = kind != "conv" if kind else not chosen or place in chosen
    if is_full:
        _attend(layer, config, on_qkv=False, on_output=False, output="out_proj")
        layer.num_norms += 2 * _widths(config)[0]
    else:
        convolve(layer, config)
    _feed(layer, find_lfm2_ffn(config), part="feed_forward", names=("w1", "w3", "w2"))
    return layer.finish()
