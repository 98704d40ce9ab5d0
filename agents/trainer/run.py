"""One rank from its intent to its last checkpoint; imports torch, so `__main__` imports it late."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from agents.contract.regroup import may_regroup
from agents.contract.run_layout import CHECKPOINTS, FENCE
from agents.contract.spec import RunSpec
from agents.contract.wire import to_wire
from agents.limits import count_cpus
from agents.trainer import autotune
from agents.trainer.checkpoint.folder import CheckpointFolder
from agents.trainer.checkpoint.saver import Saver
from agents.trainer.checkpoint.state import ResumePoint
from agents.trainer.data.examples import choose_examples
from agents.trainer.data.order import order_rows
from agents.trainer.data.preview import describe
from agents.trainer.execution.executor import Executor
from agents.trainer.execution.gpu_pressure import watch_gpu
from agents.trainer.execution.setting import ExecutionSetting
from agents.trainer.execution.warmup import measure_speed
from agents.trainer.kernels import compiling
from agents.trainer.loop import Loop, TrainingSchedule
from agents.trainer.metrics.flops import ModelFlops, read_flops
from agents.trainer.metrics.peaks import find_peak
from agents.trainer.metrics.step_metrics import Speeds
from agents.trainer.model.micro_batch import CPU_TOKENS
from agents.trainer.model.model import TrainedModel
from agents.trainer.parallel.registry import make_strategy
from agents.trainer.parallel.strategy import Strategy
from agents.trainer.prepare import prepare, refuse_unsupported
from agents.trainer.rank.attempt import RankAttempt
from agents.trainer.rank.context import RankContext
from agents.trainer.rank.device import (
    choose_backend,
    choose_device,
    explain_out_of_memory,
    limit_memory,
    on_own_stream,
)
from agents.trainer.rank.failpoints import failpoints_from_environment
from agents.trainer.rank.group import Group, Ranks
from agents.trainer.rank.heat_watch import watching_heat
from agents.trainer.rank.journal import Heartbeat, RankJournal
from agents.trainer.rank.start_progress import StartProgress
from agents.trainer.rank.start_times import StartTimes
from agents.trainer.rank.state_guard import StateGuard
from agents.trainer.rank.step_control import RankControl
from agents.trainer.resume_verifier import ResumeVerifier, choose_promise
from agents.trainer.start_report import report_start
from agents.trainer.streamed_store import warning_of_slow_disk
from agents.trainer.training_state import TrainingState

# Number of tokens to measure a CPU rank's speed, enough to keep it busy for a moment, and number of
# micro-batches for a GPU.
_CPU_WARMUP_TOKENS, _GPU_WARMUP_BATCHES = 256, 4


def run_rank(
    attempt: RankAttempt,
    journal: RankJournal,
    heartbeat: Heartbeat,
    control: RankControl,
    model_hash: Future[str] | None = None,
) -> None:
    """Train this rank's part of the attempt.

    Args:
        attempt: the attempt.
        journal: journal of this rank.
        heartbeat: heartbeat of this rank.
        control: control requests of this rank.
        model_hash: hash of the model's files, if they are being read already.

    Raises:
        ExpectedError: training is impossible on this rank or on another one.
    """
    spec = attempt.intent.spec
    ranks = Ranks.from_environment()
    # Before the group: this failure needs no other rank.
    refuse_unsupported(spec, ranks.world_size)
    device = choose_device(attempt.device)
    # Before any allocation there: under WSL2 the limit is the memory that is free now.
    limit_memory(device, spec.memory_gib)
    _fix_numerics(attempt, ranks, device)
    if spec.compile == "auto" and compiling.find_obstacle(device) is None:
        compiling.start_workers()
    group = Group(ranks, attempt.rank_names, heartbeat.waiting)
    backend = choose_backend(device, attempt.intent.parallel)
    group.join(backend, device, attempt.intent.credential)
    context = RankContext(
        attempt=attempt,
        group=group,
        device=device,
        journal=journal,
        heartbeat=heartbeat,
        control=control,
        progress=StartProgress(journal, heartbeat, group, StartTimes(attempt.compiled_folder)),
        guard=StateGuard(attempt.rank_names[attempt.rank]),
        model_hash=model_hash,
    )
    control.leaves_alone = may_regroup(attempt.intent)
    try:
        strategy = make_strategy(spec, context)
        state = prepare(context, strategy)
        with (
            watching_heat(attempt, journal, control),
            explain_out_of_memory(device),
            on_own_stream(device),
        ):
            _train(context, state, strategy)
    finally:
        group.leave()


def _fix_numerics(attempt: RankAttempt, ranks: Ranks, device: torch.device) -> None:
    """Fix everything that affects the last bits of numbers, and keep noise out of the log."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    cores = count_cpus() // max(1, ranks.local_world_size)
    named = os.environ.get("OMP_NUM_THREADS", "")  # by the supervisor or torchrun
    num_threads = max(1, attempt.intent.num_threads or (int(named) if named.isdigit() else cores))
    torch.set_num_threads(num_threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true" if num_threads > 1 else "false")
    if device.type == "cuda":
        # cuBLAS adds in one order only with a workspace of fixed size:
        # https://docs.nvidia.com/cuda/cublas/#results-reproducibility
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(attempt.intent.spec.exact, warn_only=True)
        # Filling every new tensor would cost time, and no code here reads one before writing it.
        torch.utils.deterministic.fill_uninitialized_memory = False
        compiling.fix_settings()


def _train(context: RankContext, state: TrainingState, strategy: Strategy) -> None:
    spec = context.attempt.intent.spec
    resumed = _resumed_on_same_devices(context.attempt, state)
    executor = _make_executor(context, state)
    choice = _tune(context, state, executor, strategy, resumed)
    reports = _exchange_readiness(context, state, executor, choice.setting, strategy.work_share)
    solo_tokens_per_s = tuple(report["tokens_per_s"] for report in reports)
    strategy.start(
        executor,
        state.train,
        shares=resumed.shares if resumed else None,
        tokens_per_s=solo_tokens_per_s,
    )
    if context.device.type == "cuda":
        # The peak so far includes rejected settings, the reserve, and a warm-up with larger
        # micro-batches than stages agree on.
        torch.cuda.reset_peak_memory_stats(context.device)
    step_s = forecast_step_s(
        spec.batch_sequences, state.train.num_tokens, strategy.shares, solo_tokens_per_s
    )
    # The supervisor judges silence by the time of a step.
    context.heartbeat.forecast_step(step_s)
    if context.attempt.rank == 0:
        tokenizer, plain_template = state.model.tokenizer, state.model.plain_template
        preview = describe(state.train, tokenizer, spec, plain_template=plain_template)
        context.journal.write("preview", **to_wire(preview))
    # Gradients of different scales cannot be summed.
    scales_loss = any(report["scales_loss"] for report in reports)
    schedule = _make_schedule(context, state, solo_tokens_per_s, scales_loss=scales_loss)
    report_start(context, state, schedule, strategy.shares)
    step, reason = schedule.first_step - 1, "stopped"
    with contextlib.closing(_make_saver(context, state, strategy)) as saver:
        verifier = _make_verifier(context, state, strategy)
        loop = Loop(context, state, schedule, executor, strategy, saver, verifier, choice)
        # A stop may come while ranks load. Only values that all ranks have exchanged may decide, or
        # some would wait in a collective for ranks that have left.
        if not any(report["stop"] for report in reports):
            step, reason = loop.run()
    context.journal.write(
        "finished", step=step, reason=reason, is_outside=context.control.is_outside
    )
    context.enter_phase("done", step)


def _make_executor(context: RankContext, state: TrainingState) -> Executor:
    def warn(message: str, hint: str) -> None:
        # About this GPU alone, which the event names: others may have more memory, or a compiler.
        context.journal.write("warning", message=message, hint=hint, of_rank=True)

    return Executor(
        state.model,
        state.parameters,
        state.objective,
        context.device,
        layers=autotune.make_layers(context, state, warn),
        micro_tokens=CPU_TOKENS,
        may_recompute=context.attempt.intent.spec.recompute != "none",
        warn=warn,
        beat=context.heartbeat.touch,
        pressure=watch_gpu(context.device),
    )


def _tune(
    context: RankContext,
    state: TrainingState,
    executor: Executor,
    strategy: Strategy,
    resumed: ResumePoint | None,
) -> autotune.SettingChoice:
    if context.device.type != "cuda":
        choice = autotune.choose_setting(context, state, executor, strategy.make_reserve(), resumed)
    else:
        times, started_s = context.progress.times, time.monotonic()
        name = autotune.name_setting(context, state, executor.layers)
        is_kept = resumed is not None or autotune.find_setting(context, name).exists()
        phase = "compiling" if is_kept else "tuning"
        names = (f"{phase} {name}", phase)  # otherwise the time of another shape
        context.enter_phase(phase, 0, times.recall(*names))
        choice = autotune.choose_setting(context, state, executor, strategy.make_reserve(), resumed)
        times.remember(time.monotonic() - started_s, *names)
    tried = choice.tried
    context.journal.write(
        "setting", **autotune.describe_setting(choice.setting, tried, executor.layers)
    )
    return choice


def _exchange_readiness(
    context: RankContext,
    state: TrainingState,
    executor: Executor,
    setting: ExecutionSetting,
    work_share: float,
) -> list[dict[str, Any]]:
    """Measure this rank's speed; return every rank's report before the first step.

    The speed is in whole tokens, even if a rank does only a part of each token's work.
    """
    times, started_s = context.progress.times, time.monotonic()
    context.enter_phase("warmup", 0, times.recall("warmup"))
    if context.device.type == "cpu":
        parts = [choose_examples(state.train, _CPU_WARMUP_TOKENS)]
    else:
        workload = autotune.make_workload(context, state)
        limit = _GPU_WARMUP_BATCHES * setting.micro_tokens
        parts = [workload.choose_step(number, limit) for number in range(2)]
    stream = state.model.stream
    with warning_of_slow_disk(context, stream.reader if stream is not None else None):
        tokens_per_s = measure_speed(executor, parts, context.device)
    report = {
        "tokens_per_s": tokens_per_s * work_share,
        "stop": context.control.stop_requested,
        "scales_loss": state.model.dtype == torch.float16,
    }
    times.remember(time.monotonic() - started_s, "warmup")
    return context.group.exchange("ready", report)


def forecast_step_s(
    batch_sequences: int,
    num_tokens: npt.NDArray[np.int32],
    shares: Sequence[float],
    tokens_per_s: Sequence[float],
) -> float:
    """Return the approximate time of a step, in seconds: the slowest rank delays all others.

    Args:
        batch_sequences: number of examples in a batch.
        num_tokens: tokens of each example (N,).
        shares: weight of each rank.
        tokens_per_s: speed of each rank alone.

    >>> forecast_step_s(10, np.array([100, 300], dtype=np.int32), (3.0, 1.0), (100.0, 10.0))
    50.0
    """
    batch_tokens = batch_sequences * float(num_tokens.mean())
    # A rank may get the longest example, even with a small share.
    longest = float(num_tokens.max())
    parts = [max(longest, share / sum(shares) * batch_tokens) for share in shares]
    return max(part / speed for part, speed in zip(parts, tokens_per_s, strict=True))


def _resumed_on_same_devices(attempt: RankAttempt, state: TrainingState) -> ResumePoint | None:
    """Return the saved position if the same devices continue in the same order, else None."""
    resumed = state.resumed
    devices = tuple((rank.node, rank.device_id) for rank in attempt.intent.ranks)
    return resumed if resumed and resumed.devices == devices else None


def _make_verifier(
    context: RankContext, state: TrainingState, strategy: Strategy
) -> ResumeVerifier | None:
    intent, resumed = context.attempt.intent, state.resumed
    if intent.replay is None or resumed is None:
        return None
    promise = choose_promise(
        intent.replay,
        intent.ranks,
        resumed.devices,
        same_versions=state.saved_by == state.versions,
        same_layers=resumed.layers == strategy.layers,
        at_loss=state.checkpoint is not None and state.checkpoint.manifest.at_loss,
    )
    return ResumeVerifier(intent.replay, promise, state.model.dtype, context.journal)


def _make_schedule(
    context: RankContext,
    state: TrainingState,
    solo_tokens_per_s: tuple[float, ...],
    *,
    scales_loss: bool,
) -> TrainingSchedule:
    spec: RunSpec = context.attempt.intent.spec
    return TrainingSchedule(
        first_step=state.resumed.step + 1 if state.resumed else 1,
        total_steps=order_rows(spec, state.train.parts).count_steps(spec),
        speeds=Speeds(
            flops=_read_flops(state.model),
            peak=find_peak(context.device, state.model.dtype),
            solo_tokens_per_s=solo_tokens_per_s,
        ),
        scales_loss=scales_loss,
    )


def _read_flops(model: TrainedModel) -> ModelFlops:
    """Return the FLOPs of the layers of this rank."""
    flops, stage = read_flops(model.module), model.stage
    return flops if stage is None else replace(flops, num_layers=stage.stop - stage.first)


def _make_saver(context: RankContext, state: TrainingState, strategy: Strategy) -> Saver:
    attempt = context.attempt
    folder = CheckpointFolder(
        attempt.run_folder / CHECKPOINTS,
        run_id=attempt.intent.run_id,
        attempt=attempt.intent.attempt,
        fence=attempt.run_folder / FENCE,
        failpoints=failpoints_from_environment(),
        node=attempt.intent.node,
        node_seed=attempt.intent.node_seed,
    )
    return Saver(
        context,
        strategy,
        folder,
        model=state.model,
        about={**state.hashes, "versions": state.versions},
        saved_step=state.resumed.step if state.resumed else -1,
    )
