"""The training loop: one global batch after the other, the same on every rank.

Each step: every rank adds the gradients of the SUM of the losses over its part of the batch; they
are summed over the ranks (see `Strategy`), and a small all-reduce sums the statistics; then all
divide by the weight of the whole batch (its tokens that count, or its pairs), clip, and take the
same optimizer step. So the gradient is the batch's mean for any cut of the batch (1e-15 from one
process, in float64).

The statistics also carry what the ranks have to agree on: control requests (see `step_control`),
whether a checkpoint is due by the clock of rank 0, and the size of each rank's micro-batches. They
are the only thing that a GPU's host waits for, once per step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TypeVar

from torch import Tensor

from agents.errors import ExpectedError
from agents.trainer.autotune import SettingChoice, describe_setting
from agents.trainer.checkpoint.loss_saver import LossSaver
from agents.trainer.checkpoint.saver import Saver
from agents.trainer.checkpoint.state import ResumePoint
from agents.trainer.data.order import epoch_at, order_rows
from agents.trainer.evaluation import Evaluation, evaluate, is_due
from agents.trainer.execution.executor import Executor
from agents.trainer.execution.setting import read_setting
from agents.trainer.execution.speed_watch import SettingCorrection, SpeedWatch
from agents.trainer.metrics.profiler import TraceRecorder
from agents.trainer.metrics.step_metrics import Speeds, StepWork, describe_speed
from agents.trainer.metrics.step_statistics import Stats, StatsLayout
from agents.trainer.metrics.stopwatch import StepTimes, Stopwatch
from agents.trainer.optim.loss_scale import LossScale, begin_scaling
from agents.trainer.optim.schedule import learning_rate_at
from agents.trainer.parallel.batch import Batch
from agents.trainer.parallel.strategy import Strategy
from agents.trainer.rank.context import RankContext
from agents.trainer.rank.group import PeerLost
from agents.trainer.rank.step_control import SLOTS, StepControl
from agents.trainer.regrouping import RankRegrouping
from agents.trainer.resume_verifier import ResumeVerifier
from agents.trainer.step_result import StepResult, read_result
from agents.trainer.streaming.disk_reader import DamagedLayer
from agents.trainer.training_state import TrainingState

# Sums after those of the objective.
_SUMS = (*SLOTS, "weight", "due", "uncommitted")
# The last two are those of the step before: a GPU knows its times only after a step.
_SETTING = ("micro_tokens", "num_recomputed", "num_moved", "is_repeating")
_PER_RANK = (*_SETTING, "compute_s", "compute_tokens")
COOLING_PAUSE_S = 1.0
"""Time between two exchanges of the ranks about hot GPUs, in seconds."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSchedule:
    """Settings that are fixed for the whole attempt."""

    first_step: int
    total_steps: int
    speeds: Speeds
    scales_loss: bool = False
    """True if some rank computes in fp16, so that all scale; see `loss_scale`."""


