"""Folders in the layouts of AWQ and GPTQ without gptqmodel, plainly rounded in groups of 64."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP, BITS = 64, 4
_PER_WORD = 32 // BITS
# Column of AWQ's words that lies at each place.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_folder(model: Path, folder: Path, method: str) -> Path:
    """Write the layers of a small Llama packed, and the rest as it is.

    Args:
        model: folder with one file of weights.
        folder: folder to make.
        method: `awq` or `gptq`.
    """
    folder.mkdir()
    found: dict[str, Tensor] = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.endswith("_proj"):
            found |= {f"{layer}.{part}": one for part, one in _pack(tensor, method).items()}
        else:
            found[name] = tensor
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_bytes())
    config["quantization_config"] = {
        "quant_method": method, "bits": BITS, "group_size": GROUP, "zero_point": method == "awq",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _pack(weight: Tensor, method: str) -> dict[str, Tensor]:
    grouped = weight.float().unflatten(1, (-1, GROUP))
    low, high = grouped.amin(-1), grouped.amax(-1)
    scales = ((high - low) / (2**BITS - 1)).half().float()
    zeros = (-low / scales).round().clamp(1, 2**BITS - 1)
    placed = (grouped / scales[..., None]).round() + zeros[..., None]
    codes = placed.clamp(0, 2**BITS - 1).flatten(1).t().int()
    stored, kept = zeros.t().int(), scales.t().half().contiguous()
    if method == "awq":
        return {
            "qweight": _join(codes, _AWQ_COLUMNS),
            "qzeros": _join(stored, _AWQ_COLUMNS),
            "scales": kept,
        }
    plain = tuple(range(_PER_WORD))
    return {
        "qweight": _join(codes.t(), plain).t().contiguous(),
        "qzeros": _join(stored - 1, plain),
        "scales": kept,
        "g_idx": torch.arange(len(codes), dtype=torch.int32) // GROUP,
    }


def _join(codes: Tensor, columns: tuple[int, ...]) -> Tensor:
    """Return words of eight columns, the last of `columns` highest."""
    parts = codes.unflatten(1, (-1, _PER_WORD))[..., list(columns)].long()
    words = (parts << (BITS * torch.arange(_PER_WORD))).sum(-1)
    return words.where(words < 2**31, words - 2**32).int()
