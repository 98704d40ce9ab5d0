"""One rank from its intent to its last checkpoint; imports torch, so `__main__` imports it late."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from agents.contract.run_layout import CHECKPOINTS, FENCE
from agents.contract.spec import RunSpec
from agents.contract.wire import to_wire
from agents.trainer.autotune import describe_setting, fit, make_layers
from agents.trainer.checkpoint.folder import CheckpointFolder
from agents.trainer.checkpoint.saver import Saver
from agents.trainer.checkpoint.state import ResumePoint
from agents.trainer.data.examples import choose_examples
from agents.trainer.data.order import count_steps
from agents.trainer.data.preview import describe
from agents.trainer.data.store import ExampleSet
from agents.trainer.execution.executor import Executor
from agents.trainer.execution.gpu_pressure import watch
from agents.trainer.execution.warmup import measure_speed
from agents.trainer.kernels import compiling
from agents.trainer.loop import Loop, TrainingSchedule
from agents.trainer.metrics.flops import read_flops
from agents.trainer.metrics.peaks import find_peak
from agents.trainer.metrics.profiler import TraceRecorder
from agents.trainer.metrics.step_metrics import Speeds
from agents.trainer.model.micro_batch import CPU_TOKENS
from agents.trainer.parallel.balance import choose_first_shares
from agents.trainer.prepare import prepare, refuse_unsupported
from agents.trainer.rank.attempt import RankAttempt
from agents.trainer.rank.device import choose_device, explain_out_of_memory, limit_memory
from agents.trainer.rank.failpoints import failpoints_from_environment
from agents.trainer.rank.group import Group, Ranks
from agents.trainer.rank.journal import Heartbeat, RankJournal
from agents.trainer.rank.load_progress import LoadProgress
from agents.trainer.rank.step_control import RankControl
from agents.trainer.resume_verifier import ResumeVerifier, choose_promise
from agents.trainer.training_state import TrainingState

_CPU_WARMUP_TOKENS = 256
_GPU_WARMUP_TOKENS = 4096
"""Enough to be busy with for a moment."""


def run_rank(
    attempt: RankAttempt, journal: RankJournal, heartbeat: Heartbeat, wishes: RankControl
) -> None:
    """Train this rank's part of the attempt.

    Raises:
        ExpectedError: it cannot be trained, on this rank or on another one.
    """
    ranks = Ranks.from_environment()
    refuse_unsupported(attempt.intent.spec, ranks.world_size)
    device = choose_device(attempt.placement.device)
    limit_memory(device, attempt.intent.spec.memory_gib)
    _fix_numerics(attempt, ranks, device)
    group = Group(ranks, attempt.rank_names)
    group.join(choose_backend(device), device)
    try:
        prepared = prepare(attempt, group, device, LoadProgress(journal, heartbeat, group))
        with explain_out_of_memory(device):
            _train(attempt, prepared, group, journal, heartbeat, wishes)
    finally:
        group.leave()


def choose_backend(device: torch.device) -> str:
    """Return what carries the collectives; the master names it where ranks share one GPU."""
    named = os.environ.get("RACKLESS_BACKEND", "")
    return named or ("nccl" if device.type == "cuda" else "gloo")


def _fix_numerics(attempt: RankAttempt, ranks: Ranks, device: torch.device) -> None:
    """Fix what the last bits of the numbers depend on, and keep the log free of noise."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    cores = len(os.sched_getaffinity(0)) // max(1, ranks.local_world_size)
    named = os.environ.get("OMP_NUM_THREADS", "")  # by the supervisor or torchrun
    num_threads = max(1, attempt.intent.num_threads or (int(named) if named.isdigit() else cores))
    torch.set_num_threads(num_threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true" if num_threads > 1 else "false")
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(attempt.intent.spec.exact, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        compiling.fix_settings()


def _train(
    attempt: RankAttempt,
    prepared: TrainingState,
    group: Group,
    journal: RankJournal,
    heartbeat: Heartbeat,
    wishes: RankControl,
) -> None:
    resumed = _resumed_alike(attempt, prepared)

    def warn(message: str, hint: str) -> None:
        journal.write("warning", message=message, hint=hint)

    spec = attempt.intent.spec
    layers = make_layers(spec, prepared, warn, local_ranks=attempt.num_local_ranks)
    computer = Executor(
        prepared.model,
        prepared.flat,
        prepared.objective,
        prepared.device,
        layers=layers,
        micro_tokens=CPU_TOKENS,
        may_recompute=spec.recompute != "none",
        warn=warn,
        beat=heartbeat.touch,
        neighbours=watch(prepared.device),
    )
    shares = spec.shares or (resumed.shares if resumed else None)
    if prepared.device.type == "cuda":
        journal.write("phase", phase="tuning")
        heartbeat.beat(0, "tuning")
    setting, tried = fit(
        computer,
        spec,
        prepared,
        resumed,
        rank=attempt.rank,
        world_size=group.world_size,
        folder=attempt.compiled_folder / "settings",
    )
    journal.write("setting", **describe_setting(setting, tried, layers))
    journal.write("phase", phase="warmup")
    heartbeat.beat(0, "warmup")
    warmup_tokens = max(setting.micro_tokens, _GPU_WARMUP_TOKENS)
    if prepared.device.type == "cpu":
        warmup_tokens = _CPU_WARMUP_TOKENS
    part = choose_examples(prepared.train, warmup_tokens)
    speed = measure_speed(computer, part, prepared.device)
    told = {
        "tokens_per_s": speed,
        "stop": wishes.stop_wanted,
        "scales_loss": prepared.model.dtype == torch.float16,
    }
    reports = group.exchange("ready", told)
    solo = tuple(report["tokens_per_s"] for report in reports)
    shares = shares or choose_first_shares(solo)
    speeds = Speeds(
        flops=read_flops(prepared.model.module),
        peak=find_peak(prepared.device, prepared.model.dtype),
        solo_tokens_per_s=solo,
    )
    scales_loss = any(report["scales_loss"] for report in reports)
    plan = _make_plan(spec, prepared, shares, speeds, scales_loss=scales_loss)
    heartbeat.foresee(foresee_step_s(spec.batch_sequences, prepared.train.num_tokens, shares, solo))
    if attempt.rank == 0:
        spec, model = attempt.intent.spec, prepared.model
        shown = describe(prepared.train, model.tokenizer, spec, plain_template=model.plain_template)
        journal.write("preview", **to_wire(shown))
    _tell_start(journal, attempt, plan, prepared)
    saver = _make_saver(attempt, prepared, group, journal)
    loop = Loop(
        attempt,
        prepared,
        plan,
        group=group,
        computer=computer,
        saver=saver,
        recorder=TraceRecorder(attempt.folder, attempt.rank, prepared.device, journal),
        certifier=_make_certifier(attempt, prepared, journal),
        journal=journal,
        heartbeat=heartbeat,
        wishes=wishes,
    )
    step, reason = plan.first_step - 1, "stopped"
    if not any(report["stop"] for report in reports):
        with contextlib.closing(saver):
            step, reason = loop.run()
    journal.write("finished", step=step, reason=reason)
    heartbeat.beat(step, "done")
    journal.write("phase", phase="done")


def foresee_step_s(
    batch_sequences: int,
    num_tokens: npt.NDArray[np.int32],
    shares: Sequence[float],
    tokens_per_s: Sequence[float],
) -> float:
    """Return about how long a step takes: that of the slowest rank, for which all others wait.

    Args:
        num_tokens: of each example (N,).
        shares: of each rank.
        tokens_per_s: of each rank by itself.

    >>> foresee_step_s(10, np.array([100, 300], dtype=np.int32), (3.0, 1.0), (100.0, 10.0))
    50.0
    """
    batch_tokens = batch_sequences * float(num_tokens.mean())
    longest = float(num_tokens.max())  # that a rank may have to do, however small its share is
    parts = [max(longest, share / sum(shares) * batch_tokens) for share in shares]
    return max(part / speed for part, speed in zip(parts, tokens_per_s, strict=True))


def _make_certifier(
    attempt: RankAttempt, prepared: TrainingState, journal: RankJournal
) -> ResumeVerifier | None:
    intent, resumed = attempt.intent, prepared.resumed
    if intent.replay is None or resumed is None:
        return None
    promise = choose_promise(
        intent.replay,
        intent.ranks,
        resumed.devices,
        same_versions=prepared.saved_by == prepared.versions,
    )
    return ResumeVerifier(intent.replay, promise, prepared.model.dtype, journal)


def _resumed_alike(attempt: RankAttempt, prepared: TrainingState) -> ResumePoint | None:
    """Return the state of the checkpoint when the same devices go on in the same order."""
    resumed = prepared.resumed
    devices = tuple((rank.node, rank.device_id) for rank in attempt.intent.ranks)
    return resumed if resumed and resumed.devices == devices else None


def _make_plan(
    spec: RunSpec,
    prepared: TrainingState,
    shares: tuple[float, ...],
    speeds: Speeds,
    *,
    scales_loss: bool,
) -> TrainingSchedule:
    return TrainingSchedule(
        first_step=prepared.resumed.step + 1 if prepared.resumed else 1,
        total_steps=count_steps(
            epochs=spec.epochs,
            num_rows=len(prepared.train),
            batch=spec.batch_sequences,
            max_steps=spec.max_steps,
        ),
        shares=shares,
        speeds=speeds,
        scales_loss=scales_loss,
    )


def _make_saver(
    attempt: RankAttempt, prepared: TrainingState, group: Group, journal: RankJournal
) -> Saver:
    folder = CheckpointFolder(
        attempt.run_folder / CHECKPOINTS,
        run_id=attempt.intent.run_id,
        attempt=attempt.intent.attempt,
        fence=attempt.run_folder / FENCE,
        failpoints=failpoints_from_environment(),
    )
    return Saver(attempt, prepared, group=group, folder=folder, journal=journal)


def _warn_of_data(
    journal: RankJournal, attempt: RankAttempt, prepared: TrainingState, world_size: int
) -> None:
    """Say that there are few examples for the ranks or a batch, and what evaluation leaves out."""
    count, size = len(prepared.train), attempt.intent.spec.batch_sequences
    noun = "pack" if attempt.intent.spec.packing else "row"
    of_rows = " of rows" if noun == "pack" else ""
    if world_size <= count < size:
        rows = f"only {noun}{of_rows}" if count == 1 else f"{count} {noun}s{of_rows}"
        journal.write(
            "warning",
            message=f"A batch of {size} sequences takes the {rows} of the data more than once.",
            hint=f"Set batch_sequences to {count} or less, or go on: epochs then count for more",
        )
    if count < world_size:
        what = f"is 1 {noun}{of_rows}" if count == 1 else f"are {count} {noun}s{of_rows}"
        journal.write(
            "warning",
            message=f"There {what} for {world_size} ranks.",
            hint="Rows come again in every epoch; with so few, one GPU is as fast",
        )
    evaluation, path = prepared.evaluation, attempt.intent.eval_path
    if evaluation is not None and path:
        _warn_of_rows(journal, evaluation, Path(path).name)


def _warn_of_rows(journal: RankJournal, evaluation: ExampleSet, name: str) -> None:
    left_out = (evaluation.num_skipped, "left out", evaluation.skipped)
    cut = (evaluation.num_truncated, "cut", evaluation.truncated)
    hints = (
        "Correct data.eval, or go on without them",
        "Raise sequence_tokens, or go on with their beginnings",
    )
    for (count, done, named), hint in zip((left_out, cut), hints, strict=True):
        if count:
            journal.write(
                "warning",
                message=f"Of {evaluation.num_rows} rows of {name} {count} "
                f"{'is' if count == 1 else 'are'} {done} "
                f"(the first, row {named[0].row}: {named[0].in_words}).",
                hint=hint,
            )


def _tell_start(
    journal: RankJournal, attempt: RankAttempt, plan: TrainingSchedule, prepared: TrainingState
) -> None:
    train = prepared.train
    _warn_of_data(journal, attempt, prepared, len(plan.shares))
    journal.write(
        "started",
        step=plan.first_step - 1,
        total_steps=plan.total_steps,
        shares=list(plan.shares),
        solo_tokens_per_s=plan.speeds.solo_tokens_per_s,
        peak_flops_per_s=plan.speeds.peak.flops_per_s if plan.speeds.peak else None,
        peak_measured=plan.speeds.peak.measured if plan.speeds.peak else None,
        world_size=len(plan.shares),
        data=Path(attempt.intent.train_path).name,
        num_rows=train.num_rows - train.num_skipped,
        num_examples=len(train),
        num_tokens=int(train.num_tokens.sum()),
        skipped=[{"row": item.row, "reason": item.in_words} for item in train.skipped],
        num_skipped=train.num_skipped,
        num_malformed=train.num_malformed,
        format=train.format,
        truncated=train.num_truncated,
        versions=prepared.versions,
    )
