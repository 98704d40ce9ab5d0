"""Rotary position embeddings whose angles depend on the length of the input.

Transformers chooses the angles for a whole input. "longrope" switches to other angles beyond the
pretraining length; "dynamic" (NTK scaling) changes them with each greater length, and keeps them
for later, shorter inputs. In a flat row each segment would get the angles of the longest one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class LengthDependentRope:
    """A module whose angles depend on the input, for one type of its layers."""

    module: Any
    prefix: str
    """Prefix of its buffers' names: empty, or the layer type with a `_`."""
    max_tokens: int
    """Maximum length with the angles of pretraining, in tokens."""
    keeps: bool
    """True if the angles are kept for the next input."""


def find_length_dependent(model: nn.Module, max_tokens: int | None) -> list[LengthDependentRope]:
    """Return the embeddings whose angles differ among inputs of at most `max_tokens` tokens."""
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
    """Restore the original angles, so that the next input does not inherit those of the last."""
    for rope in ropes:
        if rope.keeps:
            name = f"{rope.prefix}inv_freq"
            first = getattr(rope.module, f"{rope.prefix}original_inv_freq")
            device = getattr(rope.module, name).device
            # As the class itself does when it changes the angles.
            rope.module.register_buffer(name, first.to(device), persistent=False)
            setattr(rope.module, _cached(rope), rope.max_tokens)


def _cached(rope: LengthDependentRope) -> str:
    own = f"{rope.prefix}max_seq_len_cached"
    return own if hasattr(rope.module, own) else "max_seq_len_cached"
