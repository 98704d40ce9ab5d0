"""What a plan is made of: the question, the ways to answer it, and what each of them costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agents.contract.parallel import PARALLEL, ParallelMode
from agents.contract.spec import RunSpec
from app.planning.cluster import Cluster
from app.planning.learning import Corrections
from app.planning.memory.forecast import MemoryForecast, MemorySetting
from app.planning.model_shape import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSize:
    """How much there is to train on. A row of pairs counts both its answers."""

    num_rows: int | None = None
    mean_tokens: float | None = None
    """Of a row, after long ones were cut."""
    longest_tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """All that a plan depends on."""

    spec: RunSpec
    shape: ModelShape
    data: DataSize
    cluster: Cluster
    """Every node there is; the spec's `nodes` choose among them."""
    learned: Corrections = field(default_factory=Corrections)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """Seconds of an optimizer step that are not hidden behind each other; their sum is the step."""

    compute_s: float = 0.0
    """Forward and backward passes of the GPU that takes longest."""
    network_s: float = 0.0
    """Waiting for other PCs, beyond what goes on behind the last backward pass."""
    bubble_s: float = 0.0
    """Stages of a pipeline that wait for their first or after their last micro-batch."""
    optimizer_s: float = 0.0
    input_s: float = 0.0
    """Weights that come over the bus and are not hidden behind arithmetic."""
    checkpoint_s: float = 0.0
    """Copies of the state to host memory, spread over the steps between two of them."""

    @property
    def total_s(self) -> float:
        """The whole step."""
        named = self.compute_s + self.network_s + self.bubble_s
        return named + self.optimizer_s + self.input_s + self.checkpoint_s


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPlan:
    """What one GPU does."""

    node: str
    device: str
    card: str
    """Name of the GPU."""
    share: float
    """Of the global batch, 0 to 1; in a pipeline of the layers."""
    setting: MemorySetting
    memory: MemoryForecast
    room_bytes: int
    """What the run may take of this GPU, with what others hold."""
    tokens_per_s: float
    """While it computes, alone."""
    layers: tuple[int, int] | None = None
    """First layer of its stage, and the one after its last; None: it has all of them."""

    @property
    def fits(self) -> bool:
        """Whether the expected need is within the room."""
        return self.memory.expected_bytes <= self.room_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One way to train."""

    mode: ParallelMode
    nodes: tuple[str, ...]
    gpus: tuple[GpuPlan, ...]
    fits: bool
    parts_s: StepParts
    tokens_per_step: float
    total_s: float | None
    """Of the whole run; None: the number of rows is not known."""
    energy_wh: float | None
    """Of the GPUs over the whole run; None: a power limit or the number of rows is not known."""
    num_steps: int | None
    reason: str = ""
    """Why it was chosen, or why it lost, in plain words."""

    @property
    def runnable(self) -> bool:
        """Whether the trainer can run it today."""
        return PARALLEL[self.mode].runnable

    @property
    def step_s(self) -> float:
        """Seconds of an optimizer step."""
        return self.parts_s.total_s

    @property
    def tokens_per_s(self) -> float:
        """Of all GPUs together, over whole steps."""
        return self.tokens_per_step / self.step_s if self.step_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """A change of the run file that helps."""

    text: str
    change: Mapping[str, object] = field(default_factory=dict)
    """Dotted keys of a run file, and their new values; empty: it is nothing of the run file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The answer."""

    chosen: Candidate | None
    """The fastest that fits and that the trainer can run; None: there is none."""
    others: tuple[Candidate, ...]
    """The runners-up, the best first; those that do not fit come last."""
    advice: tuple[Advice, ...]
    assumptions: tuple[str, ...]
    """What was not known, and what was taken in its place."""
