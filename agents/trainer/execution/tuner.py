"""Search for the fastest execution setting that fits a card: micro-batch size and layer modes.

Small passes measure the memory that is always needed, and a pass with one offloaded layer measures
how much a layer saves. This predicts the memory of every setting closely enough to name candidates.
A card that holds the longest example with all layers kept measures that first. Recomputing layers
are compiled and measured when a candidate has some, over the longest example, as in a later start.
Candidates are timed with doubling tokens until that is slower twice in a row. The speed that counts
is that over the run's own rows, including padding and smaller micro-batches; see `workload`.

If the host needs about as long to launch the kernels of a pass as the card to run them, passes are
padded to repeating shapes and replayed; see `cuda_graphs`. On a slower card padding would only cost
time.

A fast card finishes a pass before its clock drops at the power limit, and cools between passes. So
the best settings are timed again in a final, over real steps. The result is stored for the next
start of the same shape.

Settings change results only in the last digits, and a checkpoint carries the chosen one.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from agents.contract.layer_plan import MOST_TOKENS, LayerPlan, Needs, choose_plan
from agents.contract.spec import Recompute
from agents.trainer.execution.executor import Executor
from agents.trainer.execution.needs import describe_needs, measure_needs
from agents.trainer.execution.pass_times import LONG_S, PassTimer
from agents.trainer.execution.pruning import cannot_win, without_launches
from agents.trainer.execution.setting import (
    DEQUANTIZED_SHARES,
    PLANNED_SHARES,
    ExecutionSetting,
    apply_setting,
    count_alloc_retries,
    fill_spare_memory,
    read_free_bytes,
)
from agents.trainer.execution.workload import CostCurve, Workload, count_tokens
from agents.trainer.optim.optimizer_reserve import Reserve

# Number of sizes in a row without gain that end the search. A single one may merely fit badly.
_MAX_SLOWER = 2
# Time after which no further setting is tried, without compilation, in seconds.
_SEARCH_S = 25.0
# Usual number of settings in a search.
_USUAL_TRIALS = 6
# Fraction of the best speed with which a setting may still win, with more offloading or in the
# final.
_NEAR = 0.95
# Fraction of a pass that its launches take, from which replaying may pay, and from which it does.
_MAY_REPEAT, _MUST_REPEAT = 0.4, 0.8
# Fraction of the best speed for a setting of the final that differs only in the layers' modes: its
# passes are as long.
_NEAR_ALIKE = 0.99
# Time per setting in the final and limit of its step, in seconds; number of settings.
_FINAL_S, _FINAL_STEP_S = 0.7, 1.5
_MAX_FINALISTS = 2


class Tuner:
    """Times settings on one GPU.

    Args:
        executor: executor whose layers can offload.
        device: the GPU.
        workload: work of this rank.
        max_tokens: largest micro-batch that can occur, in tokens.
        recompute: rule of the spec: whether layers may, must or must not recompute.
        reserve: memory reserve of the optimizer, which a setting has to leave free.
        is_kept: True if all layers can keep their activations of the longest example.
        report: called with the number of settings tried, their likely total, and the seconds left.
        log: called with a line for each measurement, for the log of the rank.
    """

    def __init__(  # noqa: PLR0913 - the parts of a measurement, and its listeners
        self,
        executor: Executor,
        device: torch.device,
        workload: Workload,
        *,
        max_tokens: int,
        recompute: Recompute,
        reserve: Reserve,
        is_kept: bool = False,
        report: Callable[[int, int, float], None] = lambda done, total, left_s: None,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._executor = executor
        self._device = device
        self._workload = workload
        self._max_tokens = min(MOST_TOKENS, max_tokens)
        self._recompute = recompute
        self._reserve = reserve
        # True until recomputing layers are compiled; then the second field holds their needs.
        self._is_kept = is_kept
        self._completed: Needs | None = None
        self._report = report
        self._log = log
        self._timer = PassTimer(executor, device)
        self.tried: list[ExecutionSetting] = []
        """Settings with their measured speeds."""
        self.finalists: list[ExecutionSetting] = []
        """Settings of the final, with the speeds measured in it."""
        # Extra bytes of the packed weights of a tried setting if they were dequantized.
        self._dequantizable_bytes: dict[ExecutionSetting, int] = {}
        # Time to launch a pass, and to compute a token without waiting for launches; both measured.
        self._launch_s = self._token_s = 0.0
        self._deadline_s = math.inf

    def choose(self) -> ExecutionSetting:
        """Return the fastest setting found."""
        needs = self._measure()
        self._deadline_s = time.monotonic() + _SEARCH_S  # the measurement before has compiled
        best, tokens, num_slower = self._try(needs, needs.tokens), needs.tokens, 0
        if best is None:
            return self._try_least(needs.tokens)
        while tokens < self._max_tokens and num_slower < _MAX_SLOWER and self._is_in_time:
            tokens = min(2 * tokens, self._max_tokens)
            candidate = self._try(needs, tokens)
            if candidate is None:
                break
            is_faster = candidate.tokens_per_s > best.tokens_per_s
            best, num_slower = (candidate, 0) if is_faster else (best, num_slower + 1)
        return self._run_final(
            self._offload_for_weights(needs, self._try_neighbours(needs, best, tokens))
        )

    def _try_least(self, tokens: int) -> ExecutionSetting:
        """Return the setting that needs the least memory, replayed if that fits.

        Planned memory includes a margin, which a very full card may not have.
        """
        least = ExecutionSetting(micro_tokens=tokens, num_recomputed=self._max_recomputed)
        for is_repeating in dict.fromkeys((*self._choose_modes(tokens), False)):
            found, is_roomy = self._try_setting(replace(least, is_repeating=is_repeating))
            if found is not None and is_roomy:
                return found
        return least

    def _try_neighbours(
        self, needs: Needs, best: ExecutionSetting, max_tokens: int
    ) -> ExecutionSetting:
        """Return the fastest of the best setting and of sizes halfway to its neighbors."""
        found, sizes = [best], []
        if best.micro_tokens < max_tokens:
            sizes.append(min(3 * best.micro_tokens // 2, self._max_tokens))
        if best.micro_tokens > 2 * needs.tokens:
            sizes.append(3 * best.micro_tokens // 4)
        # Few long rows may give the same part for several sizes, which need not be timed again.
        near = (best.micro_tokens, best.micro_tokens // 2)
        known = {count_tokens(self._workload.choose_part(tokens)) for tokens in near}
        for tokens in sizes:
            is_known = count_tokens(self._workload.choose_part(tokens)) in known
            if not is_known and self._is_in_time:
                found.append(self._try(needs, tokens) or best)
        return max(found, key=_read_speed)

    def _offload_for_weights(self, needs: Needs, best: ExecutionSetting) -> ExecutionSetting:
        """Return the fastest of the best setting and of some that offload to dequantize weights.

        Copies are almost free while the bus keeps up, whereas dequantizing in every pass costs its
        full time. The number of recomputing layers does not grow.
        """
        near = [each for each in self.tried if each.tokens_per_s > _NEAR * best.tokens_per_s]
        # The fastest setting of each size, as later ones replace earlier ones.
        sizes = {each.micro_tokens: each for each in sorted(near, key=_read_speed)}
        for setting in sorted(sizes.values(), key=_read_speed, reverse=True):
            for plan in self._plan_offload_for_weights(needs, setting):
                if not self._is_in_time:
                    return best
                changed = replace(setting, num_moved=plan.num_moved, tokens_per_s=0.0)
                found, is_roomy = self._try_setting(changed)
                best = max(best, found or best, key=_read_speed)
                if is_roomy:
                    break
        return best

    def _plan_offload_for_weights(
        self, needs: Needs, setting: ExecutionSetting
    ) -> Iterator[LayerPlan]:
        """Yield plans that offload more and recompute no more than a setting.

        The first plan leaves room for all weights dequantized, later plans for a fraction of those
        that are still packed.
        """
        missing_bytes, num_moved = self._dequantizable_bytes[setting], math.inf
        for share in DEQUANTIZED_SHARES if self._recompute == "auto" and missing_bytes else ():
            self._executor.drop_graphs()
            self._executor.layers.empty()
            spared_bytes = (1 - share) * missing_bytes
            weight_bytes = self._executor.layers.dequantizable_bytes - spared_bytes
            plan = choose_plan(
                without_launches(self._completed or needs, self.tried),
                tokens=setting.micro_tokens,
                num_layers=self._executor.layers.num_layers,
                room_bytes=read_free_bytes(self._device)
                - self._reserve.lasting_bytes
                - weight_bytes,
                host_bytes=self._host_bytes,
            )
            if (
                plan is not None
                and plan.num_recomputed <= setting.num_recomputed
                and setting.num_moved < plan.num_moved < num_moved
            ):
                num_moved = plan.num_moved
                yield plan

    def _run_final(self, best: ExecutionSetting) -> ExecutionSetting:
        """Return the setting that is fastest over real steps, out of the best ones."""
        near = [one for one in self.tried if one.tokens_per_s > _NEAR * best.tokens_per_s]
        kinds = {replace(one, tokens_per_s=0.0): one for one in sorted(near, key=_read_speed)}
        rivals = sorted(kinds.values(), key=_read_speed, reverse=True)
        alike = (best.micro_tokens, best.is_repeating)
        rivals = [
            one
            for one in rivals
            if (one.micro_tokens, one.is_repeating) != alike
            or one.tokens_per_s > _NEAR_ALIKE * best.tokens_per_s
        ][:_MAX_FINALISTS]
        # Passes this long have already shown the sustained speed.
        if best.micro_tokens > LONG_S * best.tokens_per_s:
            return best
        for setting in rivals:
            speed = self._time_steps(setting)
            if speed is not None:
                self.finalists.append(replace(setting, tokens_per_s=speed))
        return max(self.finalists, key=_read_speed, default=best)

    def _time_steps(self, setting: ExecutionSetting) -> float | None:
        """Return the tokens per second of a real step, or None if memory ran out."""
        apply_setting(self._executor, setting)
        largest = self._workload.choose_part(setting.micro_tokens)
        if not self._executor.try_gradients(largest):
            return None
        fill_spare_memory(self._executor, self._device, largest, self._reserve)
        max_tokens = max(setting.micro_tokens, _FINAL_STEP_S * setting.tokens_per_s)
        step = self._workload.choose_step(0, max_tokens)
        while True:
            for _ in range(2):  # one launches the kernels, one records them
                if self._timer.time_once(step) is None:
                    return None
            if not self._executor.make_room_for_graphs():
                break
        speeds: list[float] = []
        until_s = time.monotonic() + _FINAL_S
        while not speeds or time.monotonic() < until_s:
            found = self._timer.time_once(step)
            if found is None:
                return None
            speeds.append(count_tokens(step) / found.seconds)
        return statistics.median(speeds)

    @property
    def _is_in_time(self) -> bool:
        return time.monotonic() < self._deadline_s

    @property
    def _max_recomputed(self) -> int:
        return 0 if self._recompute == "none" else self._executor.layers.num_layers

    def _measure(self) -> Needs:
        needs, timed = measure_needs(
            self._executor,
            self._device,
            self._workload,
            num_recomputed=0 if self._is_kept else self._max_recomputed,
            recompute=self._recompute,
        )
        free = f"{read_free_bytes(self._device) / 1e9:.2f} GB free"
        self._log(f"{describe_needs(needs)}; {free}; {self._executor.shortage or 'passes fit'}")
        token_s = timed.seconds / needs.tokens
        self._launch_s, self._token_s = timed.launch_s, min(token_s, self._token_s or token_s)
        return needs

    def _complete(self) -> None:
        """Compile and measure recomputing layers; the search time does not include it."""
        self._is_kept = False
        started_s = time.monotonic()
        self._completed = self._measure()
        self._deadline_s += time.monotonic() - started_s

    @property
    def _host_bytes(self) -> int:
        offloader = self._executor.layers.offloader
        return offloader.arena.capacity_bytes if offloader is not None else 0

    def _try(self, needs: Needs, tokens: int) -> ExecutionSetting | None:
        """Return the fastest of several settings for a micro-batch size, or None if no setting
        fits.

        Compares offloading with no offloading, and replayed passes with launched ones if the
        launches take about as long as the card.
        """
        left_s = max(0.0, self._deadline_s - time.monotonic())
        num_tried = len(self.tried)
        self._report(num_tried, max(_USUAL_TRIALS, num_tried + 1), left_s)
        modes = self._choose_modes(tokens)
        tried = [self._try_plans(needs, tokens, is_repeating=one) for one in modes]
        # A failed recording shows that this model cannot be recorded.
        if modes == [True] and self._choose_modes(tokens) == [False]:
            tried = [self._try_plans(needs, tokens, is_repeating=False)]
        return max((one for one in tried if one is not None), key=_read_speed, default=None)

    def _choose_modes(self, tokens: int) -> list[bool]:
        """Return whether to try replayed passes, launched ones, or both."""
        replayer = self._executor.replayer
        if replayer is None or replayer.failure is not None:
            return [False]
        share = min(1.0, self._launch_s / (self._token_s * tokens))
        if share > _MUST_REPEAT:
            return [True]
        return [True, False] if share > _MAY_REPEAT else [False]

    def _try_plans(
        self, needs: Needs, tokens: int, *, is_repeating: bool
    ) -> ExecutionSetting | None:
        setting = ExecutionSetting(micro_tokens=tokens, is_repeating=is_repeating)
        found = self._try_plan(needs, setting, may_move=True)
        if found is None or not (
            found.num_moved and self._recompute == "auto" and self._is_in_time
        ):
            return found
        other = self._try_plan(needs, setting, may_move=False)
        return max((found, other or found), key=_read_speed)

    def _try_plan(
        self, needs: Needs, setting: ExecutionSetting, *, may_move: bool
    ) -> ExecutionSetting | None:
        """Time the plan that should fit, then smaller ones if it does not; None if no plan fits.

        Args:
            needs: measured memory needs.
            setting: micro-batch size, and whether passes are replayed.
            may_move: True if layers may offload.
        """
        timed: list[ExecutionSetting] = []
        for caution in PLANNED_SHARES:
            self._executor.drop_graphs()
            self._executor.layers.empty()
            plan = self._choose_plan(needs, setting, caution, may_move=may_move)
            if plan is None:
                self._log(f"{setting.micro_tokens:,} tokens at once need more than there is free")
                break
            if timed and plan == timed[-1].plan:
                break
            if self._cannot_win(setting, plan):
                break
            found, is_roomy = self._try_setting(
                replace(setting, num_recomputed=plan.num_recomputed, num_moved=plan.num_moved)
            )
            if found is not None:
                timed.append(found)
            replayer = self._executor.replayer
            if is_roomy or (replayer is not None and replayer.failure is not None):
                break
        return max(timed, key=_read_speed, default=None)

    def _choose_plan(
        self, needs: Needs, setting: ExecutionSetting, caution: float, *, may_move: bool
    ) -> LayerPlan | None:
        """Return the plan for a fraction of the free memory, or None if no plan fits."""
        free_bytes = read_free_bytes(self._device) - self._reserve.lasting_bytes
        plan = choose_plan(
            without_launches(self._completed or needs, self.tried),
            tokens=setting.micro_tokens,
            num_layers=self._executor.layers.num_layers,
            room_bytes=free_bytes * caution,
            host_bytes=self._host_bytes,
            recompute=self._recompute,
            may_move=may_move,
        )
        is_new = self._is_kept and plan is not None and plan.num_recomputed > 0
        if plan is None or not is_new or self._cannot_win(setting, plan):
            return plan
        self._complete()
        return self._choose_plan(needs, setting, caution, may_move=may_move)

    def _cannot_win(self, setting: ExecutionSetting, plan: LayerPlan) -> bool:
        return cannot_win(setting, plan, self.tried, self._executor.layers.num_layers)

    def _try_setting(self, setting: ExecutionSetting) -> tuple[ExecutionSetting | None, bool]:
        """Return and log the result of `_time_setting`."""
        found, is_roomy = self._time_setting(setting)
        result = f"{found.tokens_per_s:,.0f} tokens/s" if found else self._executor.shortage
        self._log(
            f"{setting.micro_tokens:,} tokens at once, {setting.num_recomputed} layers recompute, "
            f"{setting.num_moved} offload{', replayed' if setting.is_repeating else ''}: {result}"
            f"{'' if is_roomy or found is None else ', memory is tight'}"
        )
        return found, is_roomy

    def _time_setting(self, setting: ExecutionSetting) -> tuple[ExecutionSetting | None, bool]:
        """Return the setting with its speed (None if out of memory), and whether it fits well.

        It fits badly if the allocator has to flush and reallocate during the passes because of
        fragmentation, which costs more time than the setting gains, or if passes to be replayed
        could not be recorded.
        """
        apply_setting(self._executor, setting)
        part = self._workload.choose_part(setting.micro_tokens)
        if self._executor.try_gradients(part):
            fill_spare_memory(self._executor, self._device, part, self._reserve)
            before = count_alloc_retries(self._device)
            costs = self._measure_costs(setting)
            # A recording that found no memory is tried again with fewer unpacked weights.
            while self._executor.make_room_for_graphs():
                costs = self._measure_costs(setting)
            is_roomy = count_alloc_retries(self._device) == before
            if setting.is_repeating and self._executor.replayer is not None:
                is_roomy = self._executor.replayer.num_graphs > 0
            if costs is not None:
                speed = self._workload.predict_speed(
                    setting.micro_tokens, costs, is_repeating=setting.is_repeating
                )
                setting = replace(setting, tokens_per_s=speed)
                self.tried.append(setting)
                self._dequantizable_bytes[setting] = self._executor.layers.dequantizable_bytes
                return setting, is_roomy
        self._executor.drop_graphs()
        self._executor.release_memory()
        return None, False

    def _measure_costs(self, setting: ExecutionSetting) -> CostCurve | None:
        """Time a full micro-batch and, if many are smaller, a small one."""
        is_repeating = setting.is_repeating
        part = self._workload.choose_full(setting.micro_tokens, is_repeating=is_repeating)
        if not is_repeating and not self._executor.try_gradients(part):
            return None
        large = self._timer.time(part)
        if large is None:
            return None
        tokens = count_tokens(part)
        if is_repeating or large.launch_share < _MUST_REPEAT:
            self._token_s = large.seconds / tokens
        points = [(tokens, large.seconds)]
        size = self._workload.find_small(setting.micro_tokens, is_repeating=is_repeating)
        if size is not None and large.seconds < LONG_S and self._is_in_time:
            small_part = self._workload.choose_part(size)
            small_tokens = count_tokens(small_part)
            # Two points that close would give a meaningless slope.
            small = self._timer.time(small_part) if small_tokens < 0.9 * tokens else None
            if small is not None:
                points.insert(0, (small_tokens, small.seconds))
        # A replayed or recorded pass does not show its launch time.
        return CostCurve(tuple(points), self._launch_s if is_repeating else large.launch_s)


def _read_speed(setting: ExecutionSetting) -> float:
    return setting.tokens_per_s
