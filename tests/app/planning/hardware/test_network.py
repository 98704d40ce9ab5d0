"""Seconds on the network against what was measured between three PCs on shaped links."""

from __future__ import annotations

import pytest

from app.planning.hardware.cluster import ethernet
from app.planning.hardware.network import hide, ring_s, statistics_s

# Gloo between three network namespaces, shaped with tbf.
MEASURED = [(54.5e6, 1.0, 0.626), (80.0e6, 1.0, 0.919), (54.5e6, 2.5, 0.256)]
# 32 micro-batches of an 8B LoRA step over cards with 87.9, 58.3 and 43.5 TFLOP/s, compute and
# gradients scaled to a quarter, 1 Gb/s; together the cards need 6.88 s.
SPEEDS = (87.9, 58.3, 43.5)
STEPS = [((11, 11, 10), 9.66), ((15, 10, 7), 7.43)]


@pytest.mark.parametrize(("num_bytes", "gbit", "measured_s"), MEASURED)
def test_an_all_reduce_takes_what_was_measured(
    num_bytes: float, gbit: float, measured_s: float
) -> None:
    assert ring_s(num_bytes, ethernet(gbit), 3) == pytest.approx(measured_s, rel=0.04)


@pytest.mark.parametrize(("shares", "measured_s"), STEPS)
def test_a_step_of_unlike_cards_takes_what_was_measured(
    shares: tuple[int, ...], measured_s: float
) -> None:
    micro_s = [6.88 / 32 * sum(SPEEDS) / speed for speed in SPEEDS]
    busy_s = max(count * one for count, one in zip(shares, micro_s, strict=True))
    reduce_s = ring_s(54.5e6 / 4, ethernet(1.0), 3)

    step_s = busy_s + hide(reduce_s, min(micro_s)) + statistics_s(ethernet(1.0), 3)
    assert step_s == pytest.approx(measured_s, rel=0.08)


def test_gradients_of_1_6_gb_are_no_matter_of_100_ms() -> None:
    assert ring_s(1.6e9, ethernet(1.0), 2) > 13
    assert ring_s(0.16e9, ethernet(1.0), 3) < 2
