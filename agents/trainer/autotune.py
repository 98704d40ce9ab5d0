"""Fit the engine to the device of this rank: compile or not, how much at once, what layers do.

On a CPU there is nothing to choose. On a GPU the first start of a shape compiles and tries
settings (see `tuning`); what was found is kept beside the compiled code, so that later starts of
the same shape on the same card skip the search.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from agents.contract.layer_plan import SHARE_SLACK
from agents.contract.spec import RunSpec
from agents.errors import ExpectedError
from agents.state import read_json, write_json
from agents.trainer.checkpoint.state import ResumePoint
from agents.trainer.data.examples import Part, choose_examples
from agents.trainer.execution.activation_offload import Offloader
from agents.trainer.execution.cuda_graphs import CudaGraph, GraphReplayer
from agents.trainer.execution.executor import Executor
from agents.trainer.execution.layers import LayerStack
from agents.trainer.execution.setting import ExecutionSetting, apply, fill
from agents.trainer.execution.tuner import Tuner
from agents.trainer.kernels import compiling
from agents.trainer.model.micro_batch import CPU_TOKENS
from agents.trainer.objectives.reference_model import needs_reference
from agents.trainer.optim.optimizer_reserve import Reserve
from agents.trainer.rank.device import read_available_bytes
from agents.trainer.training_state import TrainingState

Warn = Callable[[str, str], None]
_ALL_LAYERS = 1 << 20
_SEARCH = 2
"""Counts up when settings that were kept before would not be found any more."""
_HOST_SHARE = 0.35
"""Of the available memory of the PC that the activations of its ranks may take."""


def make_layers(
    spec: RunSpec, prepared: TrainingState, warn: Warn, *, local_ranks: int
) -> LayerStack:
    """Return the decoder layers, compiled where this machine can."""
    device, model = prepared.device, prepared.model
    if device.type != "cuda":
        return LayerStack(model)
    reason = compiling.why_not(device)
    if reason and spec.compile == "auto":
        warn(f"The layers are not compiled, so training takes longer: {reason}.", "")
    fixed = [*model.module.parameters(), *model.module.buffers()]
    most_bytes = int(read_available_bytes() * _HOST_SHARE / local_ranks)
    offloader = Offloader(device, fixed, most_bytes)
    compiled = not reason and spec.compile == "auto"
    return LayerStack(model, compiled=compiled, offloader=offloader, warn=warn)


def make_replayer(
    spec: RunSpec, prepared: TrainingState, layers: LayerStack, reserve: Reserve, *, world_size: int
) -> GraphReplayer | None:
    """Return what replays micro-batches; None where it cannot be, or gains nothing.

    Gradients that travel while they are made, a scale of the loss that changes, and a table in host
    memory are no part of what a graph repeats.
    """
    travels = world_size > 1 or spec.compression != "none"
    changes = prepared.model.dtype == torch.float16 or needs_reference(spec)
    if not layers.compiled or travels or changes:
        return None
    record = partial(CudaGraph, spare_bytes=lambda: reserve.missing_bytes)
    return GraphReplayer(prepared.model.clock, record)


def fit(
    computer: Executor,
    spec: RunSpec,
    prepared: TrainingState,
    resumed: ResumePoint | None,
    *,
    rank: int,
    world_size: int,
    folder: Path,
) -> tuple[ExecutionSetting, list[ExecutionSetting]]:
    """Choose the setting, let the computer work with it, and return it and what was timed for it.

    Args:
        computer: of this rank.
        spec: of the run.
        prepared: what the rank has loaded.
        resumed: the state to go on from on the same devices, whose setting is taken over, so that
            the run goes on to the bit.
        rank: this one.
        world_size: number of ranks.
        folder: where settings are kept.

    Raises:
        ExpectedError: a single example does not fit.
    """
    device = prepared.device
    reserve = Reserve(spec.optimizer, prepared.flat, prepared.optimizer, device)
    computer.replayer = make_replayer(
        spec, prepared, computer.layers, reserve, world_size=world_size
    )
    tried: list[ExecutionSetting] = []
    with reserve.held():
        if resumed is not None:
            setting = _take_over(spec, resumed, rank)
        elif device.type != "cuda":
            setting = _choose_for_cpu(spec, prepared)
        else:
            name = name_setting(spec, prepared, computer.layers, place=f"{rank} of {world_size}")
            known = _recall(folder / f"{name}.json")
            if known is None:
                tuner = _make_tuner(computer, spec, prepared, reserve, world_size)
                known, tried = tuner.choose(), [*tuner.tried, *tuner.outlasting]
                computer.layers.compile_afresh()
                folder.mkdir(parents=True, exist_ok=True)
                write_json(folder / f"{name}.json", asdict(known))
            setting = known
        _apply_setting(computer, prepared, setting, reserve)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # of what was only tried, and held
    return setting, tried


def _apply_setting(
    computer: Executor, prepared: TrainingState, setting: ExecutionSetting, reserve: Reserve
) -> None:
    """Let the computer work with a setting, and with what weights there is room for unpacked."""
    apply(computer, setting)
    if prepared.device.type != "cuda":
        return
    _prove_longest(computer, prepared)
    largest = choose_examples(prepared.train, computer.micro_tokens)
    if not fill(computer, prepared.device, largest, reserve):
        computer.replayer = None  # it would take memory for each try


def _take_over(spec: RunSpec, resumed: ResumePoint, rank: int) -> ExecutionSetting:
    return ExecutionSetting(
        micro_tokens=resumed.micro_tokens[rank],
        num_recomputed=_forced(spec, resumed.num_recomputed[rank]),
        num_moved=resumed.num_moved[rank] if resumed.num_moved else 0,
    )


def _choose_for_cpu(spec: RunSpec, prepared: TrainingState) -> ExecutionSetting:
    longest_tokens = int(prepared.train.num_tokens.max())
    return ExecutionSetting(
        micro_tokens=max(longest_tokens, CPU_TOKENS), num_recomputed=_forced(spec, 0)
    )


def _make_tuner(
    computer: Executor, spec: RunSpec, prepared: TrainingState, reserve: Reserve, world_size: int
) -> Tuner:
    """Return a tuner of layers that are compiled, or were found not to be compilable."""
    train = prepared.train
    longest_tokens = int(train.num_tokens.max())
    apply(
        computer,
        ExecutionSetting(micro_tokens=longest_tokens, num_recomputed=_forced(spec, _ALL_LAYERS)),
    )
    _prove_longest(computer, prepared)
    batch_tokens = spec.batch_sequences * float(train.num_tokens.mean())
    most_tokens = batch_tokens if world_size == 1 else batch_tokens * SHARE_SLACK / world_size
    return Tuner(
        computer,
        prepared.device,
        lambda tokens: choose_examples(train, tokens),
        most_tokens=max(longest_tokens, int(most_tokens)),
        step_tokens=batch_tokens if world_size == 1 else None,
        recompute=spec.recompute,
        reserve=reserve,
    )


def _prove_longest(computer: Executor, prepared: TrainingState) -> None:
    longest = choose_examples(prepared.train, 0)
    prove(computer, longest, evaluates=prepared.evaluation is not None)


def name_setting(spec: RunSpec, prepared: TrainingState, layers: LayerStack, *, place: str) -> str:
    """Name all that the best setting depends on, and whose it is.

    Two ranks on cards alike may find different ones. Each gets its own back, so that a second run
    adds up as the first one did, to the bit.
    """
    train, device = prepared.train, prepared.device
    said: dict[str, Any] = {
        "search": _SEARCH,
        "card": torch.cuda.get_device_name(device),
        "bytes": torch.cuda.get_device_properties(device).total_memory,
        "memory_gib": spec.memory_gib,
        "versions": prepared.versions,
        "model": prepared.model.module.config.to_dict(),
        "adapter": asdict(spec.adapter),
        "objective": spec.objective,
        "precision": spec.precision,
        "optimizer": spec.optimizer,
        "recompute": spec.recompute,
        "longest": int(train.num_tokens.max()),
        "mean": round(float(train.num_tokens.mean()) / 64),
        "batch": spec.batch_sequences,
        "compiled": layers.compiled,
        "exact": spec.exact,
        "rank": place,
    }
    text = json.dumps(said, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:32]


def describe_setting(
    setting: ExecutionSetting, tried: list[ExecutionSetting], layers: LayerStack
) -> dict[str, Any]:
    """Return what the journal tells of a setting and of what was timed to find it."""
    return {
        "compiled": layers.compiled,
        "micro_tokens": setting.micro_tokens,
        "num_layers": layers.most_layers,
        "num_recomputed": layers.plan.num_recomputed,
        "num_moved": layers.plan.num_moved,
        "unpacked_bytes": layers.unpacked_bytes,
        "tried": [asdict(one) for one in tried],
    }


def prove(computer: Executor, part: Part, *, evaluates: bool) -> None:
    """Compile what the run will need; where that fails, go on without and say so.

    Raises:
        ExpectedError: a single example does not fit the memory.
    """
    if not computer.layers.compiled:
        return
    try:
        computer.add_gradients(part)
        if evaluates:  # a form of its own, which would make the first evaluation seem to hang
            computer.evaluate(part)
    except ExpectedError:
        raise
    except Exception as error:  # noqa: BLE001 - compilers fail in many ways
        computer.layers.stop_compiling(error)


def _forced(spec: RunSpec, otherwise: int) -> int:
    """Return how many layers the spec makes recompute."""
    return {"all": _ALL_LAYERS, "none": 0, "auto": otherwise}[spec.recompute]


def _recall(path: Path) -> ExecutionSetting | None:
    found = read_json(path)
    try:
        return ExecutionSetting(**found) if isinstance(found, dict) else None
    except TypeError:  # written by another version
        return None
