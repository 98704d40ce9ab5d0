"""Merge what a run trained into its base: `agents.program agents.quantizers.merge JOB.json`.

The result is a folder that plain Transformers loads, with the tokenizer beside it and the adapter
itself under `adapter/`, for those who keep the base model and load both. It appears with one
rename when it is whole. Progress goes to stdout as JSON lines; the last one tells what went wrong.

Each weight is merged in float32 and rounded to the base model's own precision once. The base model
is hashed first: an adapter means nothing on other weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agents.contract.run_layout import MANIFEST_FILE, STATE_FILE, checkpoint_path
from agents.errors import ExpectedError
from agents.quantizers.job.job import (
    JobProgress,
    appearing,
    copy_companions,
    drop_code_references,
    locate,
    partial_of,
    read_plain,
    run_job,
)
from agents.quantizers.job.meter import Phase
from agents.quantizers.job.reuse import LINEAGE_FILE, is_merged, make_room, name_merge, weigh_files
from agents.trainer.checkpoint.fingerprint import hash_model
from agents.trainer.checkpoint.folder import Checkpoint, read_checkpoint
from agents.trainer.data.hub import find_model
from agents.trainer.data.tokenizer import load_tokenizer

ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")
_SHARD_SIZE = "5GB"


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeInputs:
    """What `JOB.json` says."""

    model: str
    """A folder, or a hub id."""
    checkpoint: Path
    destination: Path
    hashes: Path | None
    """Where hashes of big files are remembered; None: nowhere."""


def read_job(path: Path) -> MergeInputs:
    """Read the job file. Relative paths start at the agent's home.

    Raises:
        ExpectedError: it is not one.
    """
    plain, home = read_plain(path, "merge")
    try:
        checkpoint = plain.get("checkpoint")
        if checkpoint is None:
            checkpoint = checkpoint_path(plain["run_id"], plain["step"])
        return MergeInputs(
            model=locate(home, plain["model_path"]),
            checkpoint=home / checkpoint,
            destination=home / plain["destination"],
            hashes=home / "hashes" if home != Path() else None,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ExpectedError(
            f"{path} is not a merge job: {error!r}.", "Export the run again"
        ) from error


def merge(job: MergeInputs, progress: JobProgress) -> None:
    """Do the job.

    Raises:
        ExpectedError: the checkpoint or the model is not what it has to be, or the disk is full.
    """
    try:
        _merge(job, progress)
    finally:
        progress.end()
    progress.tell(f"The merged model is in {job.destination}", path=str(job.destination))


def _merge(job: MergeInputs, progress: JobProgress) -> None:
    progress.begin(
        "check", "Checking the checkpoint and the base model", partial_of(job.destination)
    )
    checkpoint = read_checkpoint(job.checkpoint)
    _refuse_damage(checkpoint)
    base = find_model(job.model)
    _refuse_other_model(checkpoint, base, job.hashes)
    content = name_merge(checkpoint)
    if is_merged(job.destination, content):
        progress.tell("This checkpoint was merged here before; the model is taken as it is")
        return
    make_room(job.destination)
    with appearing(job.destination, "the merged model") as partial:
        _write_model(base, checkpoint, partial, progress)
        _copy_rest(base, checkpoint, partial, content, progress.end())


def _refuse_damage(checkpoint: Checkpoint) -> None:
    problem = checkpoint.verify()
    if problem:
        raise ExpectedError(
            f"The checkpoint {checkpoint.path} is damaged: {problem}.",
            "Export another one: rackless checkpoints lists them",
        )


def _refuse_other_model(checkpoint: Checkpoint, base: Path, hashes: Path | None) -> None:
    if hash_model(base, hashes) != checkpoint.manifest.model_sha256:
        raise ExpectedError(
            f"{base} is not the model that the checkpoint {checkpoint.path} was trained on: "
            "its files differ.",
            "Merge with the very model of that run",
        )


def _write_model(base: Path, checkpoint: Checkpoint, folder: Path, progress: JobProgress) -> None:
    progress.begin("load", "Loading PyTorch and the base model")
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        base,
        dtype="auto",
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
    )
    progress.begin("merge", "Merging")
    with torch.no_grad():
        if has_adapter(checkpoint):
            model = _merge_adapter(model, checkpoint, progress)
        else:
            copy_values(model, checkpoint)
    progress.begin("write", "Writing the merged model")
    model.save_pretrained(folder, max_shard_size=_SHARD_SIZE)


def _merge_adapter(model: Any, checkpoint: Checkpoint, progress: JobProgress) -> Any:
    """Return the base model with every adapted weight replaced."""
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    from agents.trainer.model.experts import names_as_they_are

    with names_as_they_are():
        adapted = PeftModel.from_pretrained(model, checkpoint.path)
    layers = [(n, m) for n, m in adapted.named_modules() if isinstance(m, LoraLayer)]
    # Before any weight is written: a tied head would change the embeddings as well.
    _untie_head(adapted, [layer.get_base_layer() for _, layer in layers])
    for index, (name, layer) in enumerate(layers, start=1):
        # An adapter on experts belongs to one parameter of theirs, which has all of them.
        weight = getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))
        for adapter in layer.active_adapters:
            # peft would add in the type of the weight, and round twice.
            merged = weight.float() + layer.get_delta_weight(adapter).float()
            if adapter in layer.lora_magnitude_vector:
                merged = _lengthen(merged, layer, adapter)
            _refuse_diverged(name, merged)
            weight.copy_(merged)
        progress.tell(f"Merged {index} of {len(layers)} layers", done=index, total=len(layers))
    # The deltas are in the weights already: unload drops the adapters without merging again.
    return adapted.unload()


def _untie_head(model: Any, adapted: Sequence[Any]) -> None:
    """Give a head that was adapted weights of its own, where it shares those of the embeddings.

    What the adapter adds belongs to the head alone.
    """
    import torch

    embeddings = model.get_input_embeddings()
    for layer in adapted:
        is_tied = getattr(layer, "weight", None) is embeddings.weight  # experts have none
        if layer is not embeddings and is_tied:
            layer.weight = torch.nn.Parameter(embeddings.weight.detach().clone())
            # Otherwise loading would tie the two again. Multimodal models have two configs.
            for config in (model.config, model.config.get_text_config()):
                config.tie_word_embeddings = False


def _refuse_diverged(name: str, weight: Any) -> None:
    if not weight.isfinite().all():
        raise ExpectedError(
            f"The merged weight of {name} holds numbers that are not finite.",
            "The training has diverged: export an earlier checkpoint",
        )


def _lengthen(merged: Any, layer: Any, adapter: str) -> Any:
    """Give each output's weights the length that DoRA has learned (Liu et al. 2024, equation 5)."""
    import torch

    # GPT-2 stores its weights with inputs first.
    rows_OI = merged.T if layer.fan_in_fan_out else merged
    lengths_O = layer.lora_magnitude_vector[adapter].weight.float()
    rows_OI = rows_OI * (lengths_O / torch.linalg.norm(rows_OI, dim=1))[:, None]
    return rows_OI.T if layer.fan_in_fan_out else rows_OI


