"""Choose how this rank's device computes: compiled or not, batch size, and layer modes.

A CPU has no choices. On a GPU the first start of a shape compiles and tries settings (see `tuner`);
the result is kept with the compiled code, so that later starts of the same shape on the same card
skip the search.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from agents.contract.layer_plan import HOST_SHARE, SHARE_SLACK
from agents.contract.model_cut import Stage
from agents.contract.spec import RunSpec
from agents.errors import ExpectedError
from agents.limits import read_available_bytes
from agents.state import read_json, write_json
from agents.trainer.checkpoint.state import ResumePoint
from agents.trainer.data.examples import BatchPart, choose_examples
from agents.trainer.execution.activation_offload import Offloader
from agents.trainer.execution.cuda_graphs import CudaRecorder, GraphReplayer
from agents.trainer.execution.executor import Executor
from agents.trainer.execution.layers import LayerStack
from agents.trainer.execution.setting import ExecutionSetting, apply_setting, fill_spare_memory
from agents.trainer.execution.shapes import ShapeGrid
from agents.trainer.execution.tuner import Tuner
from agents.trainer.execution.workload import Workload, count_tokens
from agents.trainer.kernels import compiling
from agents.trainer.model.micro_batch import CPU_TOKENS
from agents.trainer.optim.optimizer_reserve import Reserve
from agents.trainer.parallel.batch import sample_steps
from agents.trainer.rank.context import RankContext
from agents.trainer.streaming.layer_stream import LayerStream
from agents.trainer.training_state import TrainingState

Warn = Callable[[str, str], None]
# More layers than any model has; the stack limits it to its own number.
_ALL_LAYERS = 1 << 20
# Increased when the search changes so that settings of earlier versions are outdated.
_SEARCH_VERSION = 6
# Tokens of a stage's micro-batches: enough to fill a home card, few enough to have many.
_STAGE_TOKENS = 2048
# Maximum number of shapes that are recorded before they occur.
_MAX_SHAPES = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingChoice:
    """Chosen setting of a rank, and the functions to correct it."""

    setting: ExecutionSetting
    tried: list[ExecutionSetting]
    """Settings that were timed for it, with their speeds; empty if it was known."""
    keep: Callable[[ExecutionSetting], None] = lambda setting: None
    """Stores a better setting for the next start of the same shape."""
    change: Callable[[ExecutionSetting], ExecutionSetting] = lambda setting: setting
    """Applies another setting to the executor; returns the setting in use."""
    record: Callable[[], None] = lambda: None
    """Records the usual shapes of micro-batches."""


def make_layers(context: RankContext, state: TrainingState, warn: Warn) -> LayerStack:
    """Return the decoder layers, compiled if this machine can."""
    device, model, spec = context.device, state.model, context.attempt.intent.spec
    make_offloader = partial(_make_offloader, context, state)
    offloader = make_offloader() if _offloads(context, state) else None
    if device.type != "cuda":
        return LayerStack(model, offloader=offloader)
    reason = compiling.find_obstacle(device)
    if reason and spec.compile == "auto":
        warn(f"The layers are not compiled, so training takes longer: {reason}.", "")
    return LayerStack(
        model,
        compiled=not reason and spec.compile == "auto",
        offloader=offloader,
        make_offloader=make_offloader,
        warn=warn,
    )


def _offloads(context: RankContext, state: TrainingState) -> bool:
    """Return whether layers offload from the start.

    On a GPU the search decides what is offloaded. In a pipeline stage the plan decides, or a
    shortage of memory.
    """
    if state.model.stage is None:
        return context.device.type == "cuda"
    planned = _find_stage(context)
    return planned is not None and planned.offloads


def _make_offloader(context: RankContext, state: TrainingState) -> Offloader:
    device, model = context.device, state.model
    fixed = [*model.module.parameters(), *model.module.buffers()]
    host_bytes = int(read_available_bytes() * HOST_SHARE / context.attempt.num_local_ranks)
    return Offloader(device, fixed, host_bytes, holds_several=model.stage is not None)


def _find_stage(context: RankContext) -> Stage | None:
    """Return the stage that the plan gave this rank; None if no plan divided the layers."""
    cut = context.attempt.intent.cut
    return cut.stages[context.attempt.rank] if cut is not None and cut.stages else None


def make_replayer(
    state: TrainingState, layers: LayerStack, device: torch.device
) -> GraphReplayer | None:
    """Return a replayer of micro-batches; None if passes cannot be recorded.

    All segments must pass through the model at once. A stage has several micro-batches in its
    memory at once, but a recording only one.
    """
    is_stage = state.model.stage is not None
    # Kernels are recorded with their launch parameters. Uncompiled layers would wait for the
    # device.
    if device.type != "cuda" or is_stage or not layers.compiled or not state.is_flat:
        return None
    if layers.stream is not None:
        # Replays would need the copies at fixed host addresses. Streaming needs micro-batches so
        # large that launching their kernels costs nothing.
        return None
    return GraphReplayer(state.model.clock, CudaRecorder(device))


def choose_setting(
    context: RankContext,
    state: TrainingState,
    executor: Executor,
    reserve: Reserve,
    resumed: ResumePoint | None,
) -> SettingChoice:
    """Choose the setting and apply it.

    Args:
        context: context of this rank.
        state: loaded state of this rank.
        executor: executor that gets the setting.
        reserve: memory of the optimizer, held during the search.
        resumed: state of a resume on the same devices, whose setting is kept so that the run stays
            bit-equal.

    Raises:
        ExpectedError: a single example does not fit.
    """
    device, spec = context.device, context.attempt.intent.spec
    if (replayer := make_replayer(state, executor.layers, device)) is not None:
        executor.replayer = replayer
        executor.grid = ShapeGrid(state.train, spec.sequence_tokens)
    apply = partial(_apply_checked, context, state, executor, reserve=reserve)
    with reserve.held():
        if resumed is not None:
            choice = SettingChoice(
                setting=_keep_setting(spec, resumed, context.attempt.rank), tried=[]
            )
        elif state.model.stage is not None:
            choice = SettingChoice(setting=_choose_for_stage(context, state), tried=[])
        elif device.type != "cuda":
            choice = SettingChoice(setting=_choose_for_cpu(spec, state), tried=[])
        else:
            choice = _search_or_recall(context, state, executor, reserve)

        def record() -> None:
            record_shapes(executor, make_workload(context, state))

        def change(setting: ExecutionSetting) -> ExecutionSetting:
            used = apply(setting)
            record()
            return used

        setting = apply(choice.setting)
        choice = replace(choice, setting=setting, change=change, record=record)
    return choice


def _search_or_recall(
    context: RankContext, state: TrainingState, executor: Executor, reserve: Reserve
) -> SettingChoice:
    """Return the setting of an earlier start, else search for one and store it."""
    path = find_setting(context, name_setting(context, state, executor.layers))
    keep = partial(_remember, path)
    known = _recall(path)
    if known is not None:
        return SettingChoice(setting=known, tried=[], keep=keep)
    tuner = _make_tuner(context, state, executor, reserve)
    found = tuner.choose()
    keep(found)
    _log(f"{len(tuner.tried)} settings tried")
    return SettingChoice(setting=found, tried=[*tuner.tried, *tuner.finalists], keep=keep)


def _remember(path: Path, setting: ExecutionSetting) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(setting))


def find_setting(context: RankContext, name: str) -> Path:
    """Return the file of a stored setting, which exists after a search."""
    return context.attempt.compiled_folder / "settings" / f"{name}.json"


def _apply_checked(
    context: RankContext,
    state: TrainingState,
    executor: Executor,
    setting: ExecutionSetting,
    *,
    reserve: Reserve,
) -> ExecutionSetting:
    """Apply a setting to the executor, and keep as many weights unpacked as memory allows.

    Returns:
        The setting in use: without replays if passes cannot be recorded.
    """
    # The compiled code depends on the first sizes that the compiler sees. So they are always those
    # of the longest example, both in a search and in a resume without one.
    apply_setting(executor, replace(setting, is_repeating=False))
    if context.device.type != "cuda":
        return setting
    _prove_longest(executor, state)
    replayer = executor.replayer if executor.layers.compiled else None
    executor.replayer = replayer
    apply_setting(executor, setting)
    largest = choose_examples(state.train, executor.micro_tokens)
    if setting.is_repeating:
        for _ in range(2):  # the first pass launches the kernels, the second records them
            executor.try_gradients(largest)
        if replayer is None or not replayer.num_graphs:
            setting = replace(setting, is_repeating=False)
            apply_setting(executor, setting)
    if state.model.stage is None:
        fill_spare_memory(executor, context.device, largest, reserve)
    if replayer is not None and replayer.failure is not None:
        context.journal.write(
            "warning",
            message=f"Passes of this model cannot be recorded ({replayer.failure}), so the host "
            "launches each kernel on its own, which is slower on fast cards and with small models.",
            hint="",
            of_rank=True,
        )
    _log("the setting is ready")
    return setting


def record_shapes(executor: Executor, workload: Workload) -> None:
    """Record the usual shapes of micro-batches, if the executor replays them.

    A shape is otherwise launched at its first occurrence, and recorded at its second. Weights in
    spare memory are dropped if they leave too little memory for all shapes.
    """
    if not executor.is_repeating or executor.grid is None:
        return
    usual = workload.choose_usual(executor.grid, executor.micro_tokens, _MAX_SHAPES)
    while True:
        for part in usual:
            for _ in range(2):  # the first pass launches the kernels, the second records them
                executor.try_gradients(part)
        if not executor.make_room_for_graphs():
            return


def _log(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def _keep_setting(spec: RunSpec, resumed: ResumePoint, rank: int) -> ExecutionSetting:
    return ExecutionSetting(
        micro_tokens=resumed.micro_tokens[rank],
        num_recomputed=_apply_recompute(spec, resumed.num_recomputed[rank]),
        num_moved=resumed.num_moved[rank] if resumed.num_moved else 0,
        is_repeating=bool(resumed.is_repeating[rank]) if resumed.is_repeating else False,
    )


def _choose_for_cpu(spec: RunSpec, state: TrainingState) -> ExecutionSetting:
    longest_tokens = int(state.train.num_tokens.max())
    return ExecutionSetting(
        micro_tokens=max(longest_tokens, CPU_TOKENS), num_recomputed=_apply_recompute(spec, 0)
    )


def _choose_for_stage(context: RankContext, state: TrainingState) -> ExecutionSetting:
    """Return the setting of a stage.

    A stage holds several micro-batches, so on a GPU its layers recompute unless a plan has memory
    for more.
    """
    is_gpu, planned = context.device.type == "cuda", _find_stage(context)
    num_recomputed = planned.num_recomputed if planned is not None else None
    if num_recomputed is None:
        num_recomputed = _ALL_LAYERS if is_gpu else 0
    longest_tokens = int(state.train.num_tokens.max())
    return ExecutionSetting(
        micro_tokens=max(longest_tokens, _STAGE_TOKENS if is_gpu else CPU_TOKENS),
        num_recomputed=_apply_recompute(context.attempt.intent.spec, num_recomputed),
    )


def _make_tuner(
    context: RankContext, state: TrainingState, executor: Executor, reserve: Reserve
) -> Tuner:
    """Return a tuner of layers that are compiled, or were found not to be compilable.

    A layer that keeps its activations and one that recomputes are two functions to compile. If all
    layers can keep those of the longest example, the search decides whether to compile the other
    one.
    """
    spec, train, world_size = context.attempt.intent.spec, state.train, context.group.world_size
    longest_tokens = int(train.num_tokens.max())
    is_kept = spec.recompute == "auto" and try_kept(executor, choose_examples(train, 0))
    # Otherwise the setting with the least memory shows whether layers compile.
    num_recomputed = _apply_recompute(spec, 0 if is_kept else _ALL_LAYERS)
    apply_setting(
        executor, ExecutionSetting(micro_tokens=longest_tokens, num_recomputed=num_recomputed)
    )
    _prove_longest(executor, state)
    _log("layers compiled")
    workload = make_workload(context, state)
    max_tokens = longest_tokens
    if state.is_flat:  # otherwise rows pass one at a time, so larger micro-batches gain nothing
        # Shares follow the speeds, so a rank may get more than an equal part.
        share = 1 if world_size == 1 else SHARE_SLACK
        max_tokens = max(longest_tokens, int(workload.mean_tokens * share))
    return Tuner(
        executor,
        context.device,
        workload,
        max_tokens=max_tokens,
        recompute=spec.recompute,
        reserve=reserve,
        is_kept=is_kept,
        report=partial(context.progress.report, "tuning"),
        log=_log,
    )


def make_workload(context: RankContext, state: TrainingState) -> Workload:
    """Return the part of the run that falls to this rank while shares are equal."""
    world_size = context.group.world_size
    steps = sample_steps(
        context.attempt.intent.spec,
        state.train,
        first_step=state.resumed.step + 1 if state.resumed else 1,
        rank=context.attempt.rank,
        world_size=world_size,
    )
    return Workload(state.train, steps, sends=world_size > 1)


def _prove_longest(executor: Executor, state: TrainingState) -> None:
    longest = choose_examples(state.train, 0)
    prove(executor, longest, evaluates=state.evaluation is not None)


def name_setting(context: RankContext, state: TrainingState, layers: LayerStack) -> str:
    """Return a name that hashes everything that affects the best setting, and the rank."""
    spec, train, device = context.attempt.intent.spec, state.train, context.device
    parts: dict[str, Any] = {
        "search": _SEARCH_VERSION,
        "card": torch.cuda.get_device_name(device),
        "bytes": torch.cuda.get_device_properties(device).total_memory,
        "memory_gib": spec.memory_gib,
        "versions": state.versions,
        "model": state.model.module.config.to_dict(),
        "adapter": asdict(spec.adapter),
        "objective": spec.objective,
        "precision": spec.precision,
        "optimizer": spec.optimizer,
        "recompute": spec.recompute,
        "longest": int(train.num_tokens.max()),
        "mean": round(float(train.num_tokens.mean()) / 64),
        "batch": spec.batch_sequences,
        "compiled": layers.compiled,
        "streamed": describe_stream(layers.stream),
        "exact": spec.exact,
        # Two ranks on equal cards may find different settings. Each gets its own back, so that a
        # second run is bit-equal to the first.
        "rank": f"{context.attempt.rank} of {context.group.world_size}",
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:32]


def describe_setting(
    setting: ExecutionSetting, tried: list[ExecutionSetting], layers: LayerStack
) -> dict[str, Any]:
    """Return the journal's fields for a setting and for those that were timed to find it."""
    return {
        "compiled": layers.compiled,
        "micro_tokens": setting.micro_tokens,
        "is_repeating": setting.is_repeating,
        "tokens_per_s": setting.tokens_per_s or None,
        "num_layers": layers.num_layers,
        "num_recomputed": layers.plan.num_recomputed,
        "num_moved": layers.plan.num_moved,
        "offloads_inputs": layers.offloader is not None and layers.plan.num_recomputed > 0,
        "unpacked_bytes": layers.dequantized_bytes,
        **describe_stream(layers.stream),
        "tried": [asdict(other) for other in tried],
    }


