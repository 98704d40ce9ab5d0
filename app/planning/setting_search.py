"""Forecast the setting that the trainer's own search will choose on a GPU.

The search is that of agents/trainer/execution/tuner.py, with forecasts instead of measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from agents.contract.layer_plan import (
    LEAST_GAIN,
    MEMORY_SHARE,
    MOST_TOKENS,
    SHARE_SLACK,
    Needs,
    choose_plan,
)
from agents.contract.spec import RunSpec
from app.planning.memory.forecast import (
    Fit,
    GpuMemory,
    MemoryForecast,
    MemorySetting,
    count_rest_bytes,
    count_state_bytes,
    estimate_memory,
)
from app.planning.memory.gpu import choose_width
from app.planning.memory.phases import measure_layers, worst_pass_bytes
from app.planning.shape.model_shape import ModelShape

# Share of the card's memory that unpacked weights leave free beyond the trainer's own margin.
_SPARE_SLACK = 0.02
# Maximum number of further searches with less room after a setting turned out too large.
_MAX_RETRIES = 8


def choose_setting(  # noqa: PLR0913 - all that the search depends on
    shape: ModelShape,
    spec: RunSpec,
    *,
    longest_tokens: int,
    mean_tokens: float,
    gpu: GpuMemory,
    ranks: int = 1,
    host_bytes: int = 0,
    bus_bytes_per_s: float = 0.0,
    token_s: Callable[[MemorySetting], float],
) -> Fit:
    """Forecast the setting that the trainer's own search will choose.

    It starts with one example and doubles the tokens of a micro-batch as long as that is faster,
    offloading or recomputing more layers where memory requires it.

    Args:
        longest_tokens: length of the longest example.
        mean_tokens: mean length of an example; a micro-batch never exceeds a rank's batch.
        gpu: the card.
        ranks: number of ranks in the run.
        host_bytes: host memory that may hold offloaded activations.
        bus_bytes_per_s: bandwidth from the card to host memory; 0: nothing can be offloaded.
        token_s: returns the seconds of a token in both passes under a setting.
    """
    search = _Search(
        shape=shape, spec=spec, longest_tokens=longest_tokens, gpu=gpu, ranks=ranks,
        host_bytes=host_bytes, bus_bytes_per_s=bus_bytes_per_s, token_s=token_s,
    )  # fmt: skip
    batch_tokens = spec.batch_sequences * mean_tokens
    most = int(batch_tokens if ranks == 1 else batch_tokens * SHARE_SLACK / ranks)
    most_tokens = min(MOST_TOKENS, max(longest_tokens, most))
    setting = search.choose(most_tokens)
    memory = search.estimate(setting)
    # The search extrapolates bytes per token; the full forecast may be higher, as the trainer
    # notices when it tries a setting. Then search again with less room.
    taken_bytes = 0
    for _ in range(_MAX_RETRIES):
        over_bytes = memory.expected_bytes - gpu.room_bytes
        if over_bytes <= 0:
            break
        # Doubled, so that the loop ends after few searches.
        taken_bytes = 2 * taken_bytes + over_bytes
        setting = search.choose(most_tokens, taken_bytes)
        memory = search.estimate(setting)
    return Fit(
        setting=setting,
        memory=memory,
        room_bytes=gpu.room_bytes,
        unpacked_share=share_unpacked(shape, spec, gpu, memory),
    )


def share_unpacked(
    shape: ModelShape, spec: RunSpec, gpu: GpuMemory, memory: MemoryForecast
) -> float:
    """Return the share of the 4-bit weights that the trainer keeps unpacked in free memory.

    See `fill_spare_memory` in agents/trainer/execution/setting.py.
    """
    if spec.adapter.kind != "qlora":
        return 0.0
    most = gpu.room_bytes - gpu.desktop_bytes - gpu.context_bytes
    spare = most * (MEMORY_SHARE - _SPARE_SLACK) - memory.allocated_bytes
    # An unpacked weight replaces half a byte by the full width of its type.
    return min(1.0, max(0.0, spare / ((choose_width(spec, gpu) - 0.5) * shape.num_nf4)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Search:
    """State of one search."""

    shape: ModelShape
    spec: RunSpec
    longest_tokens: int
    gpu: GpuMemory
    ranks: int
    host_bytes: int
    bus_bytes_per_s: float
    token_s: Callable[[MemorySetting], float]

    def estimate(self, setting: MemorySetting) -> MemoryForecast:
        return estimate_memory(
            self.shape,
            self.spec,
            setting=setting,
            longest_tokens=self.longest_tokens,
            gpu=self.gpu,
            ranks=self.ranks,
        )

    def choose(self, most_tokens: int, taken_bytes: int = 0) -> MemorySetting:
        """Return the fastest setting, or the smallest one if no setting fits.

        Args:
            most_tokens: limit of a micro-batch, in tokens.
            taken_bytes: additional memory that passes may not use, in bytes.
        """
        num_all = 0 if self.spec.recompute == "none" else self.shape.num_layers
        least = MemorySetting(micro_tokens=self.longest_tokens, num_recomputed=num_all)
        needs, room_bytes = self._needs(least), self._room_bytes() - taken_bytes
        best = self._try(needs, room_bytes, self.longest_tokens)
        if best is None:
            return least
        while best.micro_tokens < most_tokens:
            now = best.micro_tokens
            found = self._try(needs, room_bytes, min(2 * now, most_tokens))
            if found is None or self.token_s(found) * (1 + LEAST_GAIN) > self.token_s(best):
                # Doubling no longer pays; the trainer also tries half of that step.
                between = self._try(needs, room_bytes, min(3 * now // 2, most_tokens))
                return min((s for s in (best, found, between) if s), key=self.token_s)
            best = found
        return best

    def _needs(self, least: MemorySetting) -> Needs:
        tokens = self.longest_tokens
        twice = replace(least, micro_tokens=2 * tokens)
        # Two points give the bytes per token and the fixed part.
        once_bytes, twice_bytes = (
            worst_pass_bytes(self.shape, self.spec, setting, self.gpu, longest_tokens=tokens)
            for setting in (least, twice)
        )
        token_bytes = min(once_bytes / tokens, (twice_bytes - once_bytes) / tokens)
        layer = measure_layers(self.shape, self.spec, self.gpu, tokens, 1)
        return Needs(
            tokens=1,
            fixed_bytes=once_bytes - token_bytes * tokens,
            token_bytes=token_bytes,
            layer_bytes=layer.kept_bytes / tokens,
            input_bytes=layer.input_bytes / tokens,
            pass_s=self.token_s(least),
            bus_bytes_per_s=self.bus_bytes_per_s if self.host_bytes else 0.0,
        )

    def _room_bytes(self) -> float:
        """Return the bytes that the passes may use, by the trainer's rule."""
        rest_bytes = count_rest_bytes(self.shape, self.spec, self.gpu)
        most = self.gpu.room_bytes - self.gpu.desktop_bytes - self.gpu.context_bytes
        return most * MEMORY_SHARE - rest_bytes - count_state_bytes(self.shape, self.spec)

    def _try(self, needs: Needs, room_bytes: float, tokens: int) -> MemorySetting | None:
        """Return the faster setting of offloading and not offloading; None: neither fits."""
        found: list[MemorySetting] = []
        for may_move in (True, False):
            plan = choose_plan(
                needs,
                tokens=tokens,
                num_layers=self.shape.num_layers,
                room_bytes=room_bytes,
                host_bytes=self.host_bytes,
                recompute=self.spec.recompute,
                may_move=may_move,
            )
            if plan is not None:
                found.append(
                    MemorySetting(
                        micro_tokens=tokens,
                        num_recomputed=plan.num_recomputed,
                        num_moved=plan.num_moved,
                    )
                )
        return min(found, key=self.token_s, default=None)
