"""How much memory of a GPU a rank will take, part by part.

The formulas describe our own trainer: trained values and their gradients as flat fp32 buffers,
decoder layers that keep, move or recompute their activations, a loss over chunks of tokens, 4-bit
weights that are unpacked layer by layer. What is at once in memory at the worst moment adds up to
the forecast; that moment is either the backward pass of the last layer or the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal

from agents.spec import RunSpec
from app.planning.layer_plan import Needs, choose_plan
from app.planning.model_shape import LayerShape, ModelShape, choose_targets

Dtype = Literal["fp32", "bf16", "fp16", "fp64"]
_DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
GIB = 2**30
_CHUNK_VALUES = 1 << 24
"""Logits that the loss computes at once."""
_CONTEXT_BYTES = 520 << 20
"""Of the driver, the kernels and the libraries for one process."""
_MOST_TOKENS = 16384
_MEMORY_SHARE = 0.95
_LEAST_GAIN = 0.02
_OPTIMIZER_COPIES = 5
_SHARE_SLACK = 2
"""These five are those of agents/trainer/tuning.py and fitting.py."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What the trainer chooses for a GPU, and reports."""

    micro_tokens: int
    """At most so many tokens at once, but one sequence at least."""
    num_recomputed: int = 0
    """Layers that compute their activations a second time."""
    num_moved: int = 0
    """Layers whose activations wait in host memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuMemory:
    """What the forecast knows of a GPU."""

    total_bytes: int
    desktop_bytes: int = 0
    """Taken by others before a run starts, as measured: the desktop, browsers."""
    cap_bytes: int | None = None
    """Most that a run may take; None: all that is free."""
    capability: tuple[int, int] = (8, 6)
    """CUDA compute capability; it decides the arithmetic and the kernels of attention."""
    num_multiprocessors: int = 60
    """Attention's exact backward pass keeps more parts apart on cards that have more of them."""
    context_bytes: int = _CONTEXT_BYTES
    """Of the driver and the kernels for one process, outside of torch's own count."""

    @property
    def room_bytes(self) -> int:
        """What may be in use of the card, with what others hold."""
        if self.cap_bytes is None:
            return self.total_bytes
        return min(self.total_bytes, self.cap_bytes + self.context_bytes + self.desktop_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryForecast:
    """Bytes on one GPU at the worst moment of a step; they add up to `expected_bytes`."""

    weights_bytes: int
    """The model as it is computed with; in full training the trained values themselves."""
    constants_bytes: int
    """Scales of quantized weights."""
    adapter_bytes: int
    """Trained values of the adapter."""
    gradients_bytes: int
    optimizer_bytes: int
    """Its state, and what a step needs beside it where that is the worst moment."""
    activations_bytes: int
    """That layers keep for the backward pass."""
    inputs_bytes: int
    """Inputs of the layers that compute their activations again."""
    loss_bytes: int
    """Features, logits of one chunk, and their gradients."""
    workspace_bytes: int
    """Of the layer that is being computed: unpacked weights, gradients, attention's scratch."""
    communication_bytes: int
    """Buffers of the collectives of several ranks."""
    slack_bytes: int
    """Free pieces between tensors that the allocator cannot give back."""
    context_bytes: int
    """Of the driver and the kernels, outside of torch's count."""
    desktop_bytes: int
    """Taken by others."""
    error_share: float = 0.05
    """How far a measurement may lie from what torch is expected to allocate."""

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by name, in the order of a stacked bar."""
        names = (one.name for one in fields(self) if one.name.endswith("_bytes"))
        return {name.removesuffix("_bytes"): getattr(self, name) for name in names}

    @property
    def expected_bytes(self) -> int:
        """The sum of the parts."""
        return sum(self.parts.values())

    @property
    def allocated_bytes(self) -> int:
        """The peak that torch counts as allocated: `memory_bytes` of a step's record."""
        outside = self.slack_bytes + self.context_bytes + self.desktop_bytes
        return self.expected_bytes - outside

    @property
    def low_bytes(self) -> int:
        """Fewer are not expected."""
        slack = self.slack_bytes
        return self.expected_bytes - slack - int(self.error_share * self.allocated_bytes)

    @property
    def high_bytes(self) -> int:
        """More are not expected."""
        return self.expected_bytes + int(self.error_share * self.allocated_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """What the trainer's own search is expected to choose on a GPU."""

    setting: Setting
    memory: MemoryForecast
    room_bytes: int
    """What the run may take of this GPU, with what others hold."""

    @property
    def fits(self) -> bool:
        """Whether the expected need is within the room."""
        return self.memory.expected_bytes <= self.room_bytes


def choose_dtype(spec: RunSpec, gpu: GpuMemory) -> Dtype:
    """Return the arithmetic of the base model on this GPU, as the trainer chooses it."""
    if spec.precision != "auto":
        return spec.precision
    return "bf16" if gpu.capability >= (8, 0) else "fp16"


def count_trained(shape: ModelShape, spec: RunSpec) -> int:
    """Return how many values are trained."""
    adapter = spec.adapter
    if adapter.kind == "full":
        return shape.num_parameters
    return shape.count_adapter(adapter.rank, adapter.targets, dora=adapter.dora)


def estimate_memory(
    shape: ModelShape,
    spec: RunSpec,
    *,
    setting: Setting,
    longest_tokens: int,
    gpu: GpuMemory,
    ranks: int = 1,
) -> MemoryForecast:
    """Forecast the peak of a rank.

    Args:
        setting: tokens at once and what the layers do.
        longest_tokens: of one example; a micro-batch holds one at least.
        gpu: the card.
        ranks: of the whole run; more than one need buffers to communicate.
    """
    tokens = -(-max(setting.micro_tokens, longest_tokens) // 64) * 64
    width = _DTYPE_BYTES[choose_dtype(spec, gpu)]
    trained = count_trained(shape, spec)
    weights, constants = _weights(shape, spec, width)
    num_recomputed = min(setting.num_recomputed, shape.num_layers)
    num_moved = min(setting.num_moved, shape.num_layers - num_recomputed)
    num_kept = shape.num_layers - num_recomputed - num_moved
    layer = shape.layers[-1]
    kept = tokens * _kept_bytes(shape, layer, spec, width)
    held = num_kept + min(2, num_moved)
    full = spec.adapter.kind == "full"
    allocated = weights + trained * 8
    forecast = MemoryForecast(
        weights_bytes=weights,
        constants_bytes=constants,
        adapter_bytes=0 if full else 4 * trained,
        gradients_bytes=4 * trained,
        optimizer_bytes=_optimizer_bytes(spec, trained),
        activations_bytes=held * kept,
        inputs_bytes=num_recomputed * tokens * shape.hidden * width,
        loss_bytes=16 * _CHUNK_VALUES,
        workspace_bytes=_workspace_bytes(shape, layer, tokens, width) + (kept if not held else 0),
        communication_bytes=0 if ranks == 1 else 64 << 20,
        slack_bytes=int(0.02 * allocated),
        context_bytes=gpu.context_bytes,
        desktop_bytes=gpu.desktop_bytes,
    )
    return forecast


def choose_setting(
    shape: ModelShape,
    spec: RunSpec,
    *,
    longest_tokens: int,
    mean_tokens: float,
    gpu: GpuMemory,
    ranks: int = 1,
    host_bytes: int = 0,
    bus_bytes_per_s: float = 0.0,
    token_s: Callable[[Setting], float],
) -> Fit:
    """Forecast what the trainer's own search will choose.

    It starts with one example at once and takes twice as many tokens as long as that is faster,
    letting more layers move or recompute where memory asks for it.

    Args:
        longest_tokens: of one example.
        mean_tokens: of the examples; with the batch they say how much can be done at once.
        gpu: the card.
        ranks: of the whole run.
        host_bytes: of this PC's memory that may hold activations.
        bus_bytes_per_s: from the card to host memory; 0: nothing can be moved.
        token_s: seconds of a token, both passes, under a setting.
    """
    search = _Search(
        shape=shape, spec=spec, longest_tokens=longest_tokens, gpu=gpu, ranks=ranks,
        host_bytes=host_bytes, bus_bytes_per_s=bus_bytes_per_s, token_s=token_s,
    )  # fmt: skip
    batch_tokens = spec.batch_sequences * mean_tokens
    most = int(batch_tokens if ranks == 1 else batch_tokens * _SHARE_SLACK / ranks)
    setting = search.choose(min(_MOST_TOKENS, max(longest_tokens, most)))
    return Fit(setting=setting, memory=search.estimate(setting), room_bytes=gpu.room_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Search:
    """The search of agents/trainer/tuning.py, with forecasts in the place of measurements."""

    shape: ModelShape
    spec: RunSpec
    longest_tokens: int
    gpu: GpuMemory
    ranks: int
    host_bytes: int
    bus_bytes_per_s: float
    token_s: Callable[[Setting], float]

    def estimate(self, setting: Setting) -> MemoryForecast:
        return estimate_memory(
            self.shape,
            self.spec,
            setting=setting,
            longest_tokens=self.longest_tokens,
            gpu=self.gpu,
            ranks=self.ranks,
        )

    def choose(self, most_tokens: int) -> Setting:
        """Return the fastest setting, or the smallest one where none fits."""
        num_all = 0 if self.spec.recompute == "none" else self.shape.num_layers
        least = Setting(micro_tokens=self.longest_tokens, num_recomputed=num_all)
        needs, room_bytes = self._needs(least), self._room_bytes()
        best = self._try(needs, room_bytes, self.longest_tokens)
        if best is None:
            return least
        while best.micro_tokens < most_tokens:
            now = best.micro_tokens
            found = self._try(needs, room_bytes, min(2 * now, most_tokens))
            if found is None or self.token_s(found) * (1 + _LEAST_GAIN) > self.token_s(best):
                between = self._try(needs, room_bytes, min(3 * now // 2, most_tokens))
                return min((s for s in (best, found, between) if s), key=self.token_s)
            best = found
        return best

    def _needs(self, least: Setting) -> Needs:
        tokens = self.longest_tokens
        twice = replace(least, micro_tokens=2 * tokens)
        once_bytes, twice_bytes = (
            count_pass_bytes(self.shape, self.spec, setting, self.gpu) for setting in (least, twice)
        )
        token_bytes = min(once_bytes / tokens, (twice_bytes - once_bytes) / tokens)
        layer, width = self.shape.layers[-1], _DTYPE_BYTES[choose_dtype(self.spec, self.gpu)]
        return Needs(
            fixed_bytes=once_bytes - token_bytes * tokens,
            token_bytes=token_bytes,
            layer_bytes=_kept_bytes(self.shape, layer, self.spec, width),
            input_bytes=self.shape.hidden * width,
            token_s=self.token_s(least),
            bus_bytes_per_s=self.bus_bytes_per_s if self.host_bytes else 0.0,
        )

    def _room_bytes(self) -> float:
        """Return what the passes may take beside what is there at rest, as the trainer counts."""
        trained_bytes = 4 * count_trained(self.shape, self.spec)
        weights = sum(
            _weights(self.shape, self.spec, _DTYPE_BYTES[choose_dtype(self.spec, self.gpu)])
        )
        rest = weights + trained_bytes * (1 if self.spec.adapter.kind == "full" else 2)
        most = self.gpu.room_bytes - self.gpu.desktop_bytes - self.gpu.context_bytes
        return most * _MEMORY_SHARE - rest - _OPTIMIZER_COPIES * trained_bytes

    def _try(self, needs: Needs, room_bytes: float, tokens: int) -> Setting | None:
        """Return the faster of moving and not moving; None: the card is too small."""
        found: list[Setting] = []
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
                    Setting(
                        micro_tokens=tokens,
                        num_recomputed=plan.num_recomputed,
                        num_moved=plan.num_moved,
                    )
                )
        return min(found, key=self.token_s, default=None)


def count_pass_bytes(shape: ModelShape, spec: RunSpec, setting: Setting, gpu: GpuMemory) -> int:
    """Return what forward and backward passes need at most, beside what is there at rest."""
    memory = estimate_memory(
        shape, spec, setting=setting, longest_tokens=setting.micro_tokens, gpu=gpu
    )
    return (
        memory.activations_bytes + memory.inputs_bytes + memory.loss_bytes + memory.workspace_bytes
    )


def _weights(shape: ModelShape, spec: RunSpec, width: int) -> tuple[int, int]:
    """Return bytes of the weights and of their constants."""
    if spec.adapter.kind == "full":
        return 4 * shape.num_parameters, 0
    if spec.adapter.kind == "lora":
        return width * shape.num_parameters, 0
    packed = shape.num_quantized
    # One byte for 64 weights, one fp32 for 256 of those (QLoRA, arXiv:2305.14314, section 3).
    constants = packed // 64 + 4 * (packed // (64 * 256))
    return packed // 2 + width * (shape.num_parameters - packed), constants


def _optimizer_bytes(spec: RunSpec, trained: int) -> int:
    return {"adamw": 8, "adamw_8bit": 2, "paged_adamw_8bit": 0}[spec.optimizer] * trained


def _kept_bytes(shape: ModelShape, layer: LayerShape, spec: RunSpec, width: int) -> int:
    """Return what a layer keeps for each token."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    met = shape.expert_ffn * shape.num_experts_met if layer.num_router else shape.ffn
    wide = 2 * shape.hidden + 2 * queries + 2 * keys + 2 * met
    inner = spec.adapter.rank * len(choose_targets(layer, spec.adapter.targets))
    return width * (wide + (0 if spec.adapter.kind == "full" else inner)) + 4 * shape.num_heads


def _workspace_bytes(shape: ModelShape, layer: LayerShape, tokens: int, width: int) -> int:
    """Return what the backward pass of one layer needs beside what was kept."""
    largest = max(one.num_weights for one in layer.linears)
    return width * (largest + tokens * (3 * shape.ffn + 2 * shape.hidden))
