"""Forecast the GPU memory of a rank, part by part.

The formulas describe this project's trainer: trained values and their gradients as flat fp32
buffers, decoder layers that keep, offload or recompute their activations, a loss over chunks of
tokens, 4-bit weights that are unpacked layer by layer. The forecast is the memory allocated at the
fullest moment of a step (see `phases`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from agents.contract.spec import RunSpec
from app.planning.memory.gpu import GpuMemory as GpuMemory
from app.planning.memory.gpu import MemorySetting as MemorySetting
from app.planning.memory.gpu import choose_dtype as choose_dtype
from app.planning.memory.gpu import choose_width, has_kernels
from app.planning.memory.phases import find_step_moment, list_pass_moments
from app.planning.shape.model_shape import ModelShape, choose_targets

GIB = 2**30
# Bytes of optimizer state on the GPU per trained value: two moments. With 8 bits each block of 256
# values has two fp32 scales, which stay on the GPU even if the moments are paged to the host.
_STATE_BYTES = {"adamw": 8.0, "adamw_8bit": 2 + 8 / 256, "paged_adamw_8bit": 8 / 256}
# Three cuBLAS workspaces of 32 MiB each (CUBLAS_WORKSPACE_CONFIG=:4096:8): one of the stream that
# loads, two of the training stream, for the forward and the backward thread.
_LIBRARY_BYTES = 96 << 20
# Ranks of adapters are padded to this multiple; bytes of the two lengths of a DoRA output.
_RANKS_TOGETHER, _LENGTH_BYTES = 8, 8
# Fragmented share of torch's memory: with expandable segments, with NF4, and with fixed segments.
# Weights that are dequantized for one product at a time leave holes among the activations: an H100
# reserved 1 to 10 % beyond the peak of NF4 models, 6 % on average, and 1 to 5 % for others.
_SLACK_SHARE, _SLACK_SHARE_NF4, _SLACK_SHARE_FIXED = 0.02, 0.06, 0.06
# Half width of the range between low and high, as a share of the allocated memory.
_ERROR_SHARE = 0.05
# Channels and buffers of NCCL that torch does not count, in bytes.
_NCCL_BYTES = 100 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryForecast:
    """Bytes on one GPU at the fullest moment of a step; they add up to `expected_bytes`."""

    weights_bytes: int
    """Weights in the type of the computation; in full training the trained values themselves."""
    constants_bytes: int
    """Scales of quantized weights."""
    adapter_bytes: int
    """Trained values of the adapter."""
    gradients_bytes: int
    optimizer_bytes: int
    """Optimizer state, plus temporaries of the step where that is the fullest moment."""
    activations_bytes: int
    """Activations that layers keep for the backward pass."""
    inputs_bytes: int
    """Inputs of the layers that recompute their activations."""
    loss_bytes: int
    """Features, logits of one chunk, and their gradients."""
    workspace_bytes: int
    """Temporaries of the current layer: unpacked weights, gradients, attention's scratch."""
    communication_bytes: int
    """Buffers of collectives, if there are several ranks."""
    slack_bytes: int
    """Fragments between tensors that the allocator cannot return."""
    context_bytes: int
    """CUDA context and kernels, which torch does not count."""
    desktop_bytes: int
    """Memory of other programs."""
    error_share: float = 0.05
    """Half width of the range between low and high, as a share of the allocated memory."""

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by name, in the order of a stacked bar."""
        names = (one.name for one in fields(self) if one.name.endswith("_bytes"))
        return {name.removesuffix("_bytes"): getattr(self, name) for name in names}

    @property
    def expected_bytes(self) -> int:
        """Sum of the parts, in bytes."""
        return sum(self.parts.values())

    @property
    def allocated_bytes(self) -> int:
        """Peak of allocated memory as torch counts it, in bytes.

        The measured peak of a step also contains holes in the memory of replayed passes.
        """
        outside = self.slack_bytes + self.context_bytes + self.desktop_bytes
        return self.expected_bytes - outside

    @property
    def low_bytes(self) -> int:
        """Lower bound of the range, in bytes."""
        slack = self.slack_bytes
        return self.expected_bytes - slack - int(self.error_share * self.allocated_bytes)

    @property
    def high_bytes(self) -> int:
        """Upper bound of the range, in bytes."""
        return self.expected_bytes + int(self.error_share * self.allocated_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Setting that the trainer's own search is expected to choose on a GPU, with its memory."""

    setting: MemorySetting
    memory: MemoryForecast
    room_bytes: int
    """Memory of this GPU that may be in use, other programs included, in bytes."""
    unpacked_share: float = 0.0
    """Share of the 4-bit weights that the free memory holds unpacked, 0 to 1."""

    @property
    def fits(self) -> bool:
        """True if the expected memory is available."""
        return self.memory.expected_bytes <= self.room_bytes


def count_trained(shape: ModelShape, spec: RunSpec) -> int:
    """Return the number of trained values."""
    adapter = spec.adapter
    if adapter.kind == "full":
        return shape.num_parameters
    ends = len(spec.also_trained)
    # Tied embeddings and output layer are one matrix.
    return min(ends, 1 if shape.is_tied else 2) * shape.num_embedding + shape.count_adapter(
        adapter.rank,
        adapter.targets,
        dora=adapter.dora,
        experts=shape.num_experts if adapter.experts else 0,
    )


def count_state_bytes(shape: ModelShape, spec: RunSpec) -> int:
    """Return the bytes of optimizer state on the GPU."""
    return int(_STATE_BYTES[spec.optimizer] * count_trained(shape, spec))


