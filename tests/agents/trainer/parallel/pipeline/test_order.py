"""No stage waits for what can never come, whatever its memory holds."""

from __future__ import annotations

import random

from agents.trainer.parallel.pipeline.order import plan_in_flight, plan_order
from tests.draws import seed


def play(in_flight: tuple[int, ...], num_micro: int) -> tuple[int, list[int]]:
    """Let stages take their passes as soon as what these need has come.

    Returns:
        The number of passes done, and the most micro-batches that each stage held.
    """
    orders = [plan_order(num_micro, one) for one in in_flight]
    done: set[tuple[int, str, int]] = set()
    most = [0] * len(in_flight)
    at = [0] * len(in_flight)
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                kind, number = order[at[stage]]
                neighbor = stage - 1 if kind == "forward" else stage + 1
                is_end = not 0 <= neighbor < len(orders)
                if not (is_end or (neighbor, kind, number) in done):
                    break
                done.add((stage, kind, number))
                held = {n for s, k, n in done if s == stage and k == "forward"}
                held -= {n for s, k, n in done if s == stage and k == "backward"}
                most[stage] = max(most[stage], len(held))
                at[stage] += 1
                moved = True
    return len(done), most


def test_every_pass_is_done_and_memory_is_kept():
    draw = random.Random(seed(3))
    for _ in range(60):
        num_stages, num_micro = draw.randint(1, 6), draw.randint(0, 9)
        planned = [draw.choice([None, draw.randint(1, 4)]) for _ in range(num_stages)]
        in_flight = plan_in_flight(draw.randint(1, 3), planned)
        count, most = play(in_flight, num_micro)
        assert count == 2 * num_stages * num_micro
        for held, allowed, known in zip(most, in_flight, planned, strict=True):
            assert held <= allowed
            assert known is None or held <= known


def test_backward_passes_come_in_the_order_of_the_micro_batches():
    numbers = [number for kind, number in plan_order(7, 3) if kind == "backward"]
    assert numbers == list(range(7))
