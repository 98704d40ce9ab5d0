"""Plan an export: the nodes that can make it, its costs there, and the obstacles. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from app.artifacts.estimates import rates
from app.artifacts.estimates.forecast import ArtifactForecast, describe_forecast
from app.artifacts.estimates.learning import ExportFactors
from app.artifacts.estimates.work import Bench, PhaseForecast
from app.text import show_bytes, show_duration, show_list

_UNPACKED = (
    "its memory does not hold the result, so its quality is measured from the disk, and its speed "
    "is not measured"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportNode:
    """Facts about a node that an export needs."""

    node: str
    bench: Bench
    disk_free_bytes: int | None = None
    problem: str = ""
    """Reason why it is ruled out in any case; empty: it is not ruled out."""
    note: str = ""
    """Remark about the node, if any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacePlan:
    """Costs of an export on one node, with learned corrections."""

    node: str
    phases: tuple[PhaseForecast, ...] = ()
    """Forecast phases; empty: the model or the node is not known well enough."""
    node_bytes: int | None = None
    """Peak disk use on the node while it is made, in bytes."""
    problems: tuple[str, ...] = ()
    """Reasons why it cannot be made there; empty: it can."""
    note: str = ""
    """Remark about the node's current state, if any."""
    learned: str = ""
    """Source of the learned corrections; empty: not corrected."""
    plain: tuple[PhaseForecast, ...] = ()
    """Phases by the uncorrected formulas, stored so that later forecasts learn from them."""
    is_unpacked: bool = False
    """True if no memory there holds the result, so that its proof unpacks it on the disk."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks to show with the figures."""
        return ((self.note,) if self.note else ()) + ((_UNPACKED,) if self.is_unpacked else ())

    @property
    def seconds(self) -> float | None:
        """Total time of all phases, in seconds; None: not known."""
        return sum(phase.seconds for phase in self.phases) if self.phases else None

    @property
    def ram_bytes(self) -> int | None:
        """Maximum RAM over all phases, in bytes; None: not known."""
        return max((phase.ram_bytes for phase in self.phases), default=None)

    @property
    def vram_bytes(self) -> int | None:
        """Maximum GPU memory over all phases, in bytes; None: no GPU is used, or not known."""
        found = [phase.vram_bytes for phase in self.phases if phase.vram_bytes is not None]
        return max(found, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportPlan:
    """Plan of an export over all nodes."""

    to: str
    types: tuple[str, ...]
    step: int | None
    """Step of the checkpoint; None: no checkpoint is known."""
    made: ArtifactForecast | None
    """Forecast sizes; None: the model's sizes are not known on this PC."""
    places: tuple[PlacePlan, ...]
    """Plans of all nodes, the best first."""
    left_wide: str = ""
    """Sentence on a large part of the model that stays in 16 bits, if any."""

    @property
    def best(self) -> PlacePlan | None:
        """Best node; None: no node can make it."""
        return next((place for place in self.places if not place.problems), None)


def plan_place(
    place: ExportNode,
    made: ArtifactForecast | None,
    plain: Sequence[PhaseForecast],
    factors: ExportFactors,
) -> PlacePlan:
    """Return the costs of an export on a node, and the obstacles there.

    Args:
        place: facts about the node.
        made: forecast sizes; None: not known.
        plain: phases by the formulas; empty: not known.
        factors: corrections by earlier exports.
    """
    if place.problem:
        return PlacePlan(node=place.node, problems=(place.problem,))
    is_unpacked = not place.bench.holds_result
    phases = tuple(_correct(phase, factors) for phase in plain)
    found = PlacePlan(
        node=place.node,
        phases=phases,
        node_bytes=None if made is None else made.count_node_bytes(is_unpacked=is_unpacked),
        note=place.note,
        learned=factors.seconds.reason,
        plain=tuple(plain),
        is_unpacked=is_unpacked,
    )
    return replace(found, problems=tuple(_problems(place, found)))


def describe_place(place: PlacePlan) -> str:
    """Describe a node and the costs there in words.

    >>> phase = PhaseForecast(name="merge", seconds=95, ram_bytes=3 << 30, vram_bytes=None)
    >>> describe_place(PlacePlan(node="beta", phases=(phase,)))
    'on beta: about 1 min 35 s, 3.0 GiB of memory'
    """
    note = "".join(f"; {remark}" for remark in place.remarks)
    if not place.phases:
        return f"on {place.node}{note}"
    parts = [f"about {show_duration(place.seconds)}", f"{show_bytes(place.ram_bytes)} of memory"]
    if place.vram_bytes:
        parts.append(f"{show_bytes(place.vram_bytes)} of GPU memory")
    learned = f" (corrected by {place.learned})" if place.learned else ""
    return f"on {place.node}: {', '.join(parts)}{learned}{note}"


def describe_plan(plan: ExportPlan) -> list[str]:
    """Describe a plan in lines: the result, the phases on each able node, and the obstacles."""
    best = plan.best
    lines = [describe_forecast(plan.made) if plan.made else "the model's sizes are not known here"]
    lines += [plan.left_wide] if plan.left_wide else []
    if best is not None:
        lines.append(describe_place(best))
        lines += [f"  {_describe_phase(phase)}" for phase in best.phases]
    for one in plan.places:
        if one.problems:
            lines.append(f"not on {one.node}: it {show_list(one.problems)}")
        elif one is not best:
            lines.append(f"or {describe_place(one)}")
    return lines


def _describe_phase(phase: PhaseForecast) -> str:
    vram = phase.vram_bytes
    gpu = f"{show_bytes(vram)} of GPU memory" if vram else ""
    figures = f"{show_duration(phase.seconds):>10}  {show_bytes(phase.ram_bytes):>9}"
    return f"{phase.name:<10}{figures}  {gpu}".rstrip()


def sort_places(places: Sequence[PlacePlan]) -> tuple[PlacePlan, ...]:
    """Sort plans: nodes that can make it first, and by time."""
    return tuple(sorted(places, key=lambda one: (bool(one.problems), one.seconds or 0.0)))


def _correct(phase: PhaseForecast, factors: ExportFactors) -> PhaseForecast:
    vram = phase.vram_bytes
    return PhaseForecast(
        name=phase.name,
        seconds=phase.seconds * factors.seconds.value,
        ram_bytes=int(phase.ram_bytes * factors.ram.value),
        vram_bytes=None if vram is None else int(vram * factors.vram.value),
    )


def lacks_memory(place: ExportNode, found: PlacePlan) -> bool:
    """Return whether RAM or GPU memory is too small for an export, apart from its disk."""
    return any(needed > free for _, needed, free in _memory(place, found))


def is_too_large(made: ArtifactForecast, bench: Bench) -> bool:
    """Return whether a result is too large for the job to load it on the node's GPU."""
    # The same rule as in agents/quantizers/proof/folder_proof.py.
    needed = made.final_bytes * rates.GPU_SPARE + rates.GPU_SPARE_BYTES
    return bench.is_gpu and bench.vram_bytes is not None and needed > bench.vram_bytes


def _memory(place: ExportNode, found: PlacePlan) -> list[tuple[str, int, int]]:
    """Return name, needed bytes and free bytes of each memory."""
    bench = place.bench
    vram = None if bench.vram_bytes is None else bench.vram_bytes - rates.GPU_CONTEXT_BYTES
    rows = (
        ("of memory", found.ram_bytes, bench.ram_bytes),
        ("of GPU memory", found.vram_bytes, vram),
    )
    return [
        (what, needed, max(0, free)) for what, needed, free in rows if needed and free is not None
    ]


def _problems(place: ExportNode, found: PlacePlan) -> list[str]:
    room = _memory(place, found)
    if found.node_bytes is not None and place.disk_free_bytes is not None:
        room = [("on its disk", found.node_bytes, place.disk_free_bytes), *room]
    return [
        f"needs {show_bytes(needed)} {what}, and {show_bytes(free)} are free"
        for what, needed, free in room
        if needed > free
    ]
