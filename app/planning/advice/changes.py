"""Changes of a run file that save memory, and their application to a spec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agents.contract.parallel import find_mode
from agents.contract.spec import RunSpec

Change = dict[str, Any]
"""New values by dotted key of the run file."""
# Shortest advised sequence, in tokens; shorter ones would truncate most chats.
_MIN_TOKENS = 256
# Lowest advised rank of an adapter.
_MIN_RANK = 8
_OPTIMIZER_WORDS = {
    "adamw_8bit": "Use the 8-bit optimizer",
    "paged_adamw_8bit": "Use the paged 8-bit optimizer",
}


def list_changes(spec: RunSpec, longest_tokens: int) -> list[list[tuple[Change, str]]]:
    """Return changes with their descriptions, grouped by kind; the cheapest kind and change first.

    Args:
        spec: the run's spec.
        longest_tokens: length of the longest sequence, in tokens.
    """
    # The order of the kinds: free, a limit of the user's, then rising cost in time and quality.
    kinds: list[list[tuple[Change, str]]] = [[], [], [], [], [], []]
    if spec.recompute == "none":
        kinds[0].append(({"recompute": "auto"}, "Let layers recompute activations"))
    if spec.memory_gib is not None:
        kinds[1].append(({"memory_gib": None}, "Remove the memory limit"))
    states = ("adamw", "adamw_8bit", "paged_adamw_8bit")
    needs = {need.key: need.values for need in find_mode(spec.parallel).needs}
    for name in states[states.index(spec.optimizer) + 1 :]:
        if name in needs.get("optimizer", states):
            kinds[2].append(({"optimizer": name}, _OPTIMIZER_WORDS[name]))
    if spec.adapter.kind != "full":
        # Powers of two, the largest first, so that the largest that fits is advised.
        for power in reversed(range((spec.adapter.rank - 1).bit_length())):
            if (rank := 1 << power) >= _MIN_RANK:
                kinds[3].append(({"adapter.rank": rank}, f"Lower the adapter's rank to {rank:,}"))
    words = {"lora": "Train a LoRA adapter", "qlora": "Hold the weights in 4 bits (QLoRA)"}
    smaller = {"full": ("lora", "qlora"), "lora": ("qlora",), "qlora": ()}[spec.adapter.kind]
    kinds[4] += [({"adapter.kind": kind}, words[kind]) for kind in smaller]
    longest = min(spec.sequence_tokens, longest_tokens)
    for tokens in (longest // 2, longest // 4, longest // 8):
        if tokens >= _MIN_TOKENS:
            change = {"sequence_tokens": tokens}
            kinds[5].append((change, f"Shorten sequences to {tokens:,} tokens"))
    return kinds


def apply_change(spec: RunSpec, change: Mapping[str, Any]) -> RunSpec:
    """Return the spec with dotted keys changed.

    >>> from agents.contract.spec import DataSpec
    >>> spec = RunSpec(model="m", data=DataSpec(train="d"))
    >>> apply_change(spec, {"adapter.kind": "qlora", "sequence_tokens": 512}).adapter.kind
    'qlora'
    """
    # All at once, since one setting may be valid only together with another changed one.
    top: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for key, value in change.items():
        part, _, name = key.rpartition(".")
        (inner.setdefault(part, {}) if part else top)[name] = value
    parts = {part: replace(getattr(spec, part), **values) for part, values in inner.items()}
    return replace(spec, **top, **parts)
