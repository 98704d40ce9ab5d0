"""Prepare everything for the first step, and agree with the other ranks that all are ready.

A failure on one rank while it loads is reported to all ranks before the first collective, so that
every rank ends at once with the same reason instead of waiting for a timeout.
"""

from __future__ import annotations

import platform
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from agents.contract.objectives import OBJECTIVES
from agents.contract.parallel import find_mode, refuse_parallel, refuse_trained_weights
from agents.contract.spec import RunSpec
from agents.errors import ExpectedError
from agents.file_hashes import hash_files
from agents.node.checkpoints import hash_entries
from agents.trainer.checkpoint.fingerprint import hash_like, hash_model, hash_spec
from agents.trainer.checkpoint.resume import find_checkpoint, refuse_other_run
from agents.trainer.checkpoint.state import load_state, read_resume_point
from agents.trainer.data.hub import find_data, find_model
from agents.trainer.data.names import named_as_given, names_of_intent
from agents.trainer.data.sources import DataLoader, find_sources
from agents.trainer.data.store import ExampleSet
from agents.trainer.data.tokens import TEXT_RULES
from agents.trainer.kernels import compiling, nf4
from agents.trainer.model.forward import Forward
from agents.trainer.model.model import (
    TrainedModel,
    build_trained_model,
    load_model,
    load_tokenizer,
    refuse_unknown_tokens,
)
from agents.trainer.model.vocabulary import add_rows
from agents.trainer.objectives.objective import Objective
from agents.trainer.objectives.passing import PassOn
from agents.trainer.objectives.reference_model import ReferenceTable
from agents.trainer.objectives.registry import KnownOfRows, make_objective, needs_reference_table
from agents.trainer.parallel.strategy import Strategy
from agents.trainer.rank.context import RankContext
from agents.trainer.rank.device import explain_out_of_memory
from agents.trainer.streamed_store import DeferredStore
from agents.trainer.training_state import TrainingState

_PACKAGES = ("torch", "transformers", "peft", "safetensors", "numpy")


def refuse_unsupported(spec: RunSpec, world_size: int) -> None:
    """Reject a spec that this version does not train, or not on this number of ranks.

    Raises:
        ExpectedError: the message names the key and its value.
    """
    refusal = refuse_parallel(spec.parallel)
    if refusal := refusal or refuse_trained_weights(spec.parallel, spec.adapter.kind):
        raise ExpectedError(f"{refusal[0]}.", refusal[1])
    if find_mode(spec.parallel).uses_one_gpu and world_size > 1:
        raise ExpectedError(
            f"parallel: {spec.parallel} is for one GPU, but the run has {world_size} ranks.",
            "Name one node with one GPU in nodes, or use parallel: data",
        )
    if spec.shares is not None and len(spec.shares) != world_size:
        raise ExpectedError(
            f"shares has {len(spec.shares)} values, but the run has {world_size} ranks.",
            "Give one share for each rank, in rank order, or leave shares out",
        )


def prepare(context: RankContext, strategy: Strategy) -> TrainingState:
    """Load data, model and checkpoint on this rank, and agree with the others.

    Raises:
        ExpectedError: this rank or another one cannot train; the message names the rank and why.
    """
    group, attempt = context.group, context.attempt
    progress = context.progress
    loaded: list[TrainingState] = []

    def load() -> dict[str, Any]:
        with explain_out_of_memory(context.device):
            loaded.append(_load(context, strategy))
        return _describe(loaded[0])

    reports = group.agree("loaded", load)
    _compare(reports, attempt.rank_names)
    (state,) = loaded
    state.hashes["model_sha256"] = reports[0]["model_sha256"]
    strategy.join()
    if state.reference is not None:
        state.reference.complete(
            group,
            state.hashes["model_sha256"],
            keeps=attempt.placement.local_rank == 0,
            report=partial(progress.report_share, "reference"),
        )
    if state.checkpoint is not None:
        # Only now, since the reference above is evaluated on the base model.
        group.agree("restored", partial(_restore, state, strategy))
    lora = state.model.lora
    computes_first = lora is not None and lora.use_dora
    if (computes_first or context.attempt.intent.spec.data.new_tokens) and group.world_size > 1:
        # Lengths and means of base weights: different kinds of processors round them differently.
        strategy.copy_first_values()
    return state


