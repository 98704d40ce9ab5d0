"""Rotary position embeddings whose angles depend on how long the input is.

Transformers chooses them for a whole input: "longrope" has other angles beyond the length that the
model was pretrained with, "dynamic" (NTK scaling) others for each length beyond it, which it keeps
for shorter inputs that follow. Side by side a segment would get those of its longest neighbour.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class LengthDependentRope:
    """One module, and one kind of its layers, whose angles depend on the input."""

    module: Any
    prefix: str
    """Of its buffers: empty, or the kind of layers with a `_`."""
    max_tokens: int
    """Up to this length the angles are those of pretraining."""
    keeps: bool
    """Whether angles stay for the next input."""


def find_length_dependent(model: nn.Module, max_tokens: int | None) -> list[LengthDependentRope]:
    """Return what depends on the length among inputs of at most `max_tokens` tokens."""
    found = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None) or ""
        for layer, kind in kinds.items() if isinstance(kinds, dict) else [("", str(kinds))]:
            if kind == "longrope" or "dynamic" in kind:
                limit = _limit(module, layer, kind)
                if max_tokens is None or max_tokens > limit:
                    prefix = f"{layer}_" if layer else ""
                    found.append(
                        LengthDependentRope(module, prefix, limit, keeps=kind != "longrope")
                    )
    return found


def _limit(module: Any, layer: str, kind: str) -> int:
    if kind != "longrope":
        return int(module.original_max_seq_len)
    settings = module.config.rope_parameters
    return int((settings[layer] if layer else settings)["original_max_position_embeddings"])


def reset(ropes: list[LengthDependentRope]) -> None:
    """Let the next input get the angles that it would get as the first one."""
    for rope in ropes:
        if rope.keeps:
            name = f"{rope.prefix}inv_freq"
            first = getattr(rope.module, f"{rope.prefix}original_inv_freq")
            device = getattr(rope.module, name).device
            rope.module.register_buffer(name, first.to(device), persistent=False)
            setattr(rope.module, _cached(rope), rope.max_tokens)


def _cached(rope: LengthDependentRope) -> str:
    own = f"{rope.prefix}max_seq_len_cached"
    return own if hasattr(rope.module, own) else "max_seq_len_cached"
