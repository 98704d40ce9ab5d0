"""The data of a plan: the request, its candidates and their costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from agents.contract.data import DataFinding
from agents.contract.model_cut import WeightTier
from agents.contract.parallel import PARALLEL, ParallelMode
from agents.contract.spec import RunSpec
from app.planning.accuracy.learning import Corrections
from app.planning.accuracy.misses import PlanMiss
from app.planning.hardware.cluster import Cluster
from app.planning.memory.forecast import MemoryForecast, MemorySetting
from app.planning.shape.model_parts import ModelPart, ModelSummary
from app.planning.shape.model_shape import ModelShape
from app.runfile.advice import FieldAdvice


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSize:
    """Size of the training data. A row of preference pairs counts both answers."""

    num_rows: int | None = None
    mean_tokens: float | None = None
    """Mean length of a row after truncation, in tokens."""
    longest_tokens: int | None = None
    """Length of the longest row after truncation, in tokens."""
    is_estimated: bool = False
    """True if the rows were counted from a part of the data."""
    lengths: tuple[int, ...] = ()
    """Lengths of typical rows after truncation, in ascending order; empty: not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """All inputs of a plan."""

    spec: RunSpec
    shape: ModelShape
    data: DataSize
    cluster: Cluster
    """All known nodes; the spec's `nodes` choose among them."""
    learned: Corrections = field(default_factory=Corrections)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """Parts of an optimizer step that do not overlap; their sum is its duration in seconds."""

    compute_s: float = 0.0
    """Forward and backward passes of the slowest GPU, in seconds."""
    network_s: float = 0.0
    """Communication that is not hidden behind the last backward pass, in seconds."""
    bubble_s: float = 0.0
    """Idle time of pipeline stages before the first and after the last micro-batch, in seconds."""
    optimizer_s: float = 0.0
    input_s: float = 0.0
    """Transfers of weights over the bus that are not hidden behind arithmetic, in seconds."""
    checkpoint_s: float = 0.0
    """Copies of the state to host memory, averaged over all steps, in seconds."""

    @property
    def total_s(self) -> float:
        """Duration of the whole step, in seconds."""
        named = self.compute_s + self.network_s + self.bubble_s
        return named + self.optimizer_s + self.input_s + self.checkpoint_s


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPlan:
    """One GPU's part in a candidate."""

    node: str
    device: str
    card: str
    """Name of the GPU."""
    share: float
    """Share of the global batch, 0 to 1; in a pipeline, also times its share of the layers."""
    setting: MemorySetting
    memory: MemoryForecast
    room_bytes: int
    """Memory of this GPU that may be in use, other programs included, in bytes."""
    tokens_per_s: float
    """Speed of this GPU alone while it computes, in tokens per second."""
    layers: tuple[int, int] | None = None
    """First layer of its stage and the one after its last; None: it holds all layers."""
    replica: int = 0
    """Index of its pipeline if several train data parallel."""
    max_in_flight: int | None = None
    """Maximum number of micro-batches in flight in its stage; None: no pipeline."""
    num_streamed: int = 0
    """Number of layers whose frozen weights are copied to the GPU for each pass."""
    streams_from: WeightTier | None = None
    """Tier that keeps the streamed weights; None: nothing is streamed."""
    offloads: bool = False
    """True if inputs of its stage's recomputed layers are kept in the PC's RAM."""
    host_bytes: int = 0
    """RAM for streamed weights and offloaded inputs, in bytes."""
    why_little_ram: str = ""
    """Reason why its node has little RAM, as a clause after a comma; empty: not known."""
    host_room_bytes: int | None = None
    """RAM that this GPU may use, in bytes; None: it needs no RAM."""

    @property
    def fits_host(self) -> bool:
        """True if its PC has enough RAM."""
        return self.host_room_bytes is None or self.host_bytes <= self.host_room_bytes

    @property
    def fits(self) -> bool:
        """True if the expected memory is available, on the GPU and in the PC."""
        return self.memory.expected_bytes <= self.room_bytes and self.fits_host


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A parallelism mode with its GPUs and its forecast."""

    mode: ParallelMode
    nodes: tuple[str, ...]
    gpus: tuple[GpuPlan, ...]
    fits: bool
    parts_s: StepParts
    tokens_per_step: float
    total_s: float | None
    """Duration of the whole run, in seconds; None: the number of rows is not known."""
    energy_wh: float | None
    """Energy of the GPUs over the whole run, in watt-hours; None: a power limit or the number of
    rows is not known."""
    num_steps: int | None
    pc_energy_wh: float | None = None
    """Energy of the whole PCs that take part, GPUs included, in watt-hours; None: not known."""
    has_estimated_steps: bool = False
    """True if the number of steps follows from an estimated number of rows."""
    cost: float | None = None
    """Price of that energy, in the user's currency; None: the price per kWh is not known."""
    reason: str = ""
    """Reason why it was chosen or rejected, as a sentence for the user."""
    wire_s: float | None = None
    """Time of a step in which the busiest link carries bytes, hidden or not, in seconds; None: not
    computed."""

    @property
    def num_replicas(self) -> int:
        """Number of pipelines that train data parallel; 1 if every GPU holds all layers."""
        return len({gpu.replica for gpu in self.gpus})

    @property
    def runnable(self) -> bool:
        """True if this version of the trainer can run it."""
        return PARALLEL[self.mode].runnable

    @property
    def divides_layers(self) -> bool:
        """True if a GPU may hold some of the layers only."""
        return PARALLEL[self.mode].divides_layers

    @property
    def step_s(self) -> float:
        """Duration of an optimizer step, in seconds."""
        return self.parts_s.total_s

    @property
    def tokens_per_s(self) -> float:
        """Speed of all GPUs together over whole steps, in tokens per second."""
        return self.tokens_per_step / self.step_s if self.step_s > 0 else 0.0

    @property
    def ten_million_tokens_s(self) -> float | None:
        """Time for ten million tokens, the measure for comparing large models, in seconds."""
        return 1e7 / self.tokens_per_s if self.tokens_per_s else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """A recommended change, usually of the run file."""

    text: str
    change: Mapping[str, object] = field(default_factory=dict)
    """New values by dotted key of the run file; empty: the advice is not about the run file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedMode:
    """A mode that a key of the run file forbids."""

    mode: ParallelMode
    keys: tuple[str, ...]
    """Dotted keys that forbid it, or `model` or `nodes`."""
    text: str
    """Reason and forecast, as a sentence without a full stop."""
    would: Candidate | None = None
    """Its best plan once the keys are undone; None: not known."""
    change: Mapping[str, object] = field(default_factory=dict)
    """Values by dotted key that undo the refusal; empty: nothing of the run file does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLimit:
    """GPUs whose layers are not compiled, hence not replayed either, with the reason and cost."""

    reason: Literal["no_compiler", "old_card", "turned_off"]
    """No C compiler on the node, a card that Triton does not support, or `compile: off`."""
    nodes: tuple[str, ...]
    card: str
    """Name of the GPU."""
    time_ratio: float | None
    """Time of its part of a step, relative to compiled layers; None: one of the two does not fit.
    """
    is_decisive: bool = False
    """True if the run fits on this card only with compiled layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Caveats:
    """Limits of a run to show before it starts: untrained parts and slow GPUs."""

    parts: tuple[ModelPart, ...] | None
    """Parts of the model that get no adapter or stay in 16 bits; None: not known."""
    limits: tuple[RunLimit, ...] = ()
    """GPUs of known nodes whose layers are not compiled."""
    problem: str = ""
    """Reason why the parts are not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The chosen candidate, the runners-up, advice and warnings."""

    chosen: Candidate | None
    """The fastest candidate that fits and that the trainer can run; None: no candidate does."""
    others: tuple[Candidate, ...]
    """Runners-up, the best first; those that do not fit come last."""
    advice: tuple[Advice, ...]
    assumptions: tuple[str, ...]
    """Sentences on unknown facts and the assumptions made instead."""
    refused: tuple[RefusedMode, ...] = ()
    """Modes that a key of the run file forbids."""
    id: str = ""
    """Hash of what a start decides: mode, GPUs, shares and settings; empty: nothing fits."""
    warnings: tuple[FieldAdvice, ...] = ()
    """Settings that are allowed but probably not intended."""
    miss: PlanMiss | None = None
    """Miss of the last plan for the same GPUs; None: it was off by less than a factor of two."""
    findings: tuple[DataFinding, ...] = ()
    """Findings about the first rows of the data; those that refuse a start come first."""
    parts: tuple[ModelPart, ...] = ()
    """Parts of the model that get no adapter or stay in 16 bits."""
    limits: tuple[RunLimit, ...] = ()
    """GPUs whose layers are not compiled."""
    model: ModelSummary | None = None
    """Summary of the model."""

    @property
    def refuses_data(self) -> bool:
        """True if a start refuses the data."""
        return any(finding.consequence == "refuse" for finding in self.findings)
