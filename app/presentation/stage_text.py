"""Describe the division of a model over GPUs, for the window and the command line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agents.contract.model_cut import WeightTier
from agents.contract.parallel import find_mode
from app.events import RankProgress
from app.planning.accuracy.forecast_accuracy import Forecast
from app.planning.candidate import Candidate
from app.text import count_of, name_layers, short_card, show_bytes, show_share

TIERS: dict[WeightTier, str] = {"ram": "RAM", "disk": "the SSD"}
"""Names of the tiers that keep streamed weights, for sentences."""
INPUTS_IN_RAM = "their inputs in RAM"
"""Phrase about a stage whose layers recompute from inputs in host memory."""
# Parts below this share of a step are left out.
_LEAST_SHOWN = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRow:
    """One GPU's part of a model."""

    rank: int
    """Index of the GPU in the plan, which is the rank of its process in the run."""
    node: str
    device: str
    card: str
    """Name of the GPU; empty: a CPU."""
    replica: int
    first_layer: int
    stop_layer: int
    """Index of the layer after its last one."""
    num_layers: int
    """Number of layers of the whole model."""
    num_streamed: int
    streams_from: WeightTier | None
    max_in_flight: int | None
    offloads: bool
    """True if inputs of recomputed layers are kept in RAM."""
    memory_bytes: int | None
    """Expected memory in use, in bytes; None: not known."""
    room_bytes: int | None
    allocated_bytes: int | None = None
    """Expected memory of training without other programs, in bytes; None: not known."""
    num_replicas: int = 1
    """Number of pipelines that share each batch."""
    is_only: bool = True
    """True if the plan uses no other GPU of its node."""

    @property
    def title(self) -> str:
        """Node and card, such as `alpha: RTX 4070`, with the device if the node has several."""
        node = self.node if self.is_only else f"{self.node} {self.device}"
        return f"{node}: {short_card(self.card) if self.card else self.device}"

    @property
    def layers_text(self) -> str:
        """Layers of the stage, counted from 1, and the settings that decide its memory.

        >>> row = StageRow(rank=1, node="a", device="cuda:0", card="RTX 4070", replica=0,
        ...     first_layer=12, stop_layer=24, num_layers=80, num_streamed=0, streams_from=None,
        ...     max_in_flight=7, offloads=True, memory_bytes=None, room_bytes=None)
        >>> row.layers_text
        'layers 13 to 24 of 80, 7 in flight, their inputs in RAM'
        """
        if self.num_streamed and self.streams_from is not None:
            where = f"{self.num_streamed} of them from {TIERS[self.streams_from]}"
            return f"all {count_of(self.num_layers, 'layer')}, {where}"
        parts = [f"{name_layers((self.first_layer, self.stop_layer))} of {self.num_layers}"]
        if self.num_replicas > 1 and self.max_in_flight is not None:
            parts.insert(0, f"pipeline {self.replica + 1}")
        if self.max_in_flight is not None and self.max_in_flight > 1:
            parts.append(f"{self.max_in_flight} in flight")
        if self.offloads:
            parts.append(INPUTS_IN_RAM)
        return ", ".join(parts)

    @property
    def memory_text(self) -> str:
        """Expected and available memory; empty: not known."""
        if self.memory_bytes is None:
            return ""
        room = "" if self.room_bytes is None else f" of {show_bytes(self.room_bytes)}"
        return f"{show_bytes(self.memory_bytes)}{room}"


def list_planned_stages(candidate: Candidate) -> list[StageRow]:
    """Return the stages of a candidate by pipeline and layer; empty: GPUs hold all layers."""
    if not candidate.divides_layers:
        return []
    total = max((gpu.layers[1] for gpu in candidate.gpus if gpu.layers is not None), default=0)
    rows = [
        StageRow(
            rank=number,
            node=gpu.node,
            device=gpu.device,
            card="" if gpu.device == "cpu" else gpu.card,
            replica=gpu.replica,
            first_layer=gpu.layers[0],
            stop_layer=gpu.layers[1],
            num_layers=total,
            num_streamed=gpu.num_streamed,
            streams_from=gpu.streams_from,
            max_in_flight=gpu.max_in_flight,
            offloads=gpu.offloads,
            memory_bytes=gpu.memory.expected_bytes,
            room_bytes=gpu.room_bytes,
            allocated_bytes=gpu.memory.allocated_bytes,
        )
        for number, gpu in enumerate(candidate.gpus)
        if gpu.layers is not None
    ]
    return _arrange(rows)


def list_run_stages(forecast: Forecast) -> list[StageRow]:
    """Return the planned stages of an attempt by pipeline and layer."""
    if not find_mode(forecast.mode).divides_layers:
        return []
    total = max((rank.layers[1] for rank in forecast.ranks if rank.layers is not None), default=0)
    rows = [
        StageRow(
            rank=number,
            node=rank.node,
            device=rank.device,
            card=rank.card or "",
            replica=rank.replica,
            first_layer=rank.layers[0],
            stop_layer=rank.layers[1],
            num_layers=total,
            num_streamed=rank.num_streamed,
            streams_from=rank.streams_from,
            max_in_flight=rank.max_in_flight,
            offloads=rank.offloads,
            memory_bytes=rank.expected_bytes,
            room_bytes=rank.room_bytes,
            allocated_bytes=rank.allocated_bytes,
        )
        for number, rank in enumerate(forecast.ranks)
        if rank.layers is not None
    ]
    return _arrange(rows)


def _arrange(rows: Sequence[StageRow]) -> list[StageRow]:
    """Sort rows by pipeline and layer, and add the facts that distinguish them."""
    num_replicas, on_node = len({row.replica for row in rows}), Counter(row.node for row in rows)
    named = [
        replace(row, num_replicas=num_replicas, is_only=on_node[row.node] == 1) for row in rows
    ]
    return sorted(named, key=lambda row: (row.replica, row.first_layer))


def describe_division(
    rows: Sequence[StageRow], step_s: float | None, bubble_s: float | None, wire_s: float | None
) -> str:
    """Describe pipelines, bubble and network in one line; empty: nothing notable."""
    parts = []
    num_replicas = len({row.replica for row in rows})
    if num_replicas > 1:
        parts.append(f"{num_replicas} pipelines share each batch")
    if step_s:
        if bubble_s and bubble_s > _LEAST_SHOWN * step_s:
            parts.append(f"bubble {show_share(bubble_s / step_s)} of a step")
        if wire_s and wire_s > _LEAST_SHOWN * step_s:
            parts.append(f"busiest link in use for {show_share(wire_s / step_s)} of a step")
    return ", ".join(parts)


def describe_measured(row: StageRow, rank: RankProgress | None) -> str:
    """Describe the measurements of a rank: memory and the share of waiting; empty: no figures."""
    if rank is None:
        return ""
    parts = []
    if rank.memory_bytes is not None:
        # Ranks measure the memory of training, so compare it with that part of the forecast.
        expected = row.allocated_bytes
        planned = "" if expected is None else f" (planned {show_bytes(expected)})"
        parts.append(f"training takes {show_bytes(rank.memory_bytes)}{planned}")
    if rank.wait_s is not None and rank.step_s:
        parts.append(f"waits {show_share(rank.wait_s / rank.step_s)} of a step")
    return ", ".join(parts)