class Loop:
    """Runs the steps of one attempt on one rank."""

    def __init__(
        self,
        context: RankContext,
        state: TrainingState,
        schedule: TrainingSchedule,
        executor: Executor,
        strategy: Strategy,
        saver: Saver,
        verifier: ResumeVerifier | None,
        choice: SettingChoice,
    ) -> None:
        attempt, resumed = context.attempt, state.resumed
        self._context = context
        self._spec = attempt.intent.spec
        self._state = state
        self._schedule = schedule
        self._executor = executor
        self._strategy = strategy
        self._saver = saver
        self._regrouping = RankRegrouping(context, strategy)
        self._loss_saver = LossSaver(context, saver, may_regroup=self._regrouping.is_allowed)
        self._verifier = verifier
        self._choice = choice
        self._watch = SpeedWatch(choice.setting, choice.tried)
        # Setting of the next step if this one saves while settings are compared.
        self._settled: SettingCorrection | None = None
        self._recorder = TraceRecorder(
            attempt.folder, attempt.rank, context.device, context.journal
        )
        self._scales = schedule.scales_loss
        saved = resumed.loss_scale if resumed else LossScale()
        self._scale = begin_scaling(saved) if self._scales else saved
        # Also with several GPUs: work queued behind an aborted sum still runs, and would spoil the
        # state that a rank saves when another one is lost.
        is_shared = context.group.world_size > 1 and context.device.type == "cuda"
        self._waits_early = self._scales or is_shared
        self._layout = self._make_layout()
        self._last_step = schedule.first_step - 1
        self._epoch_rows = order_rows(self._spec, state.train.parts).num_rows
        # True once the optimizer has stepped in this attempt.
        self._has_stepped = False
        self._tokens_seen = resumed.tokens_seen if resumed else 0
        # Times and tokens of this rank in the latest step.
        self._times: StepTimes | None = None
        self._num_tokens = 0
        # Tokens and seconds of all ranks in the step before, by name.
        self._pace = dict.fromkeys(
            ("compute_s", "compute_tokens"), (0.0,) * len(schedule.speeds.solo_tokens_per_s)
        )

    def run(self) -> tuple[int, str]:
        """Train to the end or to a request to stop.

        Returns:
            The last finished step, and `completed` or `stopped`.

        Raises:
            ExpectedError: memory ran out, training diverged, or a checkpoint cannot be written.
            PeerLost: another rank is gone; this one has saved its last completed step.
            DamagedLayer: a streamed layer cannot be read; this rank has saved as well.
        """
        self._loss_saver.watch()
        try:
            return self._run()
        except (PeerLost, DamagedLayer):
            self._loss_saver.save()
            raise
        finally:
            self._loss_saver.close()

    def _run(self) -> tuple[int, str]:
        first_step, total_steps = self._schedule.first_step, self._schedule.total_steps
        self._context.enter_phase("training", first_step - 1)
        for step in range(first_step, total_steps + 1):
            last = step == total_steps
            logged = self._verifier.find_logged(step) if self._verifier else None
            if logged is not None and logged.shares:
                self._strategy.use_shares(logged.shares)
            result = self._survive(f"step {step}", partial(self._do_step, step))
            if step == first_step and not last:
                self._reserve(step)
            self._evaluate_when_due(step, last=last)
            ends = result.control.stop or last
            if self._verifier is not None:
                self._verifier.compare(step, result.loss, result.samples, ends=ends)
            # A replay saves where the earlier attempt did, since saving makes ranks equal.
            saves = result.is_due if logged is None else logged.saved
            if ends or saves or result.control.save or self._is_periodic(step):
                self._save(step, result, required=ends)
                correction = None if ends else self._settled
            else:
                assert self._times is not None
                correction = self._watch.learn(self._num_tokens, self._times.compute_s)
            if correction is not None:
                self._correct_setting(step, correction)
            self._trace(step, result.control, ends=ends)
            if result.control.cool and not ends:
                self._survive(f"the pause after step {step}", partial(self._cool, step))
            if result.control.stop and not last:
                return step, "stopped"
        return total_steps, "completed"

    def _survive(self, place: str, work: Callable[[], T]) -> T:
        """Do a part of the loop; after a loss, repeat it with the remaining ranks.

        Raises:
            PeerLost: other ranks are gone, and the remaining ones do not continue.
        """
        while True:
            try:
                return work()
            except PeerLost as loss:
                if not self._regrouping.is_possible():
                    raise
                done = self._last_step
                kept = self._regrouping.regroup(loss, place, done)
                self._adapt_to_group(kept)
                self._context.enter_phase("training", done)

    def _adapt_to_group(self, kept: tuple[int, ...]) -> None:
        """Continue as the ranks at these positions of the group before."""
        speeds = self._schedule.speeds
        solo = tuple(speeds.solo_tokens_per_s[rank] for rank in kept)
        self._schedule = replace(self._schedule, speeds=replace(speeds, solo_tokens_per_s=solo))
        self._pace = {name: tuple(pace[rank] for rank in kept) for name, pace in self._pace.items()}
        self._layout = self._make_layout()
        self._strategy.regroup(kept)
        self._saver.regroup()
        if self._verifier is not None:
            self._verifier.relax()

    def _make_layout(self) -> StatsLayout:
        group = self._context.group
        return StatsLayout(
            sums=(*self._state.objective.sums, *_SUMS),
            per_rank=_PER_RANK,
            rank=group.rank,
            world_size=group.world_size,
        )

    def _is_periodic(self, step: int) -> bool:
        every = self._spec.checkpoint.every_steps
        return every is not None and step % every == 0

    def _do_step(self, step: int) -> StepResult:
        context, strategy = self._context, self._strategy
        context.heartbeat.beat(step - 1)
        # Between steps, where no pass uses the weights.
        self._executor.release_memory_under_pressure()
        watch = Stopwatch(context.device)
        batch = strategy.choose_batch(step)
        learning_rate = learning_rate_at(self._spec, step, self._schedule.total_steps)
        watch.mark()
        strategy.add_gradients(batch, self._scale.factor if self._scales else None)
        watch.mark()
        strategy.reduce()
        stats_S = self._layout.fill(self._collect_stats(batch), context.device)
        context.group.sum(stats_S)
        watch.mark()
        norm = strategy.average_gradients()
        # In fp16 the norm decides whether to step, so the host waits for it here. Otherwise it
        # waits after the optimizer is queued, too.
        stats = self._layout.read(stats_S, norm) if self._waits_early else None
        context.group.require_whole()
        had_stepped = self._has_stepped
        with context.guard.changing():
            result = self._complete(batch, stats_S, norm, stats, learning_rate, watch)
        if self._has_stepped and not had_stepped:
            self._record_shapes(step)
        return result

    def _complete(
        self,
        batch: Batch,
        stats_S: Tensor,
        norm: Tensor,
        stats: Stats | None,
        learning_rate: float,
        watch: Stopwatch,
    ) -> StepResult:
        """Step the optimizer, and record what all ranks know now; `stats` if already read."""
        context, strategy, step = self._context, self._strategy, batch.step
        if stats is None or not self._scales or self._adapt_scale(stats.local[0]):
            self._step_optimizer(norm, learning_rate)
        watch.mark()
        stats = stats or self._layout.read(stats_S, norm)
        result = read_result(batch, stats, self._spec.objective, scales=self._scales)
        self._pace = stats.per_rank
        self._saver.prune_when_committed(int(stats.sums["uncommitted"]))
        self._times = watch.read().with_waited(strategy.take_waited_s())
        self._num_tokens = batch.my_tokens
        self._tokens_seen += batch.num_tokens
        self._last_step = step
        context.heartbeat.beat(step)
        self._record(batch, result, learning_rate, self._times)
        context.control.acknowledge(context.journal, step)
        strategy.learn(stats.per_rank["compute_s"], stats.per_rank["compute_tokens"])
        self._loss_saver.note(self._describe_point(step, result))
        return result

    def _step_optimizer(self, norm: Tensor, learning_rate: float) -> None:
        """Step in the memory of the passes, except for the first time.

        The first step allocates the optimizer's state, which must not lie where recorded passes
        compute.
        """
        if self._has_stepped:
            with self._executor.sharing():
                self._strategy.step_optimizer(norm, learning_rate)
            return
        self._executor.drop_graphs()
        self._strategy.step_optimizer(norm, learning_rate)
        self._has_stepped = True

    def _record_shapes(self, step: int) -> None:
        """Record the usual shapes of micro-batches, which the optimizer's first step drops."""
        if self._executor.is_repeating:
            self._context.enter_phase("adapting", step)
            self._choice.record()
            self._context.enter_phase("training", step)

    def _adapt_scale(self, norm: float) -> bool:
        """Adapt the loss scale of fp16; return whether the gradients can be used."""
        before, self._scale = self._scale, self._scale.after(norm)
        if self._scale.is_hopeless:
            raise ExpectedError(
                "The gradients are not finite in fp16, even with the smallest loss scale.",
                "Lower learning_rate, or use precision: bf16 or fp32, and start a new run",
            )
        skipped = self._scale.num_skipped > before.num_skipped
        if skipped:
            self._context.journal.write(
                "warning",
                message=f"A step was skipped, as its gradients overflowed fp16 (skipped so far: "
                f"{self._scale.num_skipped}); the loss scale is now {self._scale.factor:g}.",
                hint="",
            )
        return not skipped

    def _correct_setting(self, step: int, correction: SettingCorrection) -> None:
        """Use another setting from the next step on.

        A step that saves does not start a comparison: its checkpoint names the setting of the next
        one.
        """
        setting, layers = correction.setting, self._executor.layers
        self._context.enter_phase("adapting", step)
        used = self._choice.change(setting)
        self._context.enter_phase("training", step)
        if correction.is_final:
            self._choice.keep(setting)
        self._context.journal.write(
            "setting",
            step=step,
            believed_tokens_per_s=correction.believed_tokens_per_s,
            measured_tokens_per_s=correction.measured_tokens_per_s,
            **describe_setting(used, [], layers),
        )

    def _collect_stats(self, batch: Batch) -> dict[str, float | Tensor]:
        """Return this rank's part of the statistics of a step."""
        executor = self._executor
        # A checkpoint of this step names the setting of the next one.
        self._settled = self._watch.settle()
        setting = self._settled.setting if self._settled else read_setting(executor)
        return {
            **dict(zip(self._state.objective.sums, executor.sums, strict=True)),
            "weight": batch.my_weight,
            **self._context.control.poll(),
            "due": self._saver.is_due(),
            "uncommitted": self._saver.has_uncommitted,
            "micro_tokens": setting.micro_tokens,
            "num_recomputed": setting.num_recomputed,
            "num_moved": setting.num_moved,
            "is_repeating": setting.is_repeating,
            "compute_s": self._times.compute_s if self._times else 0.0,
            "compute_tokens": self._num_tokens,
        }

    def _record(
        self, batch: Batch, result: StepResult, learning_rate: float, times: StepTimes
    ) -> None:
        executor = self._executor
        segments = [segment for example in batch.mine.examples for segment in example.segments]
        work = StepWork(
            lengths=tuple(len(segment.ids) for segment in segments),
            num_targets=sum(segment.num_targets for segment in segments),
            global_tokens=batch.num_tokens,
            ranks_tokens=self._pace["compute_tokens"],
            ranks_compute_s=self._pace["compute_s"],
            recomputed_share=executor.recomputed_share,
            held_bytes=executor.held_bytes,
            unpacked_bytes=executor.layers.dequantized_bytes,
        )
        size = self._spec.batch_sequences
        self._context.journal.write(
            "step",
            step=batch.step,
            epoch=epoch_at(step=batch.step, batch=size, num_rows=self._epoch_rows),
            **result.metrics,
            loss=result.loss,
            loss_hex=result.loss.hex(),
            learning_rate=learning_rate,
            gradient_norm=result.gradient_norm,
            samples=result.samples,
            shares=list(self._strategy.shares),
            **describe_speed(work, times, self._schedule.speeds, self._context.device),
        )

    def _evaluate_when_due(self, step: int, *, last: bool) -> None:
        examples, num_rows = self._state.evaluation, len(self._state.train)
        if examples is None or not is_due(self._spec, step, self._epoch_rows, last=last):
            return

        def work() -> Evaluation:
            self._context.enter_phase("evaluating", step)
            # The objective numbers evaluation examples after those of training.
            evaluation = evaluate(self._strategy, examples, first_place=num_rows)
            self._context.group.require_whole()
            return evaluation

        evaluation = self._survive(f"the evaluation of step {step}", work)
        self._context.journal.write("eval", step=step, **evaluation.describe(self._spec.objective))
        self._context.enter_phase("training", step)

    def _trace(self, step: int, control: StepControl, *, ends: bool) -> None:
        """Start to record the steps after this one, or end a recording."""
        if control.trace_steps:
            self._recorder.begin(step + 1, control.trace_steps)
        if self._recorder.is_on and (ends or self._recorder.is_last(step)):
            self._context.enter_phase("tracing", step)
            self._recorder.finish(step)
            self._context.enter_phase("training", step)

    def _cool(self, step: int) -> None:
        """Pause together with all ranks until no GPU is too hot, or a user stops the run."""
        context, control = self._context, self._context.control
        began_s, hot = time.monotonic(), control.hot_gpu
        if hot is not None:
            context.journal.write("too_hot", step=step, **asdict(hot))
        context.enter_phase("cooling", step)
        while True:
            num_hot, num_stops = context.count(control.hot_gpu is not None, control.stop_requested)
            if not num_hot or num_stops:
                break
            time.sleep(COOLING_PAUSE_S)
        context.enter_phase("training", step)
        if hot is not None:
            paused_s = time.monotonic() - began_s
            context.journal.write("cooled", step=step, gpu=hot.gpu, paused_s=paused_s)

    def _reserve(self, step: int) -> None:
        # In this phase a thread gives the signs of life: pinning memory for a whole model can take
        # longer than a step may.
        self._context.heartbeat.beat(step, "saving")
        self._saver.reserve()
        self._context.heartbeat.beat(step, "training")

    def _save(self, step: int, result: StepResult, *, required: bool) -> None:
        self._watch.stop()  # a resume repeats the next steps with the same setting

        def work() -> None:
            self._context.enter_phase("saving", step)
            self._saver.save(self._describe_point(step, result), required=required)

        if required:
            work()  # ranks leave one by one after it, so it cannot be repeated
        else:
            self._survive(f"the checkpoint of step {step}", work)
        self._context.enter_phase("training", step)

    def _describe_point(self, step: int, result: StepResult) -> ResumePoint:
        return ResumePoint(
            step=step,
            total_steps=self._schedule.total_steps,
            spec=self._spec,
            devices=tuple((place.node, place.device_id) for place in self._context.placements),
            shares=self._strategy.shares,
            layers=self._strategy.layers,
            micro_tokens=result.micro_tokens,
            num_recomputed=result.num_recomputed,
            num_moved=result.num_moved,
            is_repeating=result.is_repeating,
            tokens_seen=self._tokens_seen,
            plain_template=self._state.model.plain_template,
            loss_scale=self._scale,
            layout=self._state.parameters.layout,
            text_rules=self._state.text_rules,
        )
