"""Compare the tensors of a model's files with its config: layers, shapes, embedding and head.

Transformers fills a missing weight with random numbers and trains on, so missing weights have to be
found by name. Families with known names are compared in full; of others, only the numbering of
layers and the size of the vocabulary, which all families share.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from agents.shared.models.config_findings import text_of
from agents.shared.models.safetensors_header import TensorInfo

Tensors = Mapping[str, TensorInfo]
_LAYER = re.compile(r"(.*?\b(?:layers|h|blocks|block|layer))\.(\d{1,9})\.(.+)")
_SPLIT = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_FEED_FORWARD_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
_QUERY_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_USUAL = (*_SPLIT, *_GATED, *_NORMS)
FAMILIES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "gemma"), _USUAL),
    "qwen3": (*_USUAL, *_QUERY_NORMS),
    "gemma2": (*_USUAL, *_FEED_FORWARD_NORMS),
    **dict.fromkeys(("gemma3", "gemma3_text"), (*_USUAL, *_FEED_FORWARD_NORMS, *_QUERY_NORMS)),
    "phi3": (
        "self_attn.qkv_proj",
        "self_attn.o_proj",
        "mlp.gate_up_proj",
        "mlp.down_proj",
        *_NORMS,
    ),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe"), (*_SPLIT, *_NORMS)),
}
"""Modules with a weight in every layer, by family."""
_ALIKE = frozenset({
    *FAMILIES, "apertus", "arcee", "biogpt", "bitnet", "bloom", "codegen", "cohere", "cohere2",
    "diffllama", "ernie4_5", "exaone4", "falcon", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neo",
    "gpt_neox", "gptj", "granite", "helium", "hunyuan_v1_dense", "mpt", "nemotron", "olmo", "olmo2",
    "olmo3", "olmoe", "opt", "persimmon", "phi", "phimoe", "seed_oss", "smollm3", "stablelm",
    "starcoder2", "xglm",
}) - {"qwen2_moe", "qwen3_moe"}  # fmt: skip
"""Families whose layers all have the same weights."""
_EXPERT = re.compile(r"(.*\bexperts)\.(\d{1,6})\.(.+)")
_TIED = ("gemma", "gemma2", "gemma3", "gemma3_text")
_OWN_HEAD_WIDTH = (*_TIED, "qwen3", "qwen3_moe")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")


def find_tensor_problems(
    text: Mapping[str, Any], tensors: Tensors, *, packed: bool
) -> Iterator[str]:
    """Yield tensors that are missing or contradict the config, as phrases.

    Args:
        text: config of the language model (`text_of`) with checked sizes.
        tensors: tensors of all files.
        packed: True if weights are quantized, so that their shapes differ from the config.
    """
    groups = _group_layers(tensors)
    if not groups and text.get("model_type") in FAMILIES:
        yield "it has no layers"
    yield from _find_missing_layers(text, groups)
    yield from _find_missing_parts(text, groups)
    yield from _find_missing_in_some(text, groups)
    yield from _find_missing_experts(text, groups)
    yield from _find_missing_ends(text, tensors)
    if not packed:
        yield from _find_no_embedding(text, tensors)
        yield from _find_misshapen(text, tensors)


def map_layers(config: Mapping[str, Any], tensors: Tensors) -> dict[str, int]:
    """Return the decoder layer of each tensor that belongs to one; empty: no layers were found."""
    main, count = _find_main(text_of(config), _group_layers(tensors))
    found: dict[str, int] = {}
    for name in tensors:
        match = _LAYER.fullmatch(name)
        if main and match and match[1] == main and int(match[2]) < count:
            found[name] = int(match[2])
    return found


def find_ends(tensors: Tensors) -> tuple[list[str], list[str]]:
    """Return the names of the embedding's tensors, and of the head's."""
    embeddings = [name for name in tensors if name.endswith(_EMBEDDINGS)]
    return embeddings, [name for name in tensors if name.endswith(_HEADS)]


def _group_layers(tensors: Tensors) -> dict[str, dict[int, set[str]]]:
    """Return the suffixes of tensor names, by the prefix of the layer's number and by the
    number.
    """
    groups: dict[str, dict[int, set[str]]] = {}
    for name in tensors:
        if found := _LAYER.fullmatch(name):
            prefix, number, rest = found.groups()
            groups.setdefault(prefix, {}).setdefault(int(number), set()).add(rest)
    return groups


def _find_main(
    text: Mapping[str, Any], groups: Mapping[str, dict[int, set[str]]]
) -> tuple[str, int]:
    """Return the group of the decoder's layers, and their number in the config; 0: unknown."""
    keys = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    count = next((text[key] for key in keys if type(text.get(key)) is int), 0)
    # Towers for images and sound have layers, too; the decoder's match the count best.
    best = max(groups, key=lambda name: len(groups[name].keys() & range(count)), default="")
    return best, count


