"""Make everything ready for the first step, and agree with the other ranks that all are.

Whatever goes wrong on one rank while it loads is told to all of them before the first collective,
so that every rank ends at once with the same reason instead of waiting for a timeout.
"""

from __future__ import annotations

import platform
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from agents.contract.parallel import refuse_parallel
from agents.contract.spec import RunSpec
from agents.errors import ExpectedError
from agents.node.checkpoints import hash_entries
from agents.trainer.checkpoint.fingerprint import (
    hash_model,
    hash_spec,
)
from agents.trainer.checkpoint.resume import find_checkpoint, refuse_other_run
from agents.trainer.checkpoint.state import load_state, read_carried, read_resume_point
from agents.trainer.data.cache import load_examples
from agents.trainer.data.file_hashes import hash_files
from agents.trainer.data.hub import find_data, find_model
from agents.trainer.data.store import ExampleSet
from agents.trainer.kernels import compiling, nf4
from agents.trainer.model.forward import Forward
from agents.trainer.model.model import (
    load_model,
    load_tokenizer,
    make_trained,
    refuse_unknown_words,
)
from agents.trainer.objectives.reference_model import ReferenceTable, needs_reference
from agents.trainer.objectives.registry import make_objective
from agents.trainer.optim.flat_parameters import FlatParameters, Layout
from agents.trainer.optim.optimizer import make_optimizer
from agents.trainer.parallel.compression import make_transport
from agents.trainer.rank.attempt import RankAttempt
from agents.trainer.rank.device import explain_out_of_memory
from agents.trainer.rank.group import Group
from agents.trainer.rank.load_progress import LoadProgress
from agents.trainer.training_state import TrainingState

_PACKAGES = ("torch", "transformers", "peft", "safetensors", "numpy")


def refuse_unsupported(spec: RunSpec, world_size: int) -> None:
    """Say clearly what this version does not train.

    Raises:
        ExpectedError: the spec asks for it.
    """
    if refusal := refuse_parallel(spec.parallel):
        raise ExpectedError(f"{refusal[0]}.", refusal[1])
    if spec.parallel == "single" and world_size > 1:
        raise ExpectedError(
            f"parallel: single is for one GPU, but the run has {world_size} ranks.",
            "Name one node with one GPU in nodes, or use parallel: data",
        )
    if spec.shares is not None and len(spec.shares) != world_size:
        raise ExpectedError(
            f"shares has {len(spec.shares)} values, but the run has {world_size} ranks.",
            "Give one share for each rank, in rank order, or leave shares out",
        )


def prepare(
    attempt: RankAttempt, group: Group, device: torch.device, loading: LoadProgress | None = None
) -> TrainingState:
    """Load data, model and checkpoint on this rank, and agree with the others.

    Args:
        loading: hears how far it is.

    Raises:
        ExpectedError: this rank or another one cannot train; the message names which, and why.
    """
    loaded: list[TrainingState] = []

    def load() -> dict[str, Any]:
        with explain_out_of_memory(device):
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


def _restore(prepared: TrainingState) -> dict[str, Any]:
    """Go on with what the checkpoint holds; only now, as the reference is the base model."""
    assert prepared.checkpoint is not None
    load_state(prepared.checkpoint, flat=prepared.flat, optimizer=prepared.optimizer)
    return {}


def _compare(reports: list[dict[str, Any]], names: list[str]) -> None:
    """Check that all ranks hold the same things.

    Raises:
        ExpectedError: they do not; the message names two that differ.
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
                raise ExpectedError(f"{name} holds {what} than {known[0][0]}.", hint)


def _load(
    attempt: RankAttempt, group: Group, device: torch.device, loading: LoadProgress | None
) -> tuple[TrainingState, dict[str, Any]]:
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
        checkpoint = find_checkpoint(attempt)
        resumed = read_resume_point(checkpoint) if checkpoint else None
        layout: Layout = resumed.layout if resumed else "backward"
        flat = FlatParameters(model.named_parameters(), device, layout=layout)
        reference = None
        if needs_reference(spec):
            cache = attempt.tokens_folder.with_name("references")
            reference = ReferenceTable(spec, forward, (train, evaluation), cache, device)
        optimizer = make_optimizer(spec, flat)
        carried = read_carried(checkpoint) if checkpoint else {}
        wire = make_transport(spec.compression, flat, group, spec.seed, carried)
        hashes = {
            "spec_sha256": hash_spec(spec),
            "data_sha256": data_sha256,
            "model_sha256": future.result() if future else "",
        }
    if checkpoint is not None and resumed is not None:
        refuse_other_run(checkpoint, resumed, spec, hashes)
    prepared = TrainingState(
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
    attempt: RankAttempt,
    tokenizer: Any,
    loading: LoadProgress | None,
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


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}
