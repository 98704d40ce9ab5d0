"""A tiny model's folder, written by hand: whole, or broken in one place."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [{"id": 2, "content": "</s>", "special": True}],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "</s>": 2}, "merges": []},
}
Shapes = dict[str, tuple[int, ...]]


def name_shapes(config: Mapping[str, Any] = CONFIG) -> Shapes:
    """Return the shape of each tensor of a Llama with this config."""
    hidden, inner, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    width = hidden // config["num_attention_heads"]
    keys = width * config["num_key_value_heads"]
    layer: Shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    shapes["lm_head.weight"] = (vocab, hidden)
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{n}.weight": shape for n, shape in layer.items()}
    return shapes


def pack(shapes: Shapes, *, dtype: str = "BF16", width: int = 2) -> bytes:
    """Return a safetensors file of zeros."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, shape in shapes.items():
        size = width
        for one in shape:
            size *= one
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + size]}
        place += size
    return pack_header(header, place)


def pack_header(header: Any, data_bytes: int) -> bytes:
    """Return a safetensors file with any header, and zeros after it."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(data_bytes)


def write_model(folder: Path, **changes: Any) -> Path:
    """Write the folder of a whole tiny model with these changes of its config."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(pack(name_shapes(config)))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return folder


def write_shards(folder: Path, index: Mapping[str, Any] | None = None) -> Path:
    """Write the same model in two files with a list of both."""
    write_model(folder)
    (folder / "model.safetensors").unlink()
    shapes = list(name_shapes().items())
    places: dict[str, str] = {}
    for number, part in enumerate((shapes[:9], shapes[9:]), start=1):
        name = f"model-0000{number}-of-00002.safetensors"
        (folder / name).write_bytes(pack(dict(part)))
        places |= {tensor: name for tensor, _ in part}
    listed = index if index is not None else {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listed))
    return folder