def has_adapter(checkpoint: Checkpoint) -> bool:
    """Tell whether a checkpoint holds an adapter; else it holds all weights."""
    return (checkpoint.path / ADAPTER_FILES[0]).exists()


def copy_values(model: Any, checkpoint: Checkpoint) -> None:
    """Put the weights of a full checkpoint into a model.

    Raises:
        ExpectedError: they are not finite.
    """
    from agents.trainer.checkpoint.sharded_files import find_shards, read_shards
    from agents.trainer.checkpoint.state import FULL_STEM

    parameters = dict(model.named_parameters())
    for name, value in read_shards(find_shards(checkpoint.path, FULL_STEM)):
        _refuse_diverged(name, value)
        parameters[name].copy_(value)


def _copy_rest(
    base: Path, checkpoint: Checkpoint, folder: Path, content: str, measured: Sequence[Phase]
) -> None:
    """Copy tokenizer, chat template and adapter as they are, and write what the merge is of."""
    copy_companions(base, folder, leave=("config.json", MANIFEST_FILE))
    drop_code_references(folder)  # before the files are weighed
    manifest = checkpoint.manifest
    lineage = {
        "content": content,
        "sizes": weigh_files(folder),
        "base_sha256": manifest.model_sha256,
        "data_sha256": manifest.data_sha256,
        "measured": {"phases": [asdict(phase) for phase in measured]},
    }
    (folder / LINEAGE_FILE).write_text(json.dumps(lineage, indent=1), encoding="ascii")
    state = json.loads((checkpoint.path / STATE_FILE).read_bytes())
    # The run used a template that the base model lacks; the result has to answer in the same one.
    if state.get("plain_template"):
        tokenizer, _ = load_tokenizer(base, state.get("text_rules", 1))
        (folder / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="ascii")
    if has_adapter(checkpoint):
        (folder / "adapter").mkdir(mode=0o700)
        for name in ADAPTER_FILES:
            shutil.copyfile(checkpoint.path / name, folder / "adapter" / name)


def main(argv: list[str]) -> int:
    """Run one job and return the exit code."""
    usage = "python -m agents.program agents.quantizers.merge JOB.json"
    return run_job(argv, usage, lambda path, progress: merge(read_job(path), progress))
