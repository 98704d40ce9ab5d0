"""Make everything ready for the first step, and agree with the other ranks that all are.

Whatever goes wrong on one rank while it loads is told to all of them before the first collective,
so that every rank ends at once with the same reason instead of waiting for a timeout.
"""

from __future__ import annotations

import platform
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from agents.checkpoints import hash_entries
from agents.errors import UserError
from agents.spec import RunSpec
from agents.trainer import compiling, nf4
from agents.trainer.attempt import Attempt
from agents.trainer.checkpoint import Checkpoint, read_checkpoint
from agents.trainer.compression import make_wire
from agents.trainer.compute import memory_in_words
from agents.trainer.data.cache import load_examples
from agents.trainer.data.hub import find_data, find_model
from agents.trainer.data.store import ExampleSet
from agents.trainer.fingerprint import (
    fixed_part,
    hash_files,
    hash_model,
    hash_spec,
    name_differences,
)
from agents.trainer.flat import FlatParameters, Layout
from agents.trainer.forward import Forward
from agents.trainer.group import Group
from agents.trainer.loading import Loading
from agents.trainer.model import (
    TrainedModel,
    load_model,
    load_tokenizer,
    make_trained,
    refuse_unknown_words,
)
from agents.trainer.objectives import Objective, make_objective
from agents.trainer.optimizer import make_optimizer
from agents.trainer.reducer import Wire
from agents.trainer.reference import Reference, needs_reference
from agents.trainer.snapshot import Progress, load_snapshot, read_carried, read_progress

