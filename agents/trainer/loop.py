"""The training loop: one global batch after the other, the same on every rank.

Each step: every rank adds the gradients of the SUM of the losses over its slice of the batch; they
are summed over the ranks in buckets (see `reducer`), and a small all-reduce sums the statistics;
then all divide by the weight of the whole batch (its tokens that count, or its pairs), clip, and
take the same optimizer step. So the gradient is the batch's mean however the batch was cut (1e-15
from one process, in float64).

The statistics carry what the ranks have to agree on, too: what somebody wishes (see `wishes`),
whether a checkpoint is due by the clock of rank 0, and how big each rank's micro-batches are. They
are the only thing that a GPU's host waits for, once per step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from agents.errors import ExpectedError
from agents.trainer.checkpoint.saver import Saver
from agents.trainer.data.order import epoch_at, hash_rows
from agents.trainer.evaluation import evaluate, is_due
from agents.trainer.execution.executor import Executor
from agents.trainer.metrics.profiler import TraceRecorder
from agents.trainer.metrics.step_metrics import Speeds, StepWork, describe_speed
from agents.trainer.metrics.step_statistics import Stats, StatsLayout
from agents.trainer.metrics.stopwatch import StepTimes, Stopwatch
from agents.trainer.objectives.objective import LOSS, SUMS, name_sums
from agents.trainer.optim.loss_scale import LossScale, begin_scaling
from agents.trainer.optim.optimizer import set_learning_rate
from agents.trainer.optim.schedule import learning_rate_at
from agents.trainer.parallel.balance import Balancer
from agents.trainer.parallel.batch import Batch, choose_batch
from agents.trainer.parallel.reducer import Reducer
from agents.trainer.rank.attempt import RankAttempt
from agents.trainer.rank.group import Group
from agents.trainer.rank.journal import Heartbeat, RankJournal
from agents.trainer.rank.step_control import SLOTS, RankControl, StepControl
from agents.trainer.resume_verifier import ResumeVerifier
from agents.trainer.training_state import TrainingState

_SUMS = (*SUMS, *SLOTS, "weight", "due", "uncommitted")
_PER_RANK = ("micro_tokens", "num_recomputed", "num_moved", "compute_s", "compute_tokens")
"""The last two are of the step before: a GPU tells the time when a step is over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSchedule:
    """What is fixed for the whole attempt."""

    first_step: int
    total_steps: int
    shares: tuple[float, ...]
    """To begin with."""
    speeds: Speeds
    scales_loss: bool = False
    """Some rank computes in fp16; see `precision`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreed:
    """What all ranks know after a step."""

    loss: float
    more: dict[str, float]
    """What the objective tells beside the loss."""
    gradient_norm: float
    samples: str
    """Hash of the rows of the batch."""
    granted: StepControl
    is_due: bool
    """The clock asks for a checkpoint."""
    micro_tokens: tuple[int, ...]
    num_recomputed: tuple[int, ...]
    num_moved: tuple[int, ...]


class Loop:
    """Runs the steps of one attempt on one rank."""

    def __init__(
        self,
        attempt: RankAttempt,
        prepared: TrainingState,
        plan: TrainingSchedule,
        *,
        group: Group,
        computer: Executor,
        saver: Saver,
        recorder: TraceRecorder,
        certifier: ResumeVerifier | None,
        journal: RankJournal,
        heartbeat: Heartbeat,
        wishes: RankControl,
    ) -> None:
        self._spec = attempt.intent.spec
        self._rank = attempt.rank
        self._prepared = prepared
        self._plan = plan
        self._group = group
        self._computer = computer
        self._saver = saver
        self._recorder = recorder
        self._certifier = certifier
        self._journal = journal
        self._heartbeat = heartbeat
        self._wishes = wishes
        self._scales = plan.scales_loss
        then = prepared.resumed.loss_scale if prepared.resumed else LossScale()
        self._scale = begin_scaling(then) if self._scales else then
        self._layout = StatsLayout(
            sums=_SUMS, per_rank=_PER_RANK, rank=attempt.rank, world_size=len(plan.shares)
        )
        self._times: StepTimes | None = None
        """Of the newest step."""
        self._num_tokens = 0
        """Of this rank in the newest step."""
        spec = self._spec
        self._balancer = Balancer(plan.shares, active=spec.rebalance and spec.shares is None)
        self._reducer = Reducer(prepared.flat, prepared.wire, world_size=group.world_size)

    def run(self) -> tuple[int, str]:
        """Train to the end or to a wish to stop; return the last step, and which of them it was."""
        self._enter("training", self._plan.first_step - 1)
        for step in range(self._plan.first_step, self._plan.total_steps + 1):
            logged = self._certifier.find_logged(step) if self._certifier else None
            if logged is not None and logged.shares:
                self._balancer.shares = logged.shares
            agreed = self._do_step(step)
            if step == self._plan.first_step:
                self._saver.reserve()
            last = step == self._plan.total_steps
            if step == self._plan.first_step and not last:
                self._get_ready(step)
            num_rows = len(self._prepared.train)
            due = is_due(self._spec, step, num_rows, last=last)
            if self._prepared.evaluation is not None and due:
                self._evaluate(step)
            ends = agreed.granted.stop or last
            if self._certifier is not None:
                self._certifier.compare(step, agreed.loss, agreed.samples, ends=ends)
            saves = agreed.is_due if logged is None else logged.saved
            if ends or saves or agreed.granted.save or self._is_periodic(step):
                self._save(step, agreed, required=ends)
            self._trace(step, agreed.granted, ends=ends)
            if agreed.granted.stop and not last:
                return step, "stopped"
        return self._plan.total_steps, "completed"

    def _enter(self, phase: str, step: int) -> None:
        self._journal.write("phase", phase=phase)
        self._heartbeat.beat(step, phase)

    def _is_periodic(self, step: int) -> bool:
        every = self._spec.checkpoint.every_steps
        return every is not None and step % every == 0

    def choose_batch(self, step: int) -> Batch:
        """Return the batch of a step, which all ranks cut alike."""
        return choose_batch(
            self._spec, self._prepared.train, step, shares=self._balancer.shares, rank=self._rank
        )

    def _do_step(self, step: int) -> Agreed:
        self._heartbeat.beat(step - 1)
        self._computer.give_way()
        watch = Stopwatch(self._prepared.device)
        batch = self.choose_batch(step)
        learning_rate = learning_rate_at(self._spec, step, self._plan.total_steps)
        set_learning_rate(self._prepared.optimizer, learning_rate)
        if self._scales:
            # That of the mean: a sum over a large batch would overflow at once.
            self._computer.gradient_scale = self._scale.factor / batch.weight
        self._reducer.divisor = self._divisor(batch)
        watch.mark()
        self._computer.add_gradients(batch.mine, self._reducer)
        watch.mark()
        self._reducer.finish()
        stats_S = self._layout.fill(self._tell(batch), self._prepared.device)
        self._group.sum(stats_S)
        watch.mark()
        norm, early = self._update(batch, stats_S)
        watch.mark()
        stats = early or self._layout.read(stats_S, norm)
        agreed = self._agree(batch, stats)
        self._saver.learn(int(stats.sums["uncommitted"]))
        self._times, self._num_tokens = watch.read(), batch.my_tokens
        self._record(batch, agreed, learning_rate, self._times)
        self._wishes.tell_granted(self._journal, step)
        self._balancer.learn(stats.per_rank["compute_s"], stats.per_rank["compute_tokens"])
        return agreed

    def _divisor(self, batch: Batch) -> float:
        """Return what turns the sum of the gradients into those of the batch's mean."""
        return self._scale.factor if self._scales else batch.weight

    def _update(self, batch: Batch, stats_S: Tensor) -> tuple[Tensor, Stats | None]:
        """Turn the summed gradients into an optimizer step.

        Returns:
            The norm before clipping, and the statistics if the host had to wait for them already,
            because the norm decides whether the gradients can be used (fp16).
        """
        gradients = self._prepared.flat.gradients
        gradients.div_(self._divisor(batch))
        norm = torch.linalg.vector_norm(gradients)
        early = self._layout.read(stats_S, norm) if self._scales else None
        if early is None or self._scale_again(early.local[0]):
            gradients.mul_((self._spec.max_gradient_norm / (norm + 1e-6)).clamp(max=1.0))
            self._prepared.optimizer.step()
        return norm, early

    def _scale_again(self, norm: float) -> bool:
        """Follow the loss scale of fp16; return whether the gradients can be used."""
        before, self._scale = self._scale, self._scale.after(norm)
        if self._scale.is_hopeless:
            raise ExpectedError(
                "The gradients are not finite in fp16 however small the loss is scaled.",
                "Lower learning_rate, or use precision: bf16 or fp32, and start a new run",
            )
        skipped = self._scale.num_skipped > before.num_skipped
        if skipped:
            self._journal.write(
                "warning",
                message=f"A step was skipped, as its gradients overflowed fp16 (skipped so far: "
                f"{self._scale.num_skipped}); the loss scale is now {self._scale.factor:g}.",
                hint="",
            )
        return not skipped

    def _tell(self, batch: Batch) -> dict[str, float | Tensor]:
        """Return what this rank has to tell the others about the step."""
        return {
            **dict(zip(SUMS, self._computer.sums, strict=True)),
            "weight": batch.my_weight,
            **self._wishes.poll(),
            "due": self._saver.is_due_by_time(),
            "uncommitted": self._saver.has_uncommitted,
            "micro_tokens": self._computer.micro_tokens,
            "num_recomputed": self._computer.layers.plan.num_recomputed,
            "num_moved": self._computer.layers.plan.num_moved,
            "compute_s": self._times.compute_s if self._times else 0.0,
            "compute_tokens": self._num_tokens,
        }

    def _agree(self, batch: Batch, stats: Stats) -> Agreed:
        weight = stats.sums["weight"]
        if weight != batch.weight:
            raise RuntimeError(f"a weight of {weight} was computed, {batch.weight} planned")
        means = [stats.sums[name] / batch.weight for name in SUMS]
        loss = means[LOSS]
        (norm,) = stats.local
        skipped = self._scales and not math.isfinite(norm)
        if not (math.isfinite(loss) and (skipped or math.isfinite(norm))):
            raise ExpectedError(
                f"Step {batch.step} gave a loss of {loss} and a gradient norm of {norm}: "
                "the training has diverged.",
                "Lower learning_rate or raise warmup_share, and start a new run: this one would "
                "diverge again",
            )
        return Agreed(
            loss=loss,
            more=name_sums(self._spec.objective, means),
            gradient_norm=norm,
            samples=hash_rows(batch.row_numbers),
            granted=StepControl.read(stats.sums),
            is_due=stats.sums["due"] > 0,
            micro_tokens=tuple(int(value) for value in stats.per_rank["micro_tokens"]),
            num_recomputed=tuple(int(value) for value in stats.per_rank["num_recomputed"]),
            num_moved=tuple(int(value) for value in stats.per_rank["num_moved"]),
        )

    def _record(self, batch: Batch, agreed: Agreed, learning_rate: float, times: StepTimes) -> None:
        self._saver.add_tokens(batch.num_tokens)
        self._heartbeat.beat(batch.step)
        segments = [segment for example in batch.mine.examples for segment in example.segments]
        work = StepWork(
            lengths=tuple(len(segment.ids) for segment in segments),
            num_targets=sum(segment.num_targets for segment in segments),
            global_tokens=batch.num_tokens,
            recomputed_share=self._computer.recomputed_share,
            held_bytes=self._computer.held_bytes,
            unpacked_bytes=self._computer.layers.unpacked_bytes,
        )
        self._journal.write(
            "step",
            step=batch.step,
            epoch=epoch_at(
                step=batch.step,
                batch=self._spec.batch_sequences,
                num_rows=len(self._prepared.train),
            ),
            **agreed.more,
            loss=agreed.loss,
            loss_hex=agreed.loss.hex(),
            learning_rate=learning_rate,
            gradient_norm=agreed.gradient_norm,
            samples=agreed.samples,
            shares=list(self._balancer.shares),
            **describe_speed(work, times, self._plan.speeds, self._prepared),
        )

    def _evaluate(self, step: int) -> None:
        examples = self._prepared.evaluation
        assert examples is not None
        first = len(self._prepared.train)  # the reference table holds the training pairs first
        # Shares are those of training: a rank that recomputes there waits here, maybe for minutes.
        self._enter("evaluating", step)
        found = evaluate(self._computer, self._group, examples, self._balancer.shares, first)
        told = found.tell(self._spec.objective)
        self._journal.write("eval", step=step, **told)
        self._enter("training", step)

    def _trace(self, step: int, granted: StepControl, *, ends: bool) -> None:
        """Begin to record the steps after this one, or end it."""
        if granted.trace_steps:
            self._recorder.begin(step + 1, granted.trace_steps)
        if self._recorder.is_on and (ends or self._recorder.is_last(step)):
            self._enter("tracing", step)
            self._recorder.finish(step)
            self._enter("training", step)

    def _get_ready(self, step: int) -> None:
        self._heartbeat.beat(step, "saving")  # pinned memory for a whole model takes a while
        self._saver.get_ready()
        self._heartbeat.beat(step, "training")

    def _save(self, step: int, agreed: Agreed, *, required: bool) -> None:
        self._enter("saving", step)
        self._saver.save(
            step,
            shares=self._balancer.shares,
            total_steps=self._plan.total_steps,
            micro_tokens=agreed.micro_tokens,
            num_recomputed=agreed.num_recomputed,
            num_moved=agreed.num_moved,
            loss_scale=self._scale,
            required=required,
        )
        self._enter("training", step)
