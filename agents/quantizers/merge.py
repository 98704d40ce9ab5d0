"""Merge a run's adapter or weights into its base: `agents.program agents.quantizers.merge
JOB.json`.

The result is a folder that plain Transformers loads, with the tokenizer and, in `adapter/`, the
adapter itself for users who keep the base model. It appears by one rename when it is complete.
Progress goes to stdout as JSON lines; the last one may report a failure.

Each weight is merged in float32 and rounded to the base model's own precision once. The base model
is hashed first, since an adapter is meaningless on other weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agents.contract.run_layout import MANIFEST_FILE, checkpoint_path
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
from agents.trainer.checkpoint.fingerprint import hash_like, hash_model
from agents.trainer.checkpoint.folder import Checkpoint, read_checkpoint
from agents.trainer.checkpoint.state import read_resume_point
from agents.trainer.data.hub import find_model
from agents.trainer.data.stops import write_stops
from agents.trainer.data.tokenizer import (
    changes_template,
    load_tokenizer,
    write_template,
    write_tokens,
)

ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeInputs:
    """Contents of `JOB.json`."""

    model: str
    """Folder, or hub id."""
    checkpoint: Path
    destination: Path
    hashes: Path | None
    """Folder with remembered hashes of big files; None: not remembered."""


def read_job(path: Path) -> MergeInputs:
    """Return the job of a file. Relative paths start at the agent's home.

    Raises:
        ExpectedError: it is not a merge job.
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
    """Merge one checkpoint.

    Raises:
        ExpectedError: the checkpoint is damaged, the model is another one, or the disk is full.
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
        progress.tell("This checkpoint was merged here before, so that model is used")
        return
    make_room(job.destination)
    with appearing(job.destination, "the merged model") as partial:
        write_model(base, checkpoint, partial, progress)
        _copy_rest(base, checkpoint, partial, content, progress.end())


def _refuse_damage(checkpoint: Checkpoint) -> None:
    problem = checkpoint.verify()
    if problem:
        raise ExpectedError(
            f"The checkpoint {checkpoint.path} is damaged: {problem}.",
            "Export another one: rackless checkpoints lists them",
        )


def _refuse_other_model(checkpoint: Checkpoint, base: Path, hashes: Path | None) -> None:
    saved = checkpoint.manifest.model_sha256
    if hash_like(base, hashes, hash_model(base, hashes), saved) != saved:
        raise ExpectedError(
            f"{base} is not the model that the checkpoint {checkpoint.path} was trained on: "
            "its files differ.",
            "Merge with the very model of that run",
        )


def write_model(base: Path, checkpoint: Checkpoint, folder: Path, progress: JobProgress) -> None:
    """Write the merged model, reading the base model and writing the result tensor by tensor.

    Raises:
        ExpectedError: the weights are not finite, or the base model is quantized.
        OSError: the disk is full.
    """
    progress.begin("load", "Loading PyTorch and the base model's config")
    import torch
    from transformers.utils import logging as transformers_logging

    from agents.quantizers.merging.output_files import OutputFiles
    from agents.quantizers.merging.skeleton import Skeleton
    from agents.quantizers.merging.updates import find_rows, read_adapter, read_full
    from agents.trainer.model.vocabulary import resized

    transformers_logging.disable_progress_bar()
    skeleton = Skeleton(base)
    progress.begin("merge", "Merging and writing, tensor by tensor")
    num_rows = find_rows(skeleton.model, checkpoint.path)
    with torch.no_grad():
        with resized(skeleton.model, num_rows):
            if has_adapter(checkpoint):
                updates = read_adapter(skeleton.model, checkpoint.path)
                # An adapter of the head must not change embeddings tied to it.
                for name in updates:
                    skeleton.untie(name)
            else:
                updates = read_full(checkpoint.path)
            files = OutputFiles(skeleton.model, folder)
            shapes = {name: one.shape for name, one in skeleton.model.named_parameters()}
        count = 0
        for tensors in skeleton.load():
            for name in tensors.keys() & updates.keys():
                if num_rows is not None and tensors[name].shape != shapes[name]:
                    tensors[name] = tensors[name].new_empty(shapes[name])
                updates[name](tensors[name])
                count += 1
                progress.tell(
                    f"Merged {count} of {len(updates)} weights", done=count, total=len(updates)
                )
            files.write(skeleton.revert(tensors))
        files.require_whole()


def has_adapter(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint holds an adapter; else it holds all weights."""
    return (checkpoint.path / ADAPTER_FILES[0]).exists()


def fit_rows(model: Any, checkpoint: Checkpoint) -> None:
    """Give a loaded model as many tokens as a checkpoint has weights for."""
    from agents.quantizers.merging.updates import find_rows
    from agents.trainer.model.vocabulary import resize

    num_rows = find_rows(model, checkpoint.path)
    if num_rows is not None:
        resize(model, num_rows)


def copy_values(model: Any, checkpoint: Checkpoint) -> None:
    """Copy the weights of a full checkpoint into a model.

    Raises:
        ExpectedError: the weights are not finite.
    """
    from agents.quantizers.merging.updates import read_full

    parameters = dict(model.named_parameters())
    for name, update in read_full(checkpoint.path).items():
        update(parameters[name])


def _copy_rest(
    base: Path, checkpoint: Checkpoint, folder: Path, content: str, measured: Sequence[Phase]
) -> None:
    """Copy tokenizer, chat template and adapter, and record the sources of the merge."""
    copy_companions(base, folder, leave=("config.json", MANIFEST_FILE))
    drop_code_references(folder)  # before the lineage records the sizes
    manifest = checkpoint.manifest
    lineage = {
        "content": content,
        "sizes": weigh_files(folder),
        "base_sha256": manifest.model_sha256,
        "data_sha256": manifest.data_sha256,
        "measured": {"phases": [asdict(phase) for phase in measured]},
    }
    (folder / LINEAGE_FILE).write_text(json.dumps(lineage, indent=1), encoding="ascii")
    from agents.quantizers.merging.updates import tie_whole

    point = read_resume_point(checkpoint)
    tokenizer, _ = load_tokenizer(base, point.text_rules, point.spec.data)
    # The config of a base model lacks the token that ends answers in its chat template.
    write_stops(folder, tokenizer)
    places = [folder]
    if has_adapter(checkpoint):
        places.append(folder / "adapter")
        places[-1].mkdir(mode=0o700)
        for name in ADAPTER_FILES:
            shutil.copyfile(checkpoint.path / name, places[-1] / name)
        tie_whole(places[-1])
    # The model of the training may have another template than its base, and more tokens.
    if point.plain_template or changes_template(point.spec.data):
        for place in places:
            write_template(place, tokenizer.chat_template)
    if tokenizer.new_token_ids:
        for place in places:
            write_tokens(place, tokenizer)


def main(argv: list[str]) -> int:
    """Run one job and return the exit code."""
    usage = "python -m agents.program agents.quantizers.merge JOB.json"
    return run_job(argv, usage, lambda path, progress: merge(read_job(path), progress))
