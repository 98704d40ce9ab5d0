"""How much memory of a GPU a rank will take, part by part.

The formulas describe our own trainer: trained values and their gradients as flat fp32 buffers,
decoder layers that keep, move or recompute their activations, a loss over chunks of tokens, 4-bit
weights that are unpacked layer by layer. What is at once in memory at the worst moment adds up to
the forecast; that moment is either the backward pass of the last layer or the optimizer's step.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from agents.spec import RunSpec
from app.planning.model_shape import LayerShape, ModelShape, choose_targets

Dtype = Literal["fp32", "bf16", "fp16", "fp64"]
_DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
GIB = 2**30
_CHUNK_VALUES = 1 << 24
"""Logits that the loss computes at once."""
_CONTEXT_BYTES = 520 << 20
"""Of the driver, the kernels and the libraries for one process."""


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
    tokens_per_s: float = 0.0,
) -> Fit:
    """Forecast what the trainer's own search will choose.

    Args:
        longest_tokens: of one example.
        mean_tokens: of the examples; with the batch they say how much can be done at once.
        gpu: the card.
        ranks: of the whole run.
        host_bytes: of this PC's memory that may hold activations.
        bus_bytes_per_s: from the card to host memory; 0: nothing can be moved.
        tokens_per_s: of the card with every layer recomputing; 0: not known.
    """
    setting = Setting(micro_tokens=longest_tokens)
    room_bytes = gpu.total_bytes
    memory = estimate_memory(
        shape, spec, setting=setting, longest_tokens=longest_tokens, gpu=gpu, ranks=ranks
    )
    return Fit(setting=setting, memory=memory, room_bytes=room_bytes)


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
