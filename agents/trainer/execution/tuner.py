"""Search for the fastest execution setting that fits a card: micro-batch size and layer modes.

One small pass with all layers recomputing measures the memory that is always needed, and one with
a single offloaded layer measures how much a layer saves. The memory of every setting follows from
these closely enough to name candidates. Candidates are timed, doubling the tokens until that is
slower twice in a row.

A fast card finishes a pass before its clock drops at the power limit, and cools between passes.
So the best settings are timed again in a final, over whole steps and for seconds. The result is
stored for the next start of the same shape.

Settings change results only in the last digits, and a checkpoint carries the chosen one.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch

from agents.contract.layer_plan import MOST_TOKENS, LayerPlan, Needs, choose_plan
from agents.contract.spec import Recompute
from agents.trainer.data.examples import Part
from agents.trainer.execution.executor import Executor
from agents.trainer.execution.setting import (
    DEQUANTIZED_SHARES,
    PLANNED_SHARES,
    ExecutionSetting,
    apply_setting,
    count_alloc_retries,
    fill_spare_memory,
    measure_peak_bytes,
    read_free_bytes,
)
from agents.trainer.optim.optimizer_reserve import Reserve

# Passes per measurement. A third follows if the second was recorded, to time a replay.
_TIMED_PASSES = 2
# Sizes in a row without gain that end the search. One alone may merely fit memory badly.
_MAX_SLOWER = 2
# Up to this micro-batch size, launching kernels may take longer than running them.
_FEW_TOKENS = 4096
# Micro-batches of a step count as equal if their mean is at least this share of the largest.
_ALIKE = 0.97
# Total time after which a measurement makes no further passes, in seconds.
_LONG_S = 10.0
# Time after which no further setting is tried, in seconds. The search runs once per shape, but a
# slow card would spend half an hour on what it gains in a day.
_SEARCH_S = 180.0
# Share of the best speed from which a setting may still win with more offloading or in the final.
_NEAR = 0.97
# A pass longer than this already shows the sustained speed, so no final is needed.
_SUSTAINED_S = 1.0
# Time per setting in the final, and limit of one step of it, in seconds.
_FINAL_S, _FINAL_STEP_S = 4.0, 2.0
_MAX_FINALISTS = 3
_PROBE_BYTES = 1 << 26


class Tuner:
    """Times settings on one GPU.

    Args:
        executor: Executor whose layers can offload.
        device: The GPU.
        choose_part: Returns examples of at most this many tokens in total, but at least one.
        max_tokens: Largest micro-batch that can occur, in tokens.
        step_tokens: Tokens of this rank per step, which are split into micro-batches of similar
            size; None if that varies.
        recompute: Whether layers may, must or must not recompute.
        reserve: Memory reserve of the optimizer, which a setting has to leave free.
    """

    def __init__(
        self,
        executor: Executor,
        device: torch.device,
        choose_part: Callable[[int], Part],
        *,
        max_tokens: int,
        step_tokens: float | None = None,
        recompute: Recompute,
        reserve: Reserve,
    ) -> None:
        self._executor = executor
        self._device = device
        self._choose_part = choose_part
        self._max_tokens = min(MOST_TOKENS, max_tokens)
        self._step_tokens = step_tokens
        self._recompute = recompute
        self._reserve = reserve
        self.tried: list[ExecutionSetting] = []
        """Settings with their measured speeds."""
        self.finalists: list[ExecutionSetting] = []
        """Settings of the final, with the speeds measured in it."""
        # Tried settings whose passes were replayed as CUDA graphs.
        self._recorded: set[ExecutionSetting] = set()
        # Extra bytes that the packed weights of a tried setting would take dequantized.
        self._dequantizable_bytes: dict[ExecutionSetting, int] = {}
        # Whether the passes timed last were replayed.
        self._is_recorded = False
        self._deadline_s = math.inf

    def choose(self) -> ExecutionSetting:
        """Return the fastest setting found."""
        needs = self._measure()
        self._deadline_s = time.monotonic() + _SEARCH_S  # does not include compilation
        best, tokens, num_slower = self._try(needs, needs.tokens), needs.tokens, 0
        if best is None:
            return ExecutionSetting(micro_tokens=needs.tokens, num_recomputed=self._max_recomputed)
        while tokens < self._max_tokens and num_slower < _MAX_SLOWER and self._is_in_time:
            tokens = min(2 * tokens, self._max_tokens)
            found = self._try(needs, tokens)
            if found is None:
                break
            is_faster = found.tokens_per_s > best.tokens_per_s
            best, num_slower = (found, 0) if is_faster else (best, num_slower + 1)
        return self._run_final(
            self._offload_for_weights(needs, self._try_neighbours(needs, best, tokens))
        )

    def _try_neighbours(
        self, needs: Needs, best: ExecutionSetting, max_tokens: int
    ) -> ExecutionSetting:
        """Return the fastest of the best setting and of sizes halfway to the next ones."""
        found, sizes = [best], []
        if best.micro_tokens < max_tokens:
            sizes.append(min(3 * best.micro_tokens // 2, self._max_tokens))
        if best.micro_tokens > 2 * needs.tokens:
            sizes.append(3 * best.micro_tokens // 4)
        near = (best.micro_tokens, best.micro_tokens // 2)
        known = {count_tokens(self._choose_part(tokens)) for tokens in near}
        for tokens in sizes:
            if count_tokens(self._choose_part(tokens)) not in known and self._is_in_time:
                found.append(self._try(needs, tokens) or best)
        return max(found, key=_read_speed)

    def _offload_for_weights(self, needs: Needs, best: ExecutionSetting) -> ExecutionSetting:
        """Return the fastest of the best setting and of some that offload to dequantize weights.

        Copies cost almost nothing while the bus keeps up, whereas dequantizing in every pass costs
        its full time. The number of layers that recompute does not grow.
        """
        near = [one for one in self.tried if one.tokens_per_s > _NEAR * best.tokens_per_s]
        sizes = {one.micro_tokens: one for one in sorted(near, key=_read_speed)}  # the fastest
        for setting in sorted(sizes.values(), key=_read_speed, reverse=True):
            for plan in self._plan_offload_for_weights(needs, setting):
                if not self._is_in_time:
                    return best
                part = self._choose_part(setting.micro_tokens)
                changed = replace(setting, num_moved=plan.num_moved, tokens_per_s=0.0)
                found, is_roomy = self._try_setting(part, changed)
                best = max(best, found or best, key=_read_speed)
                if is_roomy:
                    break
        return best

    def _plan_offload_for_weights(
        self, needs: Needs, setting: ExecutionSetting
    ) -> Iterator[LayerPlan]:
        """Yield plans that offload more and recompute no more than a setting.

        The first plan leaves room for all weights dequantized, later ones for a share of those
        that are still packed.
        """
        missing_bytes, num_moved = self._dequantizable_bytes[setting], math.inf
        for share in DEQUANTIZED_SHARES if self._recompute == "auto" and missing_bytes else ():
            self._executor.drop_graphs()
            self._executor.layers.drop_dequantized()
            spared_bytes = (1 - share) * missing_bytes
            weight_bytes = self._executor.layers.dequantizable_bytes - spared_bytes
            plan = choose_plan(
                needs,
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
        """Return the setting that is fastest when timed for seconds, of the best ones."""
        near = [one for one in self.tried if one.tokens_per_s > _NEAR * best.tokens_per_s]
        kinds = {(one.micro_tokens, one.plan): one for one in sorted(near, key=_read_speed)}
        rivals = sorted(kinds.values(), key=_read_speed, reverse=True)[:_MAX_FINALISTS]
        if len(rivals) < 2 or best.micro_tokens > _SUSTAINED_S * best.tokens_per_s:
            return best
        for setting in rivals:
            if not self._is_in_time:
                break
            speed = self._time_steps(setting)
            if speed is not None:
                self.finalists.append(replace(setting, tokens_per_s=speed))
        return max(self.finalists, key=_read_speed, default=best)

    def _time_steps(self, setting: ExecutionSetting) -> float | None:
        """Return the tokens per second of whole steps (or long parts), or None if out of memory."""
        apply_setting(self._executor, setting)
        part = self._choose_part(setting.micro_tokens)
        if not self._executor.try_gradients(part):
            return None
        is_recorded = fill_spare_memory(self._executor, self._device, part, self._reserve)
        max_tokens = max(setting.micro_tokens, int(_FINAL_STEP_S * setting.tokens_per_s))
        step = self._choose_part(min(self._max_tokens, max_tokens))
        times_s: list[float] = []
        with nullcontext() if is_recorded else self._executor.without_graphs():
            first_s = self._time_once(step)  # records the graph and warms up the card
            until_s = time.monotonic() + _FINAL_S
            while first_s is not None and (not times_s or time.monotonic() < until_s):
                step_s = self._time_once(step)
                if step_s is None:
                    return None
                times_s.append(step_s)
            self._executor.drop_graphs()
        return count_tokens(step) / statistics.median(times_s) if times_s else None

    @property
    def _is_in_time(self) -> bool:
        return time.monotonic() < self._deadline_s

    @property
    def _max_recomputed(self) -> int:
        return 0 if self._recompute == "none" else self._executor.layers.num_layers

    def _measure(self) -> Needs:
        part, layers = self._choose_part(0), self._executor.layers
        tokens = count_tokens(part)
        least = ExecutionSetting(micro_tokens=tokens, num_recomputed=self._max_recomputed)
        apply_setting(self._executor, least)
        # Compiles. Unlike `try_gradients` it raises an explained error if nothing fits.
        self._executor.add_gradients(part)
        pass_s, once_bytes = (
            self._time(part) or 0.0,
            measure_peak_bytes(self._executor, self._device, part),
        )
        input_bytes = self._read_layer()
        twice = self._choose_part(2 * tokens)
        more = count_tokens(twice) - tokens
        apply_setting(self._executor, replace(least, micro_tokens=2 * tokens))
        token_bytes = once_bytes / tokens
        if more > tokens // 2 and self._executor.try_gradients(twice):
            twice_bytes = measure_peak_bytes(self._executor, self._device, twice)
            token_bytes = min(token_bytes, max(0.0, (twice_bytes - once_bytes) / more))
        layers.set(LayerPlan(num_recomputed=max(0, self._max_recomputed - 1), num_moved=1))
        layer_bytes = self._read_layer() if self._executor.try_gradients(part) else 0
        return Needs(
            tokens=tokens,
            fixed_bytes=once_bytes - token_bytes * tokens,
            token_bytes=token_bytes,
            layer_bytes=layer_bytes / tokens,
            input_bytes=input_bytes / tokens,
            pass_s=pass_s,
            bus_bytes_per_s=measure_bus(self._device) if self._host_bytes else 0.0,
        )

    def _read_layer(self) -> int:
        offloader = self._executor.layers.offloader
        return offloader.max_layer_bytes if offloader is not None else 0

    @property
    def _host_bytes(self) -> int:
        offloader = self._executor.layers.offloader
        return offloader.arena.capacity_bytes if offloader is not None else 0

    def _try(self, needs: Needs, tokens: int) -> ExecutionSetting | None:
        """Return the fastest of some plans for a micro-batch size, or None if none fits.

        Compares offloading with no offloading. Where few tokens make the card wait for its host,
        also compares a plan that fills the memory with one that leaves room for a CUDA graph.
        """
        found = self._try_plan(needs, tokens, may_move=True)
        if found is None:
            return None
        tried = [found]
        if found.num_moved and self._recompute == "auto" and self._is_in_time:
            tried.append(self._try_plan(needs, tokens, may_move=False) or found)
        best = max(tried, key=_read_speed)
        may_record = self._executor.replayer is not None and tokens <= _FEW_TOKENS
        if may_record and self._is_in_time and best not in self._recorded:
            tried.append(self._try_plan(needs, tokens, may_move=True, to_record=True) or best)
        return max(tried, key=_read_speed)

    def _try_plan(
        self, needs: Needs, tokens: int, *, may_move: bool, to_record: bool = False
    ) -> ExecutionSetting | None:
        """Time the plan that should fit, then smaller ones if it does not. None if none fits.

        Args:
            needs: Measured memory needs.
            tokens: Micro-batch size.
            may_move: Whether layers may offload.
            to_record: Leave room for the memory that a CUDA graph holds while the optimizer steps.
        """
        part = self._choose_part(tokens)
        timed: list[ExecutionSetting] = []
        for caution in PLANNED_SHARES[1:] if to_record else PLANNED_SHARES:
            self._executor.drop_graphs()
            self._executor.layers.drop_dequantized()
            reserve = self._reserve
            beside_bytes = reserve.missing_bytes if to_record else reserve.lasting_bytes
            plan = choose_plan(
                needs,
                tokens=tokens,
                num_layers=self._executor.layers.num_layers,
                room_bytes=(read_free_bytes(self._device) - beside_bytes) * caution,
                host_bytes=self._host_bytes,
                recompute=self._recompute,
                may_move=may_move,
            )
            if plan is None or (timed and plan == timed[-1].plan):
                break
            found, is_roomy = self._try_setting(
                part,
                ExecutionSetting(
                    micro_tokens=tokens,
                    num_recomputed=plan.num_recomputed,
                    num_moved=plan.num_moved,
                ),
            )
            if found is not None:
                timed.append(found)
            if is_roomy:
                break
        return max(timed, key=_read_speed, default=None)

    def _try_setting(
        self, part: Part, setting: ExecutionSetting
    ) -> tuple[ExecutionSetting | None, bool]:
        """Return the setting with its speed (None if out of memory), and whether it fits well.

        It does not if the allocator has to flush and reallocate during the passes because of
        fragmentation, which costs more time than the setting gains.
        """
        apply_setting(self._executor, setting)
        if self._executor.try_gradients(part):
            fill_spare_memory(self._executor, self._device, part, self._reserve)
            seconds, is_roomy = self._time(part), True
            is_recorded = self._is_recorded
            if seconds is not None and not is_recorded:
                with self._executor.without_graphs():
                    # A failed recording has emptied the cache; this pass fills it again.
                    self._executor.try_gradients(part)
                    before = count_alloc_retries(self._device)
                    plain_s = self._time(part, passes=1)
                    is_roomy = count_alloc_retries(self._device) == before
                seconds = min(seconds, plain_s or seconds)
            if seconds is not None:
                setting = replace(setting, tokens_per_s=self._rate(part, seconds))
                self.tried.append(setting)
                self._dequantizable_bytes[setting] = self._executor.layers.dequantizable_bytes
                if is_recorded:
                    self._recorded.add(setting)
                return setting, is_roomy
        gc.collect()
        torch.cuda.empty_cache()
        return None, False

    def _rate(self, part: Part, seconds: float) -> float:
        """Return the tokens per second of a step whose largest micro-batch is `part`.

        A step of 16 rows with at most three per micro-batch has four of three rows and two of two.
        Micro-batches of alternating sizes are rarely replayed, so neither is replayed here.
        """
        tokens = count_tokens(part)
        if self._step_tokens is None or self._step_tokens <= tokens:
            return tokens / seconds
        mean_tokens = self._step_tokens / math.ceil(self._step_tokens / tokens)
        less = self._choose_part(int(mean_tokens))
        less_tokens = count_tokens(less)
        if not less_tokens <= mean_tokens < tokens or mean_tokens > _ALIKE * tokens:
            return tokens / seconds
        with self._executor.without_graphs():
            large_s, small_s = self._time(part) or seconds, self._time(less) or seconds
        share = (mean_tokens - less_tokens) / (tokens - less_tokens)
        return mean_tokens / (small_s + (large_s - small_s) * share)

    def _time(self, part: Part, passes: int = _TIMED_PASSES) -> float | None:
        """Return the seconds of the fastest of some passes, or None if memory ran out."""
        times_s: list[float] = []
        while len(times_s) < passes and sum(times_s) < _LONG_S:
            was_recorded = self._executor.held_bytes > 0
            pass_s = self._time_once(part)
            if pass_s is None:
                return None
            times_s.append(pass_s)
        self._is_recorded = self._executor.held_bytes > 0
        # If the last pass was the one that recorded, it was slow: time a replay as well.
        if self._is_recorded and not was_recorded:
            pass_s = self._time_once(part)
            if pass_s is None:
                return None
            times_s.append(pass_s)
        self._executor.drop_graphs()
        return min(times_s)

    def _time_once(self, part: Part) -> float | None:
        torch.cuda.synchronize(self._device)
        started = time.perf_counter()
        if not self._executor.try_gradients(part):
            return None
        torch.cuda.synchronize(self._device)
        return time.perf_counter() - started


def _read_speed(setting: ExecutionSetting) -> float:
    return setting.tokens_per_s


def count_tokens(part: Part) -> int:
    """Return the number of tokens of all examples."""
    return sum(example.num_tokens for example in part.examples)


def measure_bus(device: torch.device) -> float:
    """Return the bandwidth from the GPU to pinned host memory, in bytes per second."""
    host = torch.empty(_PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=device)
    host.copy_(there)
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(4):
        host.copy_(there, non_blocking=True)
    torch.cuda.synchronize(device)
    return 4 * _PROBE_BYTES / (time.perf_counter() - started)