def describe_stream(stream: LayerStream | None) -> dict[str, Any]:
    """Return the journal's fields for streamed layers; empty without a stream."""
    if stream is None:
        return {}
    return {
        "num_streamed": stream.num_layers - stream.num_resident,
        "num_from_disk": stream.num_from_disk,
        "num_slots": stream.num_slots,
        "streamed_bytes": stream.streamed_bytes,
        "resident_bytes": stream.resident_bytes + stream.slot_bytes,
    }


def prove(executor: Executor, part: BatchPart, *, evaluates: bool) -> None:
    """Compile the code that the run will need; on failure, warn and train without.

    Raises:
        ExpectedError: a single example does not fit into memory.
    """
    if not executor.layers.compiled:
        return
    try:
        executor.add_gradients(part)
        # A separate function: compiled later, it would make the first evaluation seem to hang.
        if evaluates:
            executor.evaluate(part)
    except ExpectedError:
        raise
    except Exception as error:  # noqa: BLE001 - compilers fail in many ways
        executor.layers.stop_compiling(error)


def try_kept(executor: Executor, part: BatchPart) -> bool:
    """Return whether compiled layers can keep all activations of a part; compiles such layers."""
    if not executor.layers.compiled:
        return False
    tokens = count_tokens(part)
    apply_setting(executor, ExecutionSetting(micro_tokens=tokens))
    try:
        fits = executor.try_gradients(part)
    except ExpectedError:
        raise
    except Exception as error:  # noqa: BLE001 - compilers fail in many ways
        executor.layers.stop_compiling(error)
        return False
    return fits and executor.layers.compiled


def _apply_recompute(spec: RunSpec, otherwise: int) -> int:
    """Return the number of recomputing layers: as the spec prescribes, or `otherwise`."""
    return {"all": _ALL_LAYERS, "none": 0, "auto": otherwise}[spec.recompute]


def _recall(path: Path) -> ExecutionSetting | None:
    found = read_json(path)
    try:
        return ExecutionSetting(**found) if isinstance(found, dict) else None
    except TypeError:  # another version wrote other fields
        return None
