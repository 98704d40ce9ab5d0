"""Merge what a run trained into its base model: `python -m agents.quantizers.merge JOB.json`.

The result is a folder that plain Transformers loads, with the tokenizer beside it and the adapter
itself under `adapter/`, for those who keep the base model and load both. It appears with one
rename when it is whole. Progress goes to stdout as JSON lines; the last one tells what went wrong.

Each weight is merged in float32 and rounded to the base model's own precision once. The base model
is hashed first: an adapter means nothing on other weights.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from agents.errors import UserError, explain_os_error
from agents.state import fsync_folder
from agents.trainer.checkpoint import Checkpoint, read_checkpoint, sync_file, tells_full_disk
from agents.trainer.fingerprint import hash_model

EXIT_USER_ERROR = 3
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")
_COPIED = (".json", ".jinja", ".model", ".txt")
_NOT_COPIED = ("config.json", "manifest.json")
_SHARD_SIZE = "5GB"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What `JOB.json` says."""

    model: Path
    checkpoint: Path
    destination: Path
    hashes: Path | None
    """Where hashes of big files are remembered; None: nowhere."""


def read_job(path: Path) -> Job:
    """Read the job file. Relative paths start at the agent's home.

    Raises:
        UserError: it is not one.
    """
    try:
        plain = json.loads(path.read_bytes())
        home = Path(plain.get("agent_home") or os.environ.get("RACKLESS_AGENT_HOME") or ".")
        checkpoint = plain.get("checkpoint")
        if checkpoint is None:
            checkpoint = f"runs/{plain['run_id']}/checkpoints/step-{plain['step']:08d}"
        return Job(
            model=home / plain["model_path"],
            checkpoint=home / checkpoint,
            destination=home / plain["destination"],
            hashes=home / "hashes" if home != Path() else None,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a merge job: {error!r}.", "Export the run again") from error


class Progress:
    """Prints JSON lines to the stdout that this process began with."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def tell(self, message: str, **fields: Any) -> None:
        self._write({"kind": "progress", "message": message, **fields})

    def fail(self, message: str, hint: str) -> None:
        self._write({"kind": "failed", "message": message, "hint": hint})

    def _write(self, record: dict[str, Any]) -> None:
        self._out.write(json.dumps(record) + "\n")
        self._out.flush()


def merge(job: Job, progress: Progress) -> None:
    """Do the job.

    Raises:
        UserError: the checkpoint or the model is not what it has to be, or the disk is full.
    """
    progress.tell("Checking the checkpoint and the base model")
    checkpoint = read_checkpoint(job.checkpoint)
    _refuse_damage(checkpoint)
    _refuse_other_model(checkpoint, job)
    partial = job.destination.with_name(f".partial-{job.destination.name}-{os.getpid()}")
    try:
        partial.mkdir(mode=0o700, parents=True)
        _write_model(job, checkpoint, partial, progress)
        _copy_rest(job, checkpoint, partial)
        _appear(partial, job.destination)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        told = _explain(error, job)
        if told is error:
            raise
        raise told from error
    progress.tell(f"The merged model is in {job.destination}", path=str(job.destination))


def _refuse_damage(checkpoint: Checkpoint) -> None:
    problem = checkpoint.verify()
    if problem:
        raise UserError(
            f"The checkpoint {checkpoint.path} is damaged: {problem}.",
            "Export another one: rackless checkpoints lists them",
        )


def _refuse_other_model(checkpoint: Checkpoint, job: Job) -> None:
    if not job.model.is_dir():
        raise UserError(f"{job.model} does not exist.", "Name the folder of the base model")
    if hash_model(job.model, job.hashes) != checkpoint.manifest.model_sha256:
        raise UserError(
            f"{job.model} is not the model that the checkpoint {checkpoint.path} was trained on: "
            "its files differ.",
            "Merge with the very model of that run",
        )


def _write_model(job: Job, checkpoint: Checkpoint, folder: Path, progress: Progress) -> None:
    progress.tell("Loading PyTorch and the base model")
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        job.model, dtype="auto", use_safetensors=True, local_files_only=True
    )
    with torch.no_grad():
        if (checkpoint.path / ADAPTER_FILES[0]).exists():
            model = _merge_adapter(model, checkpoint, progress)
        else:
            _copy_values(model, checkpoint)
    progress.tell("Writing the merged model")
    model.save_pretrained(folder, max_shard_size=_SHARD_SIZE)


def _merge_adapter(model: Any, checkpoint: Checkpoint, progress: Progress) -> Any:
    """Return the base model with every adapted weight replaced."""
    import torch
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    adapted = PeftModel.from_pretrained(model, checkpoint.path)
    layers = [(n, m) for n, m in adapted.named_modules() if isinstance(m, LoraLayer)]
    for index, (name, layer) in enumerate(layers, start=1):
        weight = layer.get_base_layer().weight
        for adapter in layer.active_adapters:
            merged = weight.float() + layer.get_delta_weight(adapter).float()
            if not torch.isfinite(merged).all():
                raise UserError(
                    f"The merged weight of {name} holds numbers that are not finite.",
                    "The training has diverged: export an earlier checkpoint",
                )
            weight.copy_(merged)
        progress.tell(f"Merged {index} of {len(layers)} layers", done=index, total=len(layers))
    return adapted.unload()


def _copy_values(model: Any, checkpoint: Checkpoint) -> None:
    from agents.trainer.shards import find_shards, read_shards
    from agents.trainer.snapshot import FULL_STEM

    parameters = dict(model.named_parameters())
    for name, value in read_shards(find_shards(checkpoint.path, FULL_STEM)):
        parameters[name].copy_(value)


def _copy_rest(job: Job, checkpoint: Checkpoint, folder: Path) -> None:
    """Copy tokenizer, chat template and adapter as they are."""
    written = {path.name for path in folder.iterdir()}
    for path in job.model.iterdir():
        wanted = path.suffix in _COPIED and path.name not in (*_NOT_COPIED, *written)
        if wanted and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    state = json.loads((checkpoint.path / "state.json").read_bytes())
    if state.get("plain_template"):
        from agents.trainer.data.tokens import PLAIN_TEMPLATE

        (folder / "chat_template.jinja").write_text(PLAIN_TEMPLATE, encoding="ascii")
    if (checkpoint.path / ADAPTER_FILES[0]).exists():
        (folder / "adapter").mkdir(mode=0o700)
        for name in ADAPTER_FILES:
            shutil.copyfile(checkpoint.path / name, folder / "adapter" / name)


def _appear(partial: Path, destination: Path) -> None:
    for path in partial.rglob("*"):
        if path.is_file():
            sync_file(path)
    fsync_folder(partial)
    old = None
    if destination.exists():
        old = destination.with_name(f".deleted-{destination.name}-{os.getpid()}")
        os.rename(destination, old)
    os.rename(partial, destination)
    fsync_folder(destination.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _explain(error: Exception, job: Job) -> Exception:
    if tells_full_disk(error):
        return UserError(
            f"The disk is full: the merged model does not fit into {job.destination.parent}.",
            "Free some room there and export again; nothing half written was left",
        )
    if isinstance(error, UserError) or not isinstance(error, (OSError, MemoryError)):
        return error
    if isinstance(error, MemoryError):
        return UserError("The PC ran out of memory.", "Close other programs and export again")
    return explain_os_error(error, f"writing {job.destination}")


def main(argv: list[str]) -> int:
    """Run one job and return the exit code."""
    # Libraries print what they like; only progress may reach the real stdout.
    progress = Progress(os.fdopen(os.dup(1), "w", encoding="ascii"))
    os.dup2(2, 1)
    try:
        if len(argv) != 1:
            raise UserError("One job file is needed.", "python -m agents.quantizers.merge JOB.json")
        merge(read_job(Path(argv[0])), progress)
    except UserError as error:
        progress.fail(error.message, error.hint)
        return EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