def _find_missing_layers(
    text: Mapping[str, Any], groups: Mapping[str, dict[int, set[str]]]
) -> Iterator[str]:
    main, count = _find_main(text, groups)
    if not main or not count:
        return
    missing = [number for number in range(count) if number not in groups[main]]
    if missing:
        more = f" and {len(missing) - 1} more layers are" if len(missing) > 1 else " is"
        yield f"{main}.{missing[0]}{more} missing, of {count:,} layers"
    # Some families have unused layers beyond the count by design, but these do not.
    extra = sorted(groups[main].keys() - range(count))
    if extra and text.get("model_type") in FAMILIES:
        yield f"it has {main}.{extra[0]}, and config.json names {count:,} layers"


def _find_missing_parts(
    text: Mapping[str, Any], groups: Mapping[str, dict[int, set[str]]]
) -> Iterator[str]:
    main, count = _find_main(text, groups)
    parts = FAMILIES.get(str(text.get("model_type")), ())
    for number in range(count):
        there = groups.get(main, {}).get(number, set())
        for part in parts if there else ():
            if f"{part}.weight" not in there:
                yield f"{main}.{number}.{part}.weight is missing"
                # One missing weight suffices as a reason; a list of all would be long.
                return


def _find_missing_in_some(
    text: Mapping[str, Any], groups: Mapping[str, dict[int, set[str]]]
) -> Iterator[str]:
    """Yield a weight that one layer lacks but at least half of them have."""
    main, count = _find_main(text, groups)
    # In other families, such as hybrids, layers differ by design.
    if text.get("model_type") not in _ALIKE:
        return
    layers = {number: names for number, names in groups.get(main, {}).items() if number < count}
    held = Counter(name for names in layers.values() for name in names if name.endswith(".weight"))
    usual = {name for name, times in held.items() if 2 * times >= len(layers)}
    for number in sorted(layers):
        if missing := sorted(usual - layers[number]):
            yield f"{main}.{number}.{missing[0]} is missing"
            return


def _find_missing_experts(
    text: Mapping[str, Any], groups: Mapping[str, dict[int, set[str]]]
) -> Iterator[str]:
    main, layers = _find_main(text, groups)
    keys = ("num_local_experts", "num_experts", "n_routed_experts")
    count = next((text[key] for key in keys if type(text.get(key)) is int), 0)
    for number, names in sorted(groups.get(main, {}).items()):
        held: dict[str, set[int]] = {}
        for found in filter(None, map(_EXPERT.fullmatch, names if number < layers else ())):
            # `#` stands for the expert's number, so that each weight is compared over the experts.
            held.setdefault(f"{found[1]}.#.{found[3]}", set()).add(int(found[2]))
        for name, experts in sorted(held.items()):
            if missing := sorted(set(range(count)) - experts):
                yield f"{main}.{number}.{name.replace('#', str(missing[0]))} is missing"
                return


