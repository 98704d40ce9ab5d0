"""Read the sizes of a causal language model from its config.json alone.

Parameters are counted as the classes of Transformers create them: a key that a config leaves out
has the default of its family's class. Families that differ from a Llama by more than a norm or a
bias are read by `family_layers`. An unlisted family is read as a Llama, whose parts most families
share, and marked as not exact; it is refused if its config shows that its layers differ. Of a
multimodal model only the text model is counted.

Transformers keeps the experts of a layer as one tensor per matrix, not as linear layers, so only
`adapter.experts` gives them adapters. The trainer quantizes them itself (`num_nf4`); exports leave
that to their formats (`num_quantized`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agents.shared.models.config_findings import LIMITS, find_odd_sizes, text_of
from app.errors import UserError
from app.planning.shape.adapter_targets import choose_targets as choose_targets
from app.planning.shape.adapter_targets import tell_layers_apart
from app.planning.shape.config_reader import ConfigReader
from app.planning.shape.family_layers import find_lfm2_ffn, with_layer_list
from app.planning.shape.family_table import FAMILIES, Family
from app.planning.shape.layer_shape import LayerShape as LayerShape
from app.planning.shape.layer_shape import Linear as Linear
from app.planning.shape.layer_shape import Mixer as Mixer

_GEMMA_3 = {
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "sliding_window": 4096,
}  # fmt: skip
# Defaults of a family's configuration class for keys that config.json leaves out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen2_moe": {
        "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "qkv_bias": True,
    },
    "qwen3_moe": {
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "gemma": {"head_dim": 256, "tie_word_embeddings": True},
    "gemma2": {
        "head_dim": 256, "tie_word_embeddings": True, "sliding_window": 4096,
        "num_key_value_heads": 4, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {**_GEMMA_3, "tie_word_embeddings": True},
    "phi3": {},
}  # fmt: skip
# Keys for the number of experts of a layer and of a token's experts; families differ.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_MET = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
# Families whose experts have no gate.
_UNGATED = ("nemotron_h",)
# Families in which layers share weights.
_SHARED_LAYERS = ("zamba", "zamba2")
# Families whose experts have another form, which the trainer cannot adapt or quantize.
_OTHER_EXPERTS = ("dbrx", "jetmoe", "longcat_flash", "muse_spark", "step3p7")
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
# Text models by the type of the multimodal model around them.
_TEXT_FAMILIES = {
    "gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "gemma4": "gemma4_text",
    "llama4": "llama4_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text",
}  # fmt: skip
# Keys of layers that no Llama has: latent attention, states from token to token.
_STRANGE = ("kv_lora_rank", "state_size", "mamba_d_state", "ssm_state_size", "conv_L_cache")
# Keys whose null in config.json means "absent" and not "default", as in DeepSeek-V2-Lite.
_NONE_BY_NULL = frozenset({"q_lora_rank"})
_NO_FORECAST = (
    "rackless start trains the model without a forecast, if Transformers has its class; "
    "docs/models.md lists the families that can be planned"
)
_LLAMA_KINDS = {"full_attention", "sliding_attention"}
_MOE = ("mixtral", "qwen2_moe", "qwen3_moe")
# Otherwise unknown families whose MLPs are known to have no gate.
_PLAIN = ("apertus", "arcee", "gpt_neox", "jais2", "nemotron", "persimmon", "starcoder2")
_FOUR_NORMS = ("gemma2", "gemma3_text")
_HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3_text")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of a model. Llama-2-7B has 6,738,415,616 parameters.

    >>> shape = read_shape({"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096,
    ...     "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32})
    >>> shape.num_parameters, shape.layers[0].num_parameters, shape.num_head
    (6738415616, 202383360, 131072000)
    """

    family: str
    """`model_type` of the text model: llama, qwen3, ..."""
    is_exact: bool
    """True if the family is listed, so that its parts are known."""
    hidden: int
    """Number of features of the residual stream."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Width of one head."""
    ffn: int
    """Inner width of the MLP of dense layers."""
    vocab: int
    """Number of rows of the embedding."""
    is_tied: bool
    """True if the head is the embedding."""
    layers: tuple[LayerShape, ...] = field(repr=False)
    num_experts: int = 0
    """Number of experts of each layer that has experts."""
    num_experts_met: int = 0
    """Number of experts that one token is routed to."""
    expert_ffn: int = 0
    """Inner width of one expert."""
    has_softcap: bool = False
    """True if scores of attention and logits are capped, as in Gemma 2."""
    sliding_window: int | None = None
    """Window of sliding-window layers, in tokens; None: full attention."""
    max_tokens: int | None = None
    """Maximum length of a sequence, in tokens; None: not given."""
    num_outside: int = 0
    """Number of parameters outside of embedding, layers, last norm and head."""
    may_be_cut: bool = True
    """True if a pipeline can divide it between two layers."""
    kinds: tuple[tuple[LayerShape, int], ...] = field(init=False, repr=False, compare=False)
    """Distinct layers with their counts, quicker to loop over than all layers."""

    def __post_init__(self) -> None:
        # By identity, since equal layers are one object and hashing a layer is slow.
        layers, counts = {id(one): one for one in self.layers}, Counter(map(id, self.layers))
        kinds = tuple((layer, counts[key]) for key, layer in layers.items())
        object.__setattr__(self, "kinds", kinds)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def num_embedding(self) -> int:
        """Number of parameters of the embedding."""
        return self.vocab * self.hidden

    @property
    def num_final_norm(self) -> int:
        """Number of parameters of the norm after the last layer."""
        return self.hidden

    @property
    def num_head(self) -> int:
        """Number of parameters of the head; 0: it is tied to the embedding."""
        return 0 if self.is_tied else self.num_embedding

    @property
    def num_parameters(self) -> int:
        """Number of all parameters; tied ones count once."""
        ends = self.num_embedding + self.num_final_norm + self.num_head + self.num_outside
        return ends + sum(count * layer.num_parameters for layer, count in self.kinds)

    @property
    def shares_layers(self) -> bool:
        """True if layers share weights, so that no layer can be held apart from the others."""
        return self.family in _SHARED_LAYERS

    @property
    def has_usual_experts(self) -> bool:
        """True if it has experts in the form that adapters and NF4 support."""
        return self.num_experts > 0 and self.family not in _OTHER_EXPERTS

    @property
    def num_all_experts(self) -> int:
        """Number of parameters of all experts of all layers."""
        return sum(count * layer.num_experts_params for layer, count in self.kinds)

    @property
    def num_nf4(self) -> int:
        """Number of values that a QLoRA run keeps in NF4: linear layers' matrices, and experts."""
        return self.num_quantized + (self.num_all_experts if self.has_usual_experts else 0)

    @property
    def num_quantized(self) -> int:
        """Number of values that exports quantize to 4 or 8 bits: linear layers' matrices."""
        return sum(
            count * linear.num_weights for layer, count in self.kinds for linear in layer.linears
        )

    def tell_apart(self, targets: str | tuple[str, ...]) -> ModelShape:
        """Return the model with separate kinds for layers in which targets select differently.

        Args:
            targets: targets of the adapter, as in a run file.
        """
        return replace(self, layers=tell_layers_apart(self.layers, targets))

    def name_linear(self) -> list[str]:
        """Return the full names of the linear layers, such as `model.layers.0.mlp.up_proj`."""
        return [
            f"model.layers.{number}.{linear.place}"
            for number, layer in enumerate(self.layers)
            for linear in layer.linears
        ]

    def count_adapter(
        self,
        rank: int,
        targets: str | tuple[str, ...],
        *,
        dora: bool = False,
        experts: int = 0,
    ) -> int:
        """Return the parameters of a LoRA adapter.

        Args:
            rank: inner dimension.
            targets: targets of the adapter, as in a run file.
            dora: whether each output has a magnitude.
            experts: number of experts of each layer whose adapters count; 0: no adapters.

        r (inputs + outputs) for each target (Hu et al. 2021, arXiv:2106.09685, section 4.2). On
        q, k, v and o of Llama-2-7B with r=16: 32 x 4 x 16 x 8,192.

        >>> shape = read_shape({"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096,
        ...     "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32})
        >>> shape.count_adapter(16, ("q_proj", "k_proj", "v_proj", "o_proj"))
        16777216
        """
        on_linear = sum(
            count
            * (
                rank * (linear.num_inputs + linear.num_outputs)
                + (linear.num_outputs if dora else 0)
            )
            for layer, count in self.kinds
            for linear in choose_targets(layer, targets)
        )
        if not self.has_usual_experts:
            return on_linear
        # Gate and up are one matrix with one adapter, of double width if there is a gate.
        ups = 1 if self.family in _UNGATED else 2
        one_expert = rank * (self.hidden + (ups + 1) * self.expert_ffn + self.hidden)
        num_sparse = sum(count for layer, count in self.kinds if layer.num_router)
        return on_linear + num_sparse * experts * one_expert


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape of the model that a config.json describes.

    Raises:
        UserError: it does not describe a causal language model of decoder layers.
    """
    # A size out of range may be hostile or damaged: refuse it before any arithmetic.
    for odd in find_odd_sizes(config):
        raise UserError(
            f"The model's config.json cannot be used: {odd}.",
            "Name a folder or a hub id of a causal language model",
        )
    text = text_of(config)
    family = str(text.get("model_type", ""))
    family = _TEXT_FAMILIES.get(family, family)
    if family in FAMILIES:
        return _read_family(family, FAMILIES[family], text)
    for name in LIMITS:
        if isinstance(text.get(name), list):
            raise UserError(
                f"The model's config.json has a {name} for each layer, which is not planned.",
                "Name a model whose layers are alike",
            )
    if family not in _DEFAULTS:
        _refuse_strange(family, text)
    known = {**_DEFAULTS.get(family, {}), **{k: v for k, v in text.items() if v is not None}}
    hidden, heads = _number(known, "hidden_size"), _number(known, "num_attention_heads")
    head_dim = int(known.get("head_dim") or hidden // heads)
    kv_heads = int(known.get("num_key_value_heads") or heads)
    sizes = _Sizes(
        family=family,
        hidden=hidden,
        queries=heads * head_dim,
        keys=kv_heads * head_dim,
        head_dim=head_dim,
        ffn=_number(known, "intermediate_size"),
        known=known,
    )
    # A key of the config wins over the family's default, which may have another name.
    num_experts = _first(text, _EXPERTS) or _first(known, _EXPERTS)
    # A listed dense family has no experts, even if stray keys of its config suggest them.
    if not (family in _MOE or family not in _DEFAULTS):
        num_experts = 0
    dense, sparse = _layer(sizes), _layer(sizes, num_experts)
    num_layers = _number(known, "num_hidden_layers")
    window = known.get("sliding_window") if _slides(family, known, text) else None
    return ModelShape(
        family=family,
        is_exact=family in _DEFAULTS,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=sizes.ffn,
        vocab=_number(known, "vocab_size"),
        is_tied=bool(known.get("tie_word_embeddings", False)),
        layers=tuple(
            sparse if num_experts and _is_sparse(known, place) else dense
            for place in range(num_layers)
        ),
        num_experts=num_experts,
        num_experts_met=_first(known, _MET) if num_experts else 0,
        expert_ffn=sizes.expert_ffn if num_experts else 0,
        has_softcap=any(known.get(name) for name in _CAPS),
        sliding_window=int(window) if window else None,
        max_tokens=known.get("max_position_embeddings"),
    )


def _refuse_strange(family: str, text: Mapping[str, Any]) -> None:
    """Refuse an unknown family whose config shows that its layers are not a Llama's.

    Raises:
        UserError: the config has keys or kinds of layers that no Llama has.
    """
    kinds = {str(kind) for kind in text.get("layer_types") or ()} - _LLAMA_KINDS
    kinds |= {key for key in _STRANGE if text.get(key)}
    if kinds:
        raise UserError(
            f"The planner does not know the layers of {family or 'this'} models "
            f"({', '.join(sorted(kinds)[:4])}).",
            _NO_FORECAST,
        )


def _read_family(family: str, how: Family, text: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a model of a family that `family_layers` reads layer by layer."""
    known = {**how.defaults, **{k: v for k, v in text.items() if v is not None}}
    for name in _NONE_BY_NULL & text.keys():
        if text[name] is None:
            known.pop(name, None)
    if family == "nemotron_h":
        known = with_layer_list(known)
    config = ConfigReader(known)
    hidden = config.number("hidden_size")
    heads = config.number("num_attention_heads", "num_heads")
    # Equal layers become one object, since `kinds` counts them by identity.
    seen: dict[LayerShape, LayerShape] = {}
    layers = [how.read(config, place) for place in range(config.number("num_hidden_layers"))]
    # In latent attention a head has a part with and a part without rotary positions.
    latent = config.count("qk_nope_head_dim")
    has_experts = any(layer.num_experts_params for layer in layers)
    window = known.get("sliding_window") if _slides(family, known, text) else None
    return ModelShape(
        family=family,
        is_exact=True,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=config.count("num_key_value_heads") or heads,
        head_dim=latent + config.number("qk_rope_head_dim")
        if latent
        else config.count("head_dim") or hidden // heads,
        ffn=find_lfm2_ffn(config) if family == "lfm2" else config.number(*how.ffn),
        vocab=config.number("vocab_size"),
        is_tied=config.has("tie_embedding" if "tie_embedding" in text else "tie_word_embeddings"),
        layers=tuple(seen.setdefault(layer, layer) for layer in layers),
        num_experts=config.count(*_EXPERTS) if has_experts else 0,
        num_experts_met=(config.count(*_MET) or 1) if has_experts else 0,
        expert_ffn=config.number(*how.expert_ffn) if has_experts else 0,
        has_softcap=any(known.get(name) for name in _CAPS),
        sliding_window=int(window) if window else None,
        max_tokens=config.count("max_position_embeddings") or None,
        num_outside=how.count_outside(config),
        may_be_cut=how.may_be_cut,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    family: str
    hidden: int
    queries: int
    keys: int
    head_dim: int
    ffn: int
    known: Mapping[str, Any]

    @property
    def expert_ffn(self) -> int:
        return int(self.known.get("moe_intermediate_size") or self.ffn)


def _first(known: Mapping[str, Any], names: Sequence[str]) -> int:
    """Return the first of these sizes that a config has, else 0."""
    return next((int(known[name]) for name in names if known.get(name)), 0)


def _number(known: Mapping[str, Any], name: str) -> int:
    value = known.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        family = known.get("model_type")
        raise UserError(
            f"The planner does not know the sizes of {family or 'this'} models: their config.json "
            f"has no {name}.",
            _NO_FORECAST,
        )
    return value


def _layer(sizes: _Sizes, num_experts: int = 0) -> LayerShape:
    """Return a decoder layer with an MLP or with experts."""
    attention = _attention(sizes)
    family, hidden, known = sizes.family, sizes.hidden, sizes.known
    mlp = () if num_experts else _mlp(sizes, sizes.ffn)
    router = experts = met = 0
    if num_experts:
        router = num_experts * hidden
        one_expert = 3 * hidden * sizes.expert_ffn  # gate, up and down
        experts, met = num_experts * one_expert, _first(known, _MET) * one_expert
        shared = int(known.get("shared_expert_intermediate_size") or 0)
        # Every token passes through the shared expert, so it counts as an MLP.
        if shared and family == "qwen2_moe":
            gate = Linear(name="shared_expert_gate", num_inputs=hidden, num_outputs=1)
            mlp = (*_mlp(sizes, shared, "mlp.shared_expert"), gate)
        elif num_shared := _first(known, ("n_shared_experts",)):
            mlp = _mlp(sizes, num_shared * sizes.expert_ffn)
    norms = (4 if family in _FOUR_NORMS else 2) * hidden
    norms += 2 * sizes.head_dim if family in _HEAD_NORMS else 0
    return LayerShape(
        linears=(*attention, *mlp),
        num_attention=sum(one.num_parameters for one in attention),
        num_mlp=sum(one.num_parameters for one in mlp),
        num_norms=norms,
        num_router=router,
        num_experts_params=experts,
        num_met_params=met,
    )


def _attention(sizes: _Sizes) -> tuple[Linear, ...]:
    hidden, queries, keys = sizes.hidden, sizes.queries, sizes.keys
    on_all = bool(sizes.known.get("attention_bias", False)) and sizes.family != "phi3"
    on_qkv = on_all
    # The biases of Qwen2 are hard-coded in its class; its config has no key for them.
    if sizes.family == "qwen2":
        on_qkv, on_all = True, False
    elif sizes.family == "qwen2_moe":
        on_qkv, on_all = bool(sizes.known["qkv_bias"]), False
    last = Linear(name="o_proj", num_inputs=queries, num_outputs=hidden, has_bias=on_all)
    if sizes.family == "phi3":
        # Phi-3 fuses q, k and v, and gate and up; adapters target the fused matrices.
        return (Linear(name="qkv_proj", num_inputs=hidden, num_outputs=queries + 2 * keys), last)
    outputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    return (
        *(
            Linear(name=name, num_inputs=hidden, num_outputs=width, has_bias=on_qkv)
            for name, width in outputs.items()
        ),
        last,
    )


def _mlp(sizes: _Sizes, ffn: int, part: str = "") -> tuple[Linear, ...]:
    hidden = sizes.hidden
    bias = bool(sizes.known.get("mlp_bias", False)) and sizes.family == "llama"
    down = Linear(name="down_proj", num_inputs=ffn, num_outputs=hidden, has_bias=bias, part=part)
    if sizes.family == "phi3":
        return (Linear(name="gate_up_proj", num_inputs=hidden, num_outputs=2 * ffn), down)
    names = ("up_proj",) if sizes.family in _PLAIN else ("gate_proj", "up_proj")
    ups = (
        Linear(name=name, num_inputs=hidden, num_outputs=ffn, has_bias=bias, part=part)
        for name in names
    )
    return (*ups, down)


def _is_sparse(known: Mapping[str, Any], place: int) -> bool:
    """Return whether a layer has experts (`decoder_sparse_step` of Qwen's mixtures)."""
    if place in (known.get("mlp_only_layers") or ()):
        return False
    if place < _first(known, ("first_k_dense_replace",)):
        return False
    return (place + 1) % int(known.get("decoder_sparse_step") or 1) == 0


def _slides(family: str, known: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """Return whether some layers use sliding-window attention."""
    if "layer_types" in known:
        return "sliding_attention" in known["layer_types"]
    if family.startswith("qwen"):
        return bool(known.get("use_sliding_window", False))
    # A null in config.json means full attention; a missing key means the family's default.
    return text.get("sliding_window", known.get("sliding_window")) is not None
