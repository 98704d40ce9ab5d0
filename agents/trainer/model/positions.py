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
class RotaryTurn:
    """One module, and one kind of its layers, whose angles depend on the input."""

    module: Any
    prefix: str
    """Of its buffers: empty, or the kind of layers with a `_`."""
    most_tokens: int
    """Up to this length the angles are those of pretraining."""
    keeps: bool
    """Whether angles stay for the next input."""


def find_turns(model: nn.Module, most_tokens: int | None) -> list[RotaryTurn]:
    """Return what depends on the length among inputs of at most `most_tokens` tokens."""
    found = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None) or ""
        for layer, kind in kinds.items() if isinstance(kinds, dict) else [("", str(kinds))]:
            if kind == "longrope" or "dynamic" in kind:
                limit = _limit(module, layer, kind)
                if most_tokens is None or most_tokens > limit:
                    prefix = f"{layer}_" if layer else ""
                    found.append(RotaryTurn(module, prefix, limit, keeps=kind != "longrope"))
    return found


def _limit(module: Any, layer: str, kind: str) -> int:
    if kind != "longrope":
        return int(module.original_max_seq_len)
    settings = module.config.rope_parameters
    return int((settings[layer] if layer else settings)["original_max_position_embeddings"])


def forget(turns: list[RotaryTurn]) -> None:
    """Let the next input get the angles that it would get as the first one."""
    for turn in turns:
        if turn.keeps:
            name = f"{turn.prefix}inv_freq"
            first = getattr(turn.module, f"{turn.prefix}original_inv_freq")
            device = getattr(turn.module, name).device
            turn.module.register_buffer(name, first.to(device), persistent=False)
            setattr(turn.module, _cached(turn), turn.most_tokens)


def _cached(turn: RotaryTurn) -> str:
    own = f"{turn.prefix}max_seq_len_cached"
    return own if hasattr(turn.module, own) else "max_seq_len_cached"