def _find_no_embedding(text: Mapping[str, Any], tensors: Tensors) -> Iterator[str]:
    vocab = _size(text, "vocab_size")
    rows = {tensor.shape[0] for tensor in tensors.values() if len(tensor.shape) == 2}
    if vocab is not None and text.get("model_type") not in FAMILIES and vocab not in rows:
        yield f"the embedding is missing: no matrix has {vocab:,} rows, one for each token"


def _find_missing_ends(text: Mapping[str, Any], tensors: Tensors) -> Iterator[str]:
    family = str(text.get("model_type"))
    if family not in FAMILIES:
        return
    if not any(name.endswith("embed_tokens.weight") for name in tensors):
        yield "the embedding (embed_tokens.weight) is missing"
    # The norm after the last layer is outside of all layers.
    if not any(re.fullmatch(r"(.*\.)?norm\.weight", name) for name in tensors):
        yield "the last norm (norm.weight) is missing"
    is_multimodal = "text_config" in text
    is_tied = text.get("tie_word_embeddings", family in _TIED)
    if not is_tied and not is_multimodal and not any(name.endswith(_HEADS) for name in tensors):
        yield "the head (lm_head.weight) is missing, and tie_word_embeddings is false"


def _find_misshapen(text: Mapping[str, Any], tensors: Tensors) -> Iterator[str]:
    known = _known_shapes(text)
    for name, tensor in tensors.items():
        place = name.split(".")
        wanted = known.get(place[-2], ()) if place[-1] == "weight" and len(place) > 1 else ()
        is_other_tower = any("vision" in part or "audio" in part for part in place)
        if not wanted or is_other_tower:
            continue
        fits = len(tensor.shape) == len(wanted) and all(
            size in (None, there) for size, there in zip(wanted, tensor.shape, strict=True)
        )
        if not fits:
            sizes = " x ".join("any" if size is None else f"{size:,}" for size in wanted)
            there = " x ".join(f"{size:,}" for size in tensor.shape[:8])
            yield f"{name} is {there or 'a single number'}, and config.json makes it {sizes}"
            return


def _known_shapes(text: Mapping[str, Any]) -> dict[str, tuple[int | None, ...]]:
    """Return the shape of each module's weight; an unknown size is None."""
    family = str(text.get("model_type"))
    vocab = _size(text, "vocab_size")
    shapes: dict[str, tuple[int | None, ...]] = {
        name.split(".")[0]: (vocab, None) for name in (*_EMBEDDINGS[:2], *_HEADS[:1])
    }
    if family not in FAMILIES:
        return shapes
    hidden, ffn = _size(text, "hidden_size"), _size(text, "intermediate_size")
    heads, key_heads = _size(text, "num_attention_heads"), _size(text, "num_key_value_heads")
    width = _size(text, "head_dim")
    # These families have heads of another width than hidden / heads.
    if width is None and hidden and heads and family not in _OWN_HEAD_WIDTH:
        width = hidden // heads
    queries = heads * width if heads and width else None
    keys = key_heads * width if key_heads and width else None
    # Of a mixture, `intermediate_size` may be that of the dense layers or of the experts.
    is_moe = family in ("mixtral", "qwen2_moe", "qwen3_moe")
    inner = None if is_moe else ffn
    return {
        **{name: (vocab, hidden) for name in shapes},
        "q_proj": (queries, hidden),
        **dict.fromkeys(("k_proj", "v_proj"), (keys, hidden)),
        "o_proj": (hidden, queries),
        **dict.fromkeys(("gate_proj", "up_proj"), (inner, hidden)),
        "down_proj": (hidden, inner),
        "gate_up_proj": (2 * inner if inner else None, hidden),
        **dict.fromkeys(_NORMS, (hidden,)),
    }


def _size(text: Mapping[str, Any], name: str) -> int | None:
    value = text.get(name)
    return value if type(value) is int else None
