"""Forecast the size of an artifact and the disk space of its export on the node. Pure.

Every tensor is counted in the form in which its format stores it. Bits per weight of GGUF are those
of llama.cpp's blocks; the type of each tensor follows `llama_tensor_get_type` in llama-quant.cpp
(release b10605). Tokenizer and metadata are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agents.contract.formats import EXPORTS, Engine
from app.artifacts.estimates.rates import SHARD_BYTES
from app.artifacts.estimates.texts import MOST_TEXTS, TextSizes
from app.planning.shape.model_shape import LayerShape, Linear, ModelShape
from app.text import show_bytes

# Bits per weight of llama.cpp's block formats, scales included.
_BITS = {
    "F32": 32.0, "F16": 16.0, "Q8_0": 8.5, "Q6_K": 6.5625, "Q5_K": 5.5, "Q4_K": 4.5, "Q3_K": 3.4375,
    "Q5_1": 6.0, "Q5_0": 5.5, "IQ4_NL": 4.5,
}  # fmt: skip
# Weights in a K block; rows of any other multiple get the fallback type.
_BLOCK = 256
_OTHERWISE = {"Q3_K": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
# Number of weights that share a scale in AWQ and GPTQ.
_GROUP = 128
# Code books and description of one linear layer, measured on 28 layers.
_NF4_LAYER_BYTES = 1970
# Log-probabilities of the original are stored in half precision.
_LOGIT_BYTES = 2
_GGUF_ROWS, _GGUF_FEWEST, _GGUF_BYTES = 12, 2, 1 << 30
# Families whose quantization can resume after finished layers.
_CONTINUED_FAMILIES = ("llama", "qwen3_moe")
_SLACK = 1.03


@dataclass(frozen=True, kw_only=True, slots=True)
class ArtifactForecast:
    """Forecast sizes of an export."""

    merged_bytes: int
    """Size of the merged model, which stays on the node, in bytes."""
    files: tuple[tuple[str, int], ...]
    """(name, bytes) of each result: types of GGUF, else the format itself."""
    temporary_bytes: int
    """Temporary files on the node, in addition to the above, in bytes."""
    unpacked_bytes: int = 0
    """Temporary files while the result is unpacked for its proof, in bytes; 0: never unpacked."""

    @property
    def final_bytes(self) -> int:
        """Size of the result on this PC, in bytes."""
        return sum(size for _, size in self.files)

    @property
    def node_bytes(self) -> int:
        """Disk space needed on the node, with a small reserve, in bytes."""
        return self.count_node_bytes(is_unpacked=False)

    def count_node_bytes(self, *, is_unpacked: bool) -> int:
        """Return the same in bytes, for a result that is or is not unpacked for its proof."""
        made = 0 if self.files[0][0] == "merged" else self.final_bytes
        temporary = max(self.temporary_bytes, self.unpacked_bytes if is_unpacked else 0)
        return int((self.merged_bytes + made + temporary) * _SLACK)


def forecast_artifact(
    shape: ModelShape,
    method: str,
    types: Sequence[str] = (),
    bytes_per_value: float = 2.0,
    texts: TextSizes = MOST_TEXTS,
    engine: Engine = "gptqmodel",
) -> ArtifactForecast:
    """Forecast the sizes of an export.

    Args:
        shape: shape of the model.
        method: `merged`, or one of `agents.contract.formats.METHODS`.
        types: types of the method.
        bytes_per_value: size of a value of the base model's weights, in bytes.
        texts: sizes of the texts for the proof.
        engine: package that makes AWQ; AutoAWQ writes only the result.

    Llama-2-7B as Q4_K_M has 4.08 GB, as published:

    >>> from app.planning.shape.model_shape import read_shape
    >>> llama = read_shape({"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096,
    ...     "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32})
    >>> [(n, round(b / 1e9, 2)) for n, b in forecast_artifact(llama, "gguf", ("Q4_K_M",)).files]
    [('Q4_K_M', 4.08)]
    """
    merged = int(shape.num_parameters * bytes_per_value)
    rows = count_judged_rows(method, merged, texts)
    logits = int(_LOGIT_BYTES * rows * (texts.mean_tokens - 1) * shape.vocab)
    if method == "merged":
        return ArtifactForecast(merged_bytes=merged, files=(("merged", merged),), temporary_bytes=0)
    row = EXPORTS[method]
    if row.runtime == "llama.cpp":
        whole = _gguf_bytes(shape, "F16")
        hidden = 0 if "F16" in types or all(kind == "Q8_0" for kind in types) else whole
        files = tuple((kind, _gguf_bytes(shape, kind)) for kind in types)
        return ArtifactForecast(merged_bytes=merged, files=files, temporary_bytes=logits + hidden)
    bits = row.bits_per_weight
    if bits is None:
        wide = float(types[0][0]) if types else 4.0
        # Each group has a 16-bit scale, and a zero point as wide as a weight.
        bits = wide + (16 + wide) / _GROUP
    quantized = count_quantized(shape, method)
    size = int(quantized * bits / 8 + (shape.num_parameters - quantized) * 2)
    if method == "nf4":
        size += _NF4_LAYER_BYTES * sum(len(layer.linears) * n for layer, n in shape.kinds)
    if method == "gptq":  # an index of the group for each input
        size += sum(
            4 * linear.num_inputs * n for layer, n in shape.kinds for linear in layer.linears
        )
        if shape.has_usual_experts:
            inputs = shape.num_experts * (2 * shape.hidden + shape.expert_ffn)
            size += 4 * inputs * sum(n for layer, n in shape.kinds if layer.num_experts_params)
    packed = size - 2 * (shape.num_parameters - quantized)
    is_offloaded = row.calibrated and engine == "gptqmodel"
    offloaded = _offload(shape, packed, texts) if is_offloaded else 0
    if method == "nf4":  # weights of one file are collected first (quantizers/merging/shard_files)
        offloaded = min(size, SHARD_BYTES)
    wide = 2 * shape.num_parameters
    return ArtifactForecast(
        merged_bytes=merged,
        files=((method, size),),
        temporary_bytes=logits + offloaded,
        unpacked_bytes=logits + wide + min(wide, SHARD_BYTES),
    )


def count_quantized(shape: ModelShape, method: str) -> int:
    """Return the number of weights that a format of Transformers packs."""
    # Only gptqmodel splits the experts, so that they are linear layers, too.
    is_all = EXPORTS[method].calibrated and shape.has_usual_experts
    return shape.num_quantized + (shape.num_all_experts if is_all else 0)


def _offload(shape: ModelShape, packed_bytes: int, texts: TextSizes) -> int:
    """Return the bytes of gptqmodel's temporary files."""
    # They hold the finished layers. Families that can resume also have a copy of these layers, and
    # two of the inputs of the next one (agents/quantizers/formats/layer_resume.py).
    embedding = 2 * shape.num_embedding
    if shape.family not in _CONTINUED_FAMILIES:
        return packed_bytes + embedding
    inputs = int(texts.calibration_tokens * shape.hidden * 2)
    return 2 * (packed_bytes + inputs) + (3 if shape.is_tied else 1) * embedding


def count_judged_rows(method: str, merged_bytes: int, texts: TextSizes) -> int:
    """Return the number of rows of the proof, as agents/quantizers/make.py counts them.

    llama.cpp computes one token after the other, so large models get fewer rows.

    >>> [count_judged_rows(method, 6 << 30, MOST_TEXTS) for method in ("gguf", "awq")]
    [2, 32]
    """
    if EXPORTS[method].runtime != "llama.cpp":
        return texts.held_out_rows
    most = min(_GGUF_ROWS, texts.held_out_rows)
    return max(_GGUF_FEWEST, min(most, _GGUF_ROWS * _GGUF_BYTES // max(1, merged_bytes)))


def describe_forecast(forecast: ArtifactForecast) -> str:
    """Describe a forecast in words."""
    files = ", ".join(f"{name} {show_bytes(size)}" for name, size in forecast.files)
    return f"{files}; {show_bytes(forecast.node_bytes)} on the node while it is made"


def _gguf_bytes(shape: ModelShape, kind: str) -> int:
    bits = 0.0
    for place, layer in enumerate(shape.layers):
        bits += sum(
            one.num_weights * _bits(_type_of(one, kind, place, shape), one.num_inputs)
            for one in (*layer.linears, *_list_experts(layer, shape))
        )
        bits += _rest(layer, shape) * _BITS["F32"]
    # llama.cpp stores the head in Q6_K in all K types.
    head = kind if kind in ("F16", "Q8_0") else "Q6_K"
    bits += shape.num_head * _bits(head, shape.hidden)
    embedding = head if shape.is_tied else _plain_type(kind)
    bits += shape.num_embedding * _bits(embedding, shape.hidden)
    return int((bits + shape.num_final_norm * _BITS["F32"]) / 8)


def _list_experts(layer: LayerShape, shape: ModelShape) -> list[Linear]:
    """Return the matrices of a layer's experts, each kind joined to one, as by llama.cpp."""
    one_matrix = shape.num_experts * shape.hidden * shape.expert_ffn
    if not (layer.num_experts_params and one_matrix and shape.has_usual_experts):
        return []
    num_ups = round(layer.num_experts_params / one_matrix) - 1  # gate and up, or up alone
    up = shape.num_experts * shape.expert_ffn * num_ups
    return [
        Linear(name="up_proj", num_inputs=shape.hidden, num_outputs=up),
        Linear(
            name="down_proj",
            num_inputs=shape.expert_ffn,
            num_outputs=shape.num_experts * shape.hidden,
        ),
    ]


def _rest(layer: LayerShape, shape: ModelShape) -> int:
    """Return the parameters that stay in float32: norms, routers, biases."""
    matrices = (*layer.linears, *_list_experts(layer, shape))
    return layer.num_parameters - sum(one.num_weights for one in matrices)


def _bits(kind: str, row: int) -> float:
    return _BITS[_OTHERWISE.get(kind, kind) if row % _BLOCK else kind]


def _plain_type(kind: str) -> str:
    return kind.removesuffix("_M")


def _type_of(one: Linear, kind: str, place: int, shape: ModelShape) -> str:
    # The mixes _M give some tensors more bits, by llama.cpp's rule `use_more_bits`.
    plain, count = _plain_type(kind), shape.num_layers
    if kind not in ("Q3_K_M", "Q4_K_M", "Q5_K_M"):
        return plain
    matters = place < count // 8 or place >= 7 * count // 8 or (place - count // 8) % 3 == 2
    if one.name in ("v_proj", "down_proj") and kind != "Q3_K_M":
        return "Q6_K" if matters else plain
    if one.name == "v_proj":
        return "Q5_K" if place < 2 else "Q4_K"
    if one.name == "down_proj":
        return "Q5_K" if place < count // 16 else "Q4_K"
    return "Q4_K" if one.name == "o_proj" and kind == "Q3_K_M" else plain