def _restore(state: TrainingState, strategy: Strategy) -> dict[str, Any]:
    assert state.checkpoint is not None
    load_state(state.checkpoint, strategy)
    return {}


def _compare(reports: list[dict[str, Any]], names: list[str]) -> None:
    """Check that all ranks hold the same things.

    Raises:
        ExpectedError: they do not; the message names two that differ.
    """
    problems = {
        "model_sha256": ("another copy of the model", "Let the run copy the model to every node"),
        "data_sha256": ("another training file", "Let the run copy the data to every node"),
        "checkpoint_sha256": ("another copy of the checkpoint", "Resume from another checkpoint"),
        "num_samples": ("another number of usable rows", "Build the environments again: versions"),
    }
    for key, (what, hint) in problems.items():
        # The hash is empty on ranks that leave hashing to another rank of their node.
        known = [(name, r[key]) for name, r in zip(names, reports, strict=True) if r[key]]
        for name, value in known[1:]:
            if value != known[0][1]:
                raise ExpectedError(f"{name} holds {what} than {known[0][0]}.", hint)


def _describe(state: TrainingState) -> dict[str, Any]:
    """Return the values that have to be the same on all ranks."""
    checkpoint = state.checkpoint
    return {
        **state.hashes,
        "checkpoint_sha256": hash_entries(list(checkpoint.manifest.files)) if checkpoint else "",
        "num_samples": len(state.train),
    }


def _load(context: RankContext, strategy: Strategy) -> TrainingState:
    attempt, device = context.attempt, context.device
    spec = attempt.intent.spec
    # Its carriage returns would fill the log.
    transformers_logging.disable_progress_bar()
    folder = find_model(attempt.intent.model_path, spec)
    with ThreadPoolExecutor(max_workers=1) as pool:
        # One rank of a node hashes the model for all, while it loads.
        model_hash: Future[str] | None = context.model_hash
        if model_hash is None and attempt.placement.local_rank == 0:
            model_hash = pool.submit(hash_model, folder, attempt.hashes_folder)
        checkpoint = find_checkpoint(attempt)
        resumed = read_resume_point(checkpoint) if checkpoint else None
        # A started run keeps its tokens, so it keeps its rules.
        rules = resumed.text_rules if resumed else TEXT_RULES
        tokenizer, plain_template = load_tokenizer(folder, rules, spec.data)
        train, evaluation, data_sha256 = _load_data(context, tokenizer, rules)
        store = DeferredStore(context, folder, model_hash)
        base = _load_base(context, strategy, folder, store)
        add_rows(base, tokenizer, spec.data.new_tokens)
        for examples in (train, evaluation):
            if examples is not None:
                # On a GPU an unknown id would be an assertion without a location.
                refuse_unknown_tokens(base, examples.vocab_size, folder)
        stream = store.finish()
        model = build_trained_model(
            spec, base, tokenizer, plain_template=plain_template, device=device, stream=stream
        )
        # After the adapter: a stage must train parameters, or be refused.
        model = strategy.divide(model)
        forward = _make_forward(model, device, spec.sequence_tokens)
        for message in forward.limits if attempt.rank == 0 else ():
            context.journal.write("warning", message=message, hint="")
        parameters = strategy.place(model, resumed.layout if resumed else "backward")
        reference = None
        if needs_reference_table(spec):
            cache = attempt.tokens_folder.with_name("references")
            reference = ReferenceTable(spec, forward, (train, evaluation), cache, device)
        hashes = {
            "spec_sha256": hash_spec(spec),
            "data_sha256": data_sha256,
            "model_sha256": model_hash.result() if model_hash else "",
        }
    if checkpoint is not None and resumed is not None:
        if hashes["model_sha256"]:
            saved = checkpoint.manifest.model_sha256
            hashes["model_sha256"] = hash_like(
                folder, attempt.hashes_folder, hashes["model_sha256"], saved
            )
        refuse_other_run(checkpoint, resumed, spec, hashes)
    return TrainingState(
        train=train,
        evaluation=evaluation,
        model=model,
        objective=_make_objective(spec, model, forward, reference, train, evaluation),
        reference=reference,
        parameters=parameters,
        hashes=hashes,
        is_flat=forward.flat,
        versions=_read_versions(),
        resumed=resumed,
        checkpoint=checkpoint,
        text_rules=rules,
    )


