"""Kinds of faults, one small class each; `FAULTS` has them all by name."""

from __future__ import annotations

from tests.campaign.faults import (
    clocks,
    combined,
    files,
    launches,
    masters,
    network,
    pairs,
    processes,
    storage,
)
from tests.campaign.faults.fault import Fault

FAULTS: dict[str, type[Fault]] = {
    kind.name: kind
    for module in (processes, network, storage, masters, launches, combined, files, pairs, clocks)
    for kind in module.KINDS
}