def count_rest_bytes(shape: ModelShape, spec: RunSpec, gpu: GpuMemory) -> int:
    """Return the permanently allocated bytes, without optimizer state and communication."""
    weights, constants = _weights(shape, spec, choose_width(spec, gpu))
    kinds = 1 if spec.adapter.kind == "full" else 2  # trained weights are themselves the values
    trained = 4 * kinds * count_trained(shape, spec)
    return weights + constants + trained + count_copies(shape, spec, gpu)


def count_copies(shape: ModelShape, spec: RunSpec, gpu: GpuMemory) -> int:
    """Return the bytes of the adapters' copies in the type of the products.

    Fused layers with a common input read them (agents/trainer/model/fused_linear.py); their ranks
    are padded. Adapters of experts have no copies. DoRA also holds two lengths for each output.
    """
    adapter = spec.adapter
    if adapter.kind == "full" or not has_kernels(gpu):
        return 0
    rank = -(-adapter.rank // _RANKS_TOGETHER) * _RANKS_TOGETHER
    linears = [
        (count, linear)
        for layer, count in shape.kinds
        for linear in choose_targets(layer, adapter.targets)
    ]
    values = sum(count * rank * (one.num_inputs + one.num_outputs) for count, one in linears)
    lengths = sum(count * one.num_outputs for count, one in linears) if adapter.dora else 0
    return choose_width(spec, gpu) * values + _LENGTH_BYTES * lengths


def estimate_memory(
    shape: ModelShape,
    spec: RunSpec,
    *,
    setting: MemorySetting,
    longest_tokens: int,
    gpu: GpuMemory,
    ranks: int = 1,
    inputs_stay: bool = False,
    has_head: bool = True,
) -> MemoryForecast:
    """Forecast the peak of a rank.

    Args:
        setting: size of a micro-batch and treatment of the layers' activations.
        longest_tokens: length of the longest example; a micro-batch holds at least one.
        gpu: the card.
        ranks: number of ranks in the run; several need buffers to communicate.
        inputs_stay: whether inputs of recomputed layers stay on the GPU; the trainer offloads
            them to host memory.
        has_head: whether this rank computes the loss; in a pipeline only the last stage does.

    Llama-2-7B, NF4, LoRA r=16 on q, k, v and o, one sequence of 2,048 tokens with all activations
    kept: 3.60 GiB of weights with their constants, 0.28 of adapter, gradients and AdamW, 6.19 of
    activations, 0.17 at the loss, 0.09 of cuBLAS.

    >>> from agents.contract.spec import AdapterSpec, DataSpec
    >>> from app.planning.shape.model_shape import read_shape
    >>> shape = read_shape({"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096,
    ...     "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32})
    >>> adapter = AdapterSpec(kind="qlora", dropout=0.0,
    ...                       targets=("q_proj", "k_proj", "v_proj", "o_proj"))
    >>> memory = estimate_memory(shape, RunSpec(model="m", data=DataSpec(train="d"),
    ...     adapter=adapter), setting=MemorySetting(micro_tokens=2048), longest_tokens=2048,
    ...     gpu=GpuMemory(total_bytes=24 * GIB, num_multiprocessors=132))
    >>> round(memory.allocated_bytes / GIB, 2)
    10.33
    """
    trained = count_trained(shape, spec)
    weights, constants = _weights(shape, spec, choose_width(spec, gpu))
    moments = list_pass_moments(
        shape, spec, setting, gpu,
        longest_tokens=longest_tokens, inputs_stay=inputs_stay, has_head=has_head, trained=trained,
    )  # fmt: skip
    moments.append(find_step_moment(spec, trained))
    moment = max(moments, key=lambda one: one.sum_bytes)
    # Uncompressed gradients are reduced in place; compression needs a buffer of fp32 values.
    communication = 0 if ranks == 1 or spec.compression == "none" else 4 * trained
    state = count_state_bytes(shape, spec)
    rest = count_rest_bytes(shape, spec, gpu) + communication + state
    slack_share = _SLACK_SHARE_NF4 if spec.adapter.kind == "qlora" else _SLACK_SHARE
    slack_share = slack_share if gpu.pieces_grow else _SLACK_SHARE_FIXED
    return MemoryForecast(
        weights_bytes=weights,
        constants_bytes=constants,
        adapter_bytes=0
        if spec.adapter.kind == "full"
        else 4 * trained + count_copies(shape, spec, gpu),
        gradients_bytes=4 * trained,
        optimizer_bytes=state + int(moment.step_bytes),
        activations_bytes=int(moment.activations_bytes),
        inputs_bytes=int(moment.inputs_bytes),
        loss_bytes=int(moment.loss_bytes),
        workspace_bytes=int(moment.workspace_bytes) + _LIBRARY_BYTES,
        communication_bytes=communication,
        slack_bytes=int(slack_share * (rest + moment.sum_bytes)),
        context_bytes=gpu.context_bytes + (0 if ranks == 1 else _NCCL_BYTES),
        desktop_bytes=gpu.desktop_bytes,
        # The layers of an unlisted family are a guess.
        error_share=_ERROR_SHARE if shape.is_exact else 2 * _ERROR_SHARE,
    )


def _weights(shape: ModelShape, spec: RunSpec, width: int) -> tuple[int, int]:
    """Return the bytes of the weights and of their quantization constants."""
    if spec.adapter.kind == "full":
        return 4 * shape.num_parameters, 0
    if spec.adapter.kind == "lora":
        return width * shape.num_parameters, 0
    packed = shape.num_nf4
    # One byte for 64 weights, one fp32 for 256 of those (QLoRA, arXiv:2305.14314, section 3).
    constants = packed // 64 + 4 * (packed // (64 * 256))
    return packed // 2 + width * (shape.num_parameters - packed), constants
