"""State of a rank once model, data and checkpoint are loaded."""

from __future__ import annotations

from dataclasses import dataclass

from agents.trainer.checkpoint.folder import Checkpoint
from agents.trainer.checkpoint.state import ResumePoint
from agents.trainer.data.store import ExampleSet
from agents.trainer.data.tokens import TEXT_RULES
from agents.trainer.model.model import TrainedModel
from agents.trainer.objectives.objective import Objective
from agents.trainer.objectives.reference_model import ReferenceTable
from agents.trainer.optim.flat_parameters import TrainedParameters


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """Result of `prepare`: everything that training needs except the strategy and the device."""

    train: ExampleSet
    evaluation: ExampleSet | None
    model: TrainedModel
    objective: Objective
    reference: ReferenceTable | None
    """Log-probabilities of the reference; None if the objective needs no table."""
    parameters: TrainedParameters
    """Trained parameters of this rank, as the strategy placed them."""
    hashes: dict[str, str]
    """`spec_sha256`, `data_sha256` and `model_sha256`."""
    is_flat: bool
    """True if several segments pass through the model at once."""
    versions: dict[str, str]
    """Versions of Python and of each library that affects the numbers, by name."""
    resumed: ResumePoint | None
    """Saved position of the run; None for a new run."""
    checkpoint: Checkpoint | None
    """Checkpoint to continue from; None for a new run."""
    text_rules: int = TEXT_RULES
    """Version of the rules by which rows became tokens when the run started."""

    @property
    def saved_by(self) -> dict[str, str]:
        """Versions that wrote the checkpoint; empty for a new run."""
        return self.checkpoint.manifest.versions if self.checkpoint else {}
