"""What a rank holds once model, data and checkpoint are loaded."""

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
    """Result of `prepare`: all that training needs besides the strategy and the device."""

    train: ExampleSet
    evaluation: ExampleSet | None
    model: TrainedModel
    objective: Objective
    reference: ReferenceTable | None
    """Log-probabilities that the objective compares with; None: it needs no table."""
    parameters: TrainedParameters
    """Trained parameters of this rank, as the strategy placed them."""
    hashes: dict[str, str]
    """`spec_sha256`, `data_sha256` and `model_sha256`."""
    is_flat: bool
    """Whether several segments go through the model in one pass."""
    versions: dict[str, str]
    """Version of Python and of each library that the numbers depend on, by name."""
    resumed: ResumePoint | None
    """Where the run stood in the checkpoint; None: it begins."""
    checkpoint: Checkpoint | None
    """The checkpoint to continue from; None: the run begins."""
    text_rules: int = TEXT_RULES
    """Rules by which rows became tokens when the run began."""

    @property
    def saved_by(self) -> dict[str, str]:
        """Versions that wrote the checkpoint; empty: the run begins."""
        return self.checkpoint.manifest.versions if self.checkpoint else {}
