"""What a search knows of settings before it times them, from those that it has timed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from agents.contract.layer_plan import LayerPlan, Needs
from agents.trainer.execution.setting import ExecutionSetting

RECOMPUTED = 1.5
"""Time of a pass with every layer recomputing by that with none, where weights are frozen: six
products instead of four."""
# What it adds at least, also beside what is no product.
_LEAST_RECOMPUTED = 0.25


def without_launches(needs: Needs, tried: Sequence[ExecutionSetting]) -> Needs:
    """Return the needs with the card's own time of a pass, beside which layers can move.

    The pass that measured them is small, so that launching it may have taken longer.
    """
    kept = [one.tokens_per_s for one in tried if not one.num_recomputed]
    if not kept:
        return needs
    return replace(needs, pass_s=min(needs.pass_s, RECOMPUTED * needs.tokens / max(kept)))


def cannot_win(
    setting: ExecutionSetting,
    plan: LayerPlan,
    tried: Sequence[ExecutionSetting],
    num_layers: int,
) -> bool:
    """Return whether larger micro-batches gain less than recomputing costs for certain.

    What doubling them gained last is the most that doubling them again can gain.

    Args:
        setting: Names the micro-batch size, and whether passes are replayed.
        plan: Of its layers.
        tried: Settings with their measured speeds.
        num_layers: Number of layers of the model.
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
