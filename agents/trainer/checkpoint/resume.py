"""Find the checkpoint from which a rank resumes, and reject one of another run."""

from __future__ import annotations

from agents.contract.run_layout import CHECKPOINTS, checkpoint_name
from agents.contract.spec import RunSpec
from agents.errors import ExpectedError
from agents.trainer.checkpoint.fingerprint import fixed_part, name_differences
from agents.trainer.checkpoint.folder import Checkpoint, read_checkpoint
from agents.trainer.checkpoint.state import ResumePoint
from agents.trainer.rank.attempt import RankAttempt


def find_checkpoint(attempt: RankAttempt) -> Checkpoint | None:
    """Return the verified checkpoint that the intent names; None for a new run.

    Raises:
        ExpectedError: it is incomplete or damaged.
    """
    step = attempt.intent.resume_step
    if step is None:
        return None
    checkpoint = read_checkpoint(attempt.run_folder / CHECKPOINTS / checkpoint_name(step))
    problem = checkpoint.verify()
    if problem:
        raise ExpectedError(
            f"The checkpoint {checkpoint.path} is damaged: {problem}.",
            "Resume from another one: rackless checkpoints lists them",
        )
    return checkpoint


def refuse_other_run(
    checkpoint: Checkpoint, saved: ResumePoint, spec: RunSpec, hashes: dict[str, str]
) -> None:
    """Check that the checkpoint was made with the same model, data and settings.

    Raises:
        ExpectedError: it was not; the message names the differences.
    """
    manifest = checkpoint.manifest
    differences = name_differences(fixed_part(saved.spec), fixed_part(spec))
    if manifest.data_sha256 != hashes["data_sha256"]:
        differences.append(f"the content of the training file {spec.data.train} has changed")
    # Empty if another rank of this node hashes and compares the model.
    if hashes["model_sha256"] and manifest.model_sha256 != hashes["model_sha256"]:
        differences.append(f"the files of the model {spec.model} have changed")
    if differences:
        raise ExpectedError(
            f"The checkpoint of step {manifest.step} does not fit this run: "
            f"{'; '.join(differences)}.",
            "Change that back, or start a new run",
        )
