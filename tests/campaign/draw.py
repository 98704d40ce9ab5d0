"""Draw faults from a seed: the same seed gives the same faults on the same kinds."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.campaign.faults import FAULTS
from tests.campaign.faults.fault import CGROUPS, Fault


@dataclass(frozen=True, slots=True)
class Drawn:
    """One fault and where it strikes."""

    fault: Fault
    node: int
    """Place of the victim among the nodes."""
    at_step: int


def is_possible(kind: type[Fault], num_nodes: int) -> bool:
    """Return whether this PC can make the fault on so many nodes."""
    if kind.needs == "three nodes":
        return num_nodes >= 3
    if kind.needs == "compiler":
        return shutil.which("cc") is not None
    if kind.needs == "loop devices":
        return Path("/dev/loop-control").exists() and shutil.which("mkfs.ext4") is not None
    return not kind.needs or os.access(CGROUPS[kind.needs] / "cgroup.procs", os.W_OK)


def draw_faults(
    count: int,
    seed: int,
    *,
    num_nodes: int,
    steps: tuple[int, int],
    kinds: Sequence[str] = (),
    max_cut_s: float = 8.0,
) -> list[Drawn]:
    """Draw `count` faults: every kind once before any comes again, in an order of the seed's.

    Args:
        count: number of faults.
        seed: seed of all draws.
        num_nodes: number of nodes that can be hit.
        steps: first and last step after which a fault may strike.
        kinds: names of the kinds to draw from; empty: all.
        max_cut_s: longest time for which a cable is cut, in seconds.
    """
    draw = random.Random(seed)
    named = [FAULTS[name] for name in kinds] if kinds else list(FAULTS.values())
    deck: list[type[Fault]] = []
    drawn = []
    for _ in range(count):
        if not deck:
            deck = draw.sample(named, len(named))
        kind, node, at_step = deck.pop(), draw.randrange(num_nodes), draw.randint(*steps)
        # A generator of its own: what one fault draws must not move those after it.
        drawn.append(Drawn(kind(random.Random(draw.random()), max_cut_s), node, at_step))
    return drawn
