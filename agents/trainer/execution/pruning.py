"""Upper bounds for untimed settings, from the settings that a search has timed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from agents.contract.layer_plan import LayerPlan, Needs
from agents.trainer.execution.setting import ExecutionSetting

RECOMPUTED = 1.5
"""Ratio of the times of a pass with every layer recomputing and with none, for frozen weights: six
products instead of four.
"""
# Least cost of recomputing, as a share of a pass: part of a pass is not products.
_LEAST_RECOMPUTED = 0.25


def without_launches(needs: Needs, tried: Sequence[ExecutionSetting]) -> Needs:
    """Return the needs with the card's own time of a pass, which hides copies.

    The pass that measured the needs is small, so its launches may have taken longer.
    """
    kept = [setting.tokens_per_s for setting in tried if not setting.num_recomputed]
    if not kept:
        return needs
    return replace(needs, pass_s=min(needs.pass_s, RECOMPUTED * needs.tokens / max(kept)))


def cannot_win(
    setting: ExecutionSetting, plan: LayerPlan, tried: Sequence[ExecutionSetting], num_layers: int
) -> bool:
    """Return whether larger micro-batches certainly gain less than recomputing costs.

    The gain of the last doubling is an upper bound for the gain of the next one.

    Args:
        setting: micro-batch size, and whether passes are replayed.
        plan: modes of its layers.
        tried: settings with their measured speeds.
        num_layers: number of layers of the model.
    """
    kept: dict[int, float] = {}
    for one in tried:
        if one.is_repeating == setting.is_repeating and not one.num_recomputed:
            kept[one.micro_tokens] = max(one.tokens_per_s, kept.get(one.micro_tokens, 0.0))
    sizes = sorted(size for size in kept if size < setting.micro_tokens)
    if not plan.num_recomputed or len(sizes) < 2:
        return False
    less, more = sizes[-2:]
    gain = max(0.0, math.log(kept[more] / kept[less]) / math.log(more / less))
    added = _LEAST_RECOMPUTED * plan.num_recomputed / num_layers
    speed = kept[more] * (setting.micro_tokens / more) ** gain / (1 + added)
    return speed < max(one.tokens_per_s for one in tried)