_PACKAGES = ("torch", "transformers", "peft", "safetensors", "numpy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What a rank holds when it has loaded."""

    device: torch.device
    train: ExampleSet
    evaluation: ExampleSet | None
    model: TrainedModel
    objective: Objective
    reference: Reference | None
    """What the objective compares with, if that is a table."""
    flat: FlatParameters
    optimizer: torch.optim.Optimizer
    wire: Wire
    """How gradients travel; it may carry something from step to step."""
    hashes: dict[str, str]
    """`spec_sha256`, `data_sha256` and `model_sha256`."""
    versions: dict[str, str]
    resumed: Progress | None
    """Where the run stood in the checkpoint; None: it begins."""
    checkpoint: Checkpoint | None
    """The one that is gone on from; None: the run begins."""
    saved_by: dict[str, str]
    """The versions that wrote the checkpoint; empty: it begins."""


def refuse_unsupported(spec: RunSpec, world_size: int) -> None:
    """Say clearly what this version does not train.

    Raises:
        UserError: the spec asks for it.
    """
    if spec.parallel not in ("auto", "single", "data"):
        raise UserError(
            f"parallel: {spec.parallel} is not trained by this version.",
            "Use parallel: auto, single or data",
        )
    if spec.parallel == "single" and world_size > 1:
        raise UserError(
            f"parallel: single is for one GPU, but the run has {world_size} ranks.",
            "Name one node with one GPU in nodes, or use parallel: data",
        )
    if spec.shares is not None and len(spec.shares) != world_size:
        raise UserError(
            f"shares has {len(spec.shares)} values, but the run has {world_size} ranks.",
            "Give one share for each rank, in rank order, or leave shares out",
        )


def choose_device(name: str) -> torch.device:
    """Return the device of this rank, and make it the current one.

    Raises:
        UserError: torch does not see it.
    """
    if not name.startswith("cuda"):
        return torch.device("cpu")
    device = torch.device(name)
    count = torch.cuda.device_count()
    if not torch.cuda.is_available() or (device.index or 0) >= count:
        raise UserError(
            f"torch {torch.__version__} does not see {name} (it sees {count} GPUs).",
            "Check nvidia-smi on that PC and that torch was built for its CUDA version",
        )
    torch.cuda.set_device(device)
    return device


def limit_memory(device: torch.device, most_gib: float | None) -> None:
    """Let this process take no more of its GPU than that, in GiB; None: all of it.

    Under WSL2 no more than what is free in any case: the driver of Windows gives more than there is
    and keeps it in the PC's own memory, which makes training many times slower without a word.
    """
    if device.type != "cuda":
        return
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    spills = "microsoft" in platform.release().lower()
    most_bytes = float(free_bytes if spills else total_bytes)
    if most_gib is not None:
        most_bytes = min(most_bytes, most_gib * 2**30)
    if most_bytes < total_bytes:
        torch.cuda.set_per_process_memory_fraction(most_bytes / total_bytes, device)


def prepare(
    attempt: Attempt, group: Group, device: torch.device, loading: Loading | None = None
) -> Prepared:
    """Load data, model and checkpoint on this rank, and agree with the others.

    Args:
        loading: hears how far it is.

    Raises:
        UserError: this rank or another one cannot train; the message names which, and why.
    """
    loaded: list[Prepared] = []

    def load() -> dict[str, Any]:
        with memory_in_words(device):
            prepared, report = _load(attempt, group, device, loading)
        loaded.append(prepared)
        return report

    reports = group.agree("loaded", load)
    _compare(reports, attempt.rank_names)
    (prepared,) = loaded
    prepared.hashes["model_sha256"] = reports[0]["model_sha256"]
    if prepared.reference is not None:
        tell = partial(loading.tell, "reference") if loading is not None else None
        keeps = attempt.placement.local_rank == 0
        prepared.reference.complete(group, prepared.hashes["model_sha256"], keeps=keeps, tell=tell)
    if prepared.checkpoint is not None:
        group.agree("restored", lambda: _restore(prepared))
    lora = prepared.model.lora
    if lora is not None and lora.use_dora and group.world_size > 1:
        # The lengths of the base weights: other kinds of processors round them otherwise.
        group.copy_from_first(prepared.flat.values)
    return prepared


def _restore(prepared: Prepared) -> dict[str, Any]:
    """Go on with what the checkpoint holds; only now, as the reference is the base model."""
    assert prepared.checkpoint is not None
    load_snapshot(prepared.checkpoint, flat=prepared.flat, optimizer=prepared.optimizer)
    return {}


def _compare(reports: list[dict[str, Any]], names: list[str]) -> None:
    """Check that all ranks hold the same things.

    Raises:
        UserError: they do not; the message names two that differ.
    """
    said = {
        "model_sha256": ("another copy of the model", "Let the run copy the model to every node"),
        "data_sha256": ("another training file", "Let the run copy the data to every node"),
        "checkpoint_sha256": ("another copy of the checkpoint", "Resume from another checkpoint"),
        "num_samples": ("another number of usable rows", "Build the environments anew: versions"),
    }
    for key, (what, hint) in said.items():
        known = [(name, r[key]) for name, r in zip(names, reports, strict=True) if r[key]]
        for name, value in known[1:]:
            if value != known[0][1]:
                raise UserError(f"{name} holds {what} than {known[0][0]}.", hint)


def _load(
    attempt: Attempt, group: Group, device: torch.device, loading: Loading | None
) -> tuple[Prepared, dict[str, Any]]:
    intent = attempt.intent
    spec = intent.spec
    transformers_logging.disable_progress_bar()
    folder = find_model(intent.model_path)
    with ThreadPoolExecutor(max_workers=1) as pool:
        # One rank of a node hashes the model for all of them, while it loads.
        future: Future[str] | None = None
        if attempt.placement.local_rank == 0:
            future = pool.submit(hash_model, folder, attempt.hashes_folder)
        tokenizer, plain_template = load_tokenizer(folder)
        train, data_sha256 = _load_data(intent.train_path, attempt, tokenizer, loading)
        evaluation = None
        if intent.eval_path is not None:
            evaluation, _ = _load_data(
                intent.eval_path, attempt, tokenizer, loading, held_out_from=intent.train_path
            )
        if loading is not None:
            loading.end()
        base = load_model(spec, folder, device)
        for examples in (train, evaluation):
            if examples is not None:
                refuse_unknown_words(base, examples.num_words, folder)
        model = make_trained(spec, base, tokenizer, plain_template=plain_template, device=device)
        forward = Forward(model, device, spec.sequence_tokens)
        if compiling.why_not(device) is None and model.lora is not None:
            nf4.install(model.module)
            forward.join()
        checkpoint = _find_checkpoint(attempt)
        resumed = read_progress(checkpoint) if checkpoint else None
        layout: Layout = resumed.layout if resumed else "backward"
        flat = FlatParameters(model.named_parameters(), device, layout=layout)
        reference = None
        if needs_reference(spec):
            cache = attempt.tokens_folder.with_name("references")
            reference = Reference(spec, forward, (train, evaluation), cache, device)
        optimizer = make_optimizer(spec, flat)
        carried = read_carried(checkpoint) if checkpoint else {}
        wire = make_wire(spec.compression, flat, group, spec.seed, carried)
        hashes = {
            "spec_sha256": hash_spec(spec),
            "data_sha256": data_sha256,
            "model_sha256": future.result() if future else "",
        }
    if checkpoint is not None and resumed is not None:
        refuse_other_run(checkpoint, resumed, spec, hashes)
    prepared = Prepared(
        device=device,
        train=train,
        evaluation=evaluation,
        model=model,
        objective=make_objective(spec, forward, reference.table_P2 if reference else None),
        reference=reference,
        flat=flat,
        optimizer=optimizer,
        wire=wire,
        hashes=hashes,
        versions=_versions(),
        resumed=resumed,
        checkpoint=checkpoint,
        saved_by=checkpoint.manifest.versions if checkpoint else {},
    )
    report = {
        **hashes,
        "checkpoint_sha256": hash_entries(list(checkpoint.manifest.files)) if checkpoint else "",
        "num_samples": len(train),
    }
    return prepared, report


def _load_data(
    path: str,
    attempt: Attempt,
    tokenizer: Any,
    loading: Loading | None,
    held_out_from: str | None = None,
) -> tuple[ExampleSet, str]:
    """Return the examples of a file, and the hash of its content; see `find_data`."""
    files = find_data(path, held_out_from=held_out_from)
    sha256 = hash_files(files.paths, attempt.hashes_folder)
    spec, cache = attempt.intent.spec, attempt.tokens_folder
    if loading is None:
        return load_examples(files, sha256, spec, tokenizer, cache), sha256
    tell = partial(loading.tell, "tokenizing")
    return load_examples(files, sha256, spec, tokenizer, cache, tell, loading.wait), sha256


def _find_checkpoint(attempt: Attempt) -> Checkpoint | None:
    step = attempt.intent.resume_step
    if step is None:
        return None
    checkpoint = read_checkpoint(attempt.run_folder / "checkpoints" / f"step-{step:08d}")
    problem = checkpoint.verify()
    if problem:
        raise UserError(
            f"The checkpoint {checkpoint.path} is damaged: {problem}.",
            "Resume from another one: rackless checkpoints lists them",
        )
    return checkpoint


def refuse_other_run(
    checkpoint: Checkpoint, then: Progress, spec: RunSpec, hashes: dict[str, str]
) -> None:
    """Check that the checkpoint was made from the same model, data and settings.

    Raises:
        UserError: it was not; the message names what differs.
    """
    manifest = checkpoint.manifest
    differences = name_differences(fixed_part(then.spec), fixed_part(spec))
    if manifest.data_sha256 != hashes["data_sha256"]:
        differences.append(f"the content of the training file {spec.data.train} has changed")
    if hashes["model_sha256"] and manifest.model_sha256 != hashes["model_sha256"]:
        differences.append(f"the files of the model {spec.model} have changed")
    if differences:
        raise UserError(
            f"The checkpoint of step {manifest.step} does not fit this run: "
            f"{'; '.join(differences)}.",
            "Put that back as it was, or start a new run",
        )


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}