def _load_data(
    context: RankContext, tokenizer: Any, rules: int
) -> tuple[ExampleSet, ExampleSet | None, str]:
    """Return the training and evaluation examples, and the hash of the training data."""
    attempt, progress = context.attempt, context.progress
    intent, hashes = attempt.intent, attempt.hashes_folder
    with named_as_given(names_of_intent(intent)):
        evaluation = None
        if intent.eval_path is not None:
            evaluation = find_data(intent.eval_path, held_out_from=intent.train_path)
        loader = DataLoader(
            spec=intent.spec,
            sources=find_sources(intent.spec, (intent.train_path, *intent.more_paths), hashes),
            tokenizer=tokenizer,
            cache=attempt.tokens_folder,
            evaluation=evaluation,
            evaluation_sha256=hash_files(evaluation.paths, hashes) if evaluation else "",
            report=partial(progress.report_share, "tokenizing"),
            wait=progress.wait,
            rules=rules,
        )
        train = loader.load("train")
        assert train is not None
        held_out = loader.load("eval")
        sha256 = loader.sha256
    progress.end()
    return train, held_out, sha256


def _load_base(
    context: RankContext, strategy: Strategy, folder: Path, store: DeferredStore
) -> nn.Module:
    """Return the parts of the base model that this rank holds."""

    def report(done_bytes: int, total_bytes: int) -> None:
        if store.is_open:
            return  # the store reports layers: the bytes to read are not known
        # In a reading thread. A lost rank ends this one at the next agreement.
        with suppress(ExpectedError):
            context.progress.report("weights", done_bytes, total_bytes)

    spec, device = context.attempt.intent.spec, context.device
    base = load_model(spec, folder, device, report, strategy.choose_layers, store.open)
    context.progress.end()
    return base


def _make_forward(model: TrainedModel, device: torch.device, sequence_tokens: int) -> Forward:
    forward = Forward(model, device, sequence_tokens)
    if compiling.find_obstacle(device) is None and model.lora is not None:
        # These replace operations by ones that are opaque to the compiler; uncompiled layers gain
        # nothing from them.
        nf4.register(model.module)
        forward.fuse_linear()
    return forward


def _make_objective(
    spec: RunSpec,
    model: TrainedModel,
    forward: Forward,
    reference: ReferenceTable | None,
    train: ExampleSet,
    evaluation: ExampleSet | None,
) -> Objective:
    """Return this rank's objective; a stage without the last layers has no loss of its own."""
    if model.stage is not None and not model.stage.is_last:
        return PassOn(forward, OBJECTIVES[spec.objective])
    known = KnownOfRows(
        reference=reference.table_RK if reference else None, labels=_join_labels(train, evaluation)
    )
    return make_objective(spec, forward, known)


def _join_labels(train: ExampleSet, evaluation: ExampleSet | None) -> Tensor | None:
    """Return the labels of all rows, training first; None without labels."""
    if train.labels is None:
        return None
    known = [train.labels, *([] if evaluation is None else [evaluation.labels])]
    return torch.from_numpy(np.concatenate([part for part in known if part is not None]))


def _read_versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}
