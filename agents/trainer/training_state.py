"""What a rank holds once model, data and optimizer are loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agents.trainer.checkpoint.folder import Checkpoint
from agents.trainer.checkpoint.state import ResumePoint
from agents.trainer.data.store import ExampleSet
from agents.trainer.model.model import TrainedModel
from agents.trainer.objectives.objective import Objective
from agents.trainer.objectives.reference_model import ReferenceTable
from agents.trainer.optim.flat_parameters import FlatParameters
from agents.trainer.parallel.reducer import GradientTransport


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """What a rank holds when it has loaded."""

    device: torch.device
    train: ExampleSet
    evaluation: ExampleSet | None
    model: TrainedModel
    objective: Objective
    reference: ReferenceTable | None
    """What the objective compares with, if that is a table."""
    flat: FlatParameters
    optimizer: torch.optim.Optimizer
    wire: GradientTransport
    """How gradients travel; it may carry something from step to step."""
    hashes: dict[str, str]
    """`spec_sha256`, `data_sha256` and `model_sha256`."""
    versions: dict[str, str]
    resumed: ResumePoint | None
    """Where the run stood in the checkpoint; None: it begins."""
    checkpoint: Checkpoint | None
    """The one that is gone on from; None: the run begins."""
    saved_by: dict[str, str]
    """The versions that wrote the checkpoint; empty: it begins."""
