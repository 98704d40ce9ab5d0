"""Forecast the time that a GPU needs for its part of a step.

The model is a roofline whose terms are summed, since a layer's kernels run one after the other:
matrix products at the card's sustained rate plus the traffic of their operands, which slows down
the thin layers of small models; attention at its own rate; pointwise kernels at the speed of the
card's memory; and 4-bit weights unpacked once per pass, unless free memory holds them unpacked. A
micro-batch that is not replayed takes at least the time in which the host launches it.

The shares below hold for compiled layers (see agents/trainer/execution/layers.py). They were fitted
to 27 passes on an H100 and verified with 23 others (`tests.bench.planning.planning_table`).

FLOPs as in agents/trainer/metrics/flops.py (PaLM, arXiv:2204.02311, appendix B): a frozen weight
counts 4 per token, a trained one 6, and 2 more if its layer recomputes. DPO with an adapter first
runs the base model as reference, and recomputes its logits for their gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from agents.contract.objectives import OBJECTIVES
from agents.contract.spec import RunSpec
from agents.shared.cards import choose_precision
from app.planning import layer_costs
from app.planning.hardware.cluster import PlannedGpu
from app.planning.hardware.rates import Rates
from app.planning.memory.experts import count_met_adapter
from app.planning.memory.forecast import MemorySetting, choose_dtype, count_trained
from app.planning.memory.gpu import GpuMemory, is_compiled
from app.planning.row_lengths import Division, RowLengths, divide
from app.planning.shape.model_shape import ModelShape, choose_targets

LAYER_SHARE = 0.93
"""Rate of a layer's matrix products, as a share of the rate of large ones."""
AGAIN_SHARE = 0.88
"""The same for products that recompute activations."""
HEAD_SHARE = 0.83
"""The same for the head, which works on chunks of tokens."""
ATTENTION_SHARE = 0.36
"""The same for both passes of exact attention, whose backward pass is deterministic."""
TRAFFIC_SHARE = 0.77
"""Rate of the kernels between the products, as a share of the rate of a copy."""
# Additional traffic of recomputing, as a share of the forward pass's: most of it is fused into
# kernels of the backward pass, which need the same values.
_TRAFFIC_AGAIN = 0.25
# Launch overhead of one layer that is not hidden, both passes, in seconds.
_LAYER_PASS_S = 0.00024
# CPU time to launch all kernels of a layer, both passes; additionally for each adapter; and if
# weights are unpacked, in seconds. This lower bound of any pass matters for small models on the
# fastest cards. It is 0.7 of the time that 40 rows took on an H200 while the CPU compiled other
# models; on an idle CPU a pass of 4.4 ms per layer was not delayed yet.
_LAUNCH_S, _LAUNCH_TARGET_S, _LAUNCH_UNPACK_S = 0.0024, 0.00034, 0.0004
# Additional CPU time if a layer recomputes, and if it also unpacks weights, in seconds.
_LAUNCH_AGAIN_S, _LAUNCH_UNPACK_AGAIN_S = 0.0013, 0.002
# Logits per chunk of the loss, and bytes read and written for each: with PyTorch's functions in
# fp32, and with a kernel that turns logits into their gradient in half precision (written by the
# product, read twice, written, read by the next product; measured as long as six such passes).
_CHUNK_LOGITS, _LOGIT_BYTES = 1 << 24, 32
_KERNEL_LOGITS, _KERNEL_LOGIT_BYTES = 1 << 25, 12
# Bytes per chunk and weight of the head: read in both passes; if it is trained, the chunk's part is
# added to its fp32 gradient.
_HEAD_BYTES, _HEAD_BYTES_FULL = 4.0, 16.0
# Heads up to this width slow attention down to this share of its rate.
_NARROW_HEAD, _NARROW_SHARE = 64, 0.65
# Bytes per weight and micro-batch in full training: fp32 weights are read and cast for both passes,
# gradients are written, cast and added. Frozen weights are read while products compute.
_WEIGHT_BYTES_FULL = 28.0
# Cost of a step per trained value, as bytes read and written: torch's AdamW makes a pass over all
# values for each of its operations, and in 8 bits computing takes longer than reading (measured
# with 1.2 and 3.2 billion values on an H200).
_STEP_BYTES = {"adamw": 68.0, "adamw_8bit": 101.0, "paged_adamw_8bit": 109.0}
# Traffic and CPU time of layers that are not compiled, relative to compiled ones. On an H200,
# Transformers with PEFT took 259 and 321 ms for 2,048 and 4,096 tokens of Llama-2-7B in NF4 with
# all activations kept; compiled layers took 137 and 234 ms.
_EAGER_TRAFFIC, _EAGER_LAUNCH = 3.0, 1.9
# Number of micro-batches that gives a typical speed if rows differ in length.
_NUM_TYPICAL = 4
# Kinds of layers whose tokens attend to all previous ones.
_ATTENDING = ("attention", "both")
# Rate of fp32 products relative to bf16; of cards whose tensor cores know fp16 only, relative to
# fp16; and of cards without tensor cores.
_FP32_SHARE, _FP32_SHARE_TURING, _FP32_SHARE_PLAIN = 0.5, 0.25, 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCost:
    """Cost of a model independent of the card, per token of forward and backward pass."""

    layer_flops: float
    """Matrix products of all layers in both passes, adapters included, in FLOPs."""
    layer_again_flops: float
    """Additional products if every layer recomputes its activations, in FLOPs."""
    lost_flops: float
    """Loss of time of the experts' products, which have few rows, as FLOPs of large products."""
    lost_again_flops: float
    attention_flops: float
    attention_again_flops: float
    head_flops: float
    head_weight_bytes: float
    """Reads of the head's weights, in bytes."""
    logit_bytes: float
    traffic_bytes: float
    """Traffic between the products of all layers in both passes, in bytes."""
    traffic_again_bytes: float
    operand_bytes: float
    """Inputs and outputs of the products of all layers in both passes, in bytes."""
    operand_again_bytes: float
    weight_bytes: float
    """Traffic per micro-batch for trained weights and their gradients, in bytes."""
    quantized_values: float
    """Number of 4-bit weights in all layers; those of experts are weighted by their slowness."""
    num_unpacked: int
    """Number of times that each of these weights is unpacked per micro-batch."""
    num_layers: int
    launch_s: float
    """CPU time to launch all kernels of a micro-batch, in seconds."""
    launch_again_s: float
    """Additional CPU time if all layers recompute, in seconds."""
    trained_values: int
    step_bytes: float
    """Traffic of an optimizer step, in bytes."""


def measure_work(shape: ModelShape, spec: RunSpec, mean_tokens: float) -> ModelCost:
    """Count the cost of a token.

    Args:
        mean_tokens: mean length of a row, over which attention spans.

    Llama-2-7B with LoRA r=16 on q, k, v and o in sequences of 2,048: 28.1 GFLOP per token, 57.6
    TFLOP per sequence.

    >>> from agents.contract.spec import AdapterSpec, DataSpec, RunSpec
    >>> from app.planning.shape.model_shape import read_shape
    >>> shape = read_shape({"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096,
    ...     "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32})
    >>> spec = RunSpec(model="m", data=DataSpec(train="d"),
    ...                adapter=AdapterSpec(targets=("q_proj", "k_proj", "v_proj", "o_proj")))
    >>> work = measure_work(shape, spec, 2048)
    >>> round((work.layer_flops + work.attention_flops + work.head_flops) * 2048 / 1e12, 2)
    57.63
    """
    kinds = shape.kinds
    met = sum(count * layer_costs.count_products(layer, spec) for layer, count in kinds)
    lost = sum(count * layer_costs.count_lost_products(layer) for layer, count in kinds)
    held = sum(count * layer_costs.count_met_weights(layer) for layer, count in kinds)
    trained = count_trained(shape, spec)
    full, objective = spec.adapter.kind == "full", OBJECTIVES[spec.objective]
    # The reference is one more forward pass without the adapter.
    asks = int(objective.has_reference and not full)
    # In full training the trained weights are those of the layers, counted in `met`.
    inner = 0 if full else count_met_adapter(shape, spec)
    traffic = sum(
        count * layer_costs.count_traffic_bytes(shape, layer, spec) for layer, count in kinds
    )
    wide = sum(count * layer_costs.count_operand_bytes(layer) for layer, count in kinds)
    mixers = [(count, *layer_costs.count_mixer_bytes(layer)) for layer, count in kinds]
    flops_per_weight = 6.0 if full else 4.0 + 2 * asks
    in_experts = shape.num_nf4 - shape.num_quantized
    has_kernel, again = objective.fuses_loss, int(not objective.fuses_loss)
    chunk_logits = _KERNEL_LOGITS if has_kernel else _CHUNK_LOGITS
    logit_bytes = _KERNEL_LOGIT_BYTES if has_kernel else _LOGIT_BYTES
    length = min(mean_tokens, shape.sliding_window or mean_tokens)
    attending = sum(count for layer, count in shape.kinds if layer.kind in _ATTENDING)
    attended = attending * shape.num_heads * shape.head_dim * length
    if shape.head_dim <= _NARROW_HEAD:
        attended /= _NARROW_SHARE
    return ModelCost(
        layer_flops=flops_per_weight * met + 6.0 * inner,
        layer_again_flops=2.0 * (met + inner),
        lost_flops=flops_per_weight * lost,
        lost_again_flops=2.0 * lost,
        attention_flops=(6.0 + 2 * asks) * attended,
        attention_again_flops=2.0 * attended,
        head_flops=((6.0 if full else 4.0) + 2 * again + 2 * asks) * shape.num_embedding,
        head_weight_bytes=(_HEAD_BYTES_FULL if full else _HEAD_BYTES)
        * shape.num_embedding
        * shape.vocab
        / chunk_logits,
        # Without the fused loss, the logits are computed a second time for their gradient.
        logit_bytes=float(logit_bytes * shape.vocab) * (1 + again),
        traffic_bytes=(3.0 + asks) * traffic + sum(count * one for count, one, _ in mixers),
        traffic_again_bytes=_TRAFFIC_AGAIN * traffic + sum(count * one for count, _, one in mixers),
        operand_bytes=((3.0 if full else 2.0) + asks) * wide,
        operand_again_bytes=wide,
        weight_bytes=_WEIGHT_BYTES_FULL * held if full else 0.0,
        quantized_values=shape.num_quantized + layer_costs.UNPACKED_EXPERT * in_experts
        if spec.adapter.kind == "qlora"
        else 0.0,
        num_unpacked=2 + asks,
        num_layers=shape.num_layers,
        # A backward pass counts as two forward ones, so the reference adds a third.
        launch_s=shape.num_layers * _launch_s(shape, spec) * (1 + asks / 3),
        launch_again_s=shape.num_layers
        * (_LAUNCH_AGAIN_S + (_LAUNCH_UNPACK_AGAIN_S if spec.adapter.kind == "qlora" else 0.0)),
        trained_values=trained,
        step_bytes=_STEP_BYTES[spec.optimizer] * trained,
    )


def _launch_s(shape: ModelShape, spec: RunSpec) -> float:
    if spec.adapter.kind == "full":
        return _LAUNCH_S
    layer, _ = shape.kinds[0]
    targets = len(choose_targets(layer, spec.adapter.targets))
    unpacking = _LAUNCH_UNPACK_S if spec.adapter.kind == "qlora" else 0.0
    return _LAUNCH_S + _LAUNCH_TARGET_S * targets + unpacking


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPace:
    """Time of passes over a model on one card."""

    token_s: float
    """Time of both passes per token, in seconds."""
    again_s: float
    """Additional time per token if all layers recompute their activations, in seconds."""
    weights_s: float
    """Time per micro-batch to cast trained weights and to add their gradients, in seconds."""
    unpack_s: float
    """Time per micro-batch to unpack all 4-bit weights, in seconds."""
    unpack_again_s: float
    """Additional time to unpack if all layers recompute, in seconds."""
    gaps_s: float
    """Time per micro-batch between kernels, which a replay saves, in seconds."""
    launch_s: float
    """Lower bound of a micro-batch whose kernels the host launches one by one, in seconds."""
    launch_again_s: float
    optimizer_s: float
    """Time of an optimizer step, in seconds."""
    num_layers: int
    may_replay: bool = False
    """True if micro-batches of one size are recorded and replayed, without the host."""

    @property
    def pass_s(self) -> float:
        """Fixed time of each micro-batch, in seconds."""
        return self.weights_s + self.unpack_s + self.gaps_s

    @property
    def again_pass_s(self) -> float:
        """Additional fixed time if all layers recompute their activations, in seconds."""
        return self.unpack_again_s

    def keep_unpacked(self, share: float) -> PlannedPace:
        """Return the times with this share of the 4-bit weights kept unpacked."""
        packed = 1.0 - share
        return replace(
            self, unpack_s=packed * self.unpack_s, unpack_again_s=packed * self.unpack_again_s
        )

    def seconds(
        self, tokens: float, setting: MemorySetting, rows: RowLengths, *, ranks: int = 1
    ) -> float:
        """Return the time of all micro-batches of a step, in seconds.

        Args:
            tokens: number of tokens of this GPU's share.
            setting: size of a micro-batch and treatment of the layers' activations.
            rows: lengths of the run's rows; a micro-batch holds whole rows.
            ranks: number of ranks of the run.
        """
        if tokens <= 0:
            return 0.0
        num_rows = max(1, round(tokens / rows.mean_tokens))
        plain = divide(rows, num_rows, setting.micro_tokens, padded=False)
        found = self._sum(plain, setting, num_launched=len(plain.sizes))
        if self.may_replay:
            # Rows of different lengths are padded for replay, unless launching them unpadded is
            # faster. With several ranks the last micro-batch is launched, since gradients are
            # sent while it computes.
            padded = divide(rows, num_rows, setting.micro_tokens, padded=True)
            found = min(found, self._sum(padded, setting, num_launched=int(ranks > 1)))
        # Scaled, since a division repeats a pattern of a limited number of rows.
        return found * tokens / plain.num_tokens

    def _sum(self, division: Division, setting: MemorySetting, *, num_launched: int) -> float:
        """Return the time of micro-batches, the last `num_launched` of which the host launches."""
        again = setting.num_recomputed / self.num_layers if self.num_layers else 0.0
        each_s = self.token_s + again * self.again_s
        fixed_s = self.weights_s + self.unpack_s + again * self.unpack_again_s
        host_s = self.launch_s + again * self.launch_again_s
        computing_s = [size * each_s + fixed_s for size in division.sizes]
        cut = len(computing_s) - num_launched
        launched_s = sum(max(one + self.gaps_s, host_s) for one in computing_s[cut:])
        return sum(computing_s[:cut]) + launched_s

    def tokens_per_s(self, setting: MemorySetting, rows: RowLengths, *, ranks: int = 1) -> float:
        """Return the speed with full micro-batches, in tokens per second."""
        rows_at_once = max(1, int(setting.micro_tokens / rows.mean_tokens))
        # Micro-batches of different rows are filled differently, so take the mean of several.
        tokens = rows_at_once * rows.mean_tokens * (_NUM_TYPICAL if rows.lengths else 1)
        return tokens / self.seconds(tokens, setting, rows, ranks=ranks)


def make_pace(
    work: ModelCost,
    rates: Rates,
    *,
    correction: float = 1.0,
    share: float = 1.0,
    may_replay: bool = False,
    compiled: bool = True,
) -> PlannedPace:
    """Return the time of passes on a card.

    Args:
        work: cost of the whole model.
        rates: rates of the card.
        correction: speed factor learned from past runs.
        share: rate of matrix products in the run's data type, relative to bf16.
        may_replay: whether micro-batches are replayed; see `can_replay`.
        compiled: whether the layers are compiled.
    """
    traffic, launch = (1.0, 1.0) if compiled else (_EAGER_TRAFFIC, _EAGER_LAUNCH)
    matrix_rate = rates.matrix_flops_per_s * share
    layer_rate, again_rate = LAYER_SHARE * matrix_rate, AGAIN_SHARE * matrix_rate
    attention_rate = ATTENTION_SHARE * matrix_rate
    # Traffic at most doubles with a wider type, even if its arithmetic slows down more.
    traffic_rate = rates.copy_bytes_per_s * TRAFFIC_SHARE * max(share, 0.5)
    unpack_s = work.quantized_values / rates.unpack_values_per_s
    head_s = max(
        work.head_flops / (HEAD_SHARE * matrix_rate),
        work.head_weight_bytes / rates.copy_bytes_per_s,
    )
    token_s = (
        (work.layer_flops + work.lost_flops) / layer_rate
        + head_s
        + work.logit_bytes / traffic_rate
        + work.attention_flops / attention_rate
        + traffic * work.traffic_bytes / traffic_rate
        + work.operand_bytes / rates.copy_bytes_per_s
    )
    again_s = (
        (work.layer_again_flops + work.lost_again_flops) / again_rate
        + work.attention_again_flops / attention_rate
        + traffic * work.traffic_again_bytes / traffic_rate
        + work.operand_again_bytes / rates.copy_bytes_per_s
    )
    return PlannedPace(
        token_s=token_s / correction,
        again_s=again_s / correction,
        weights_s=work.weight_bytes / rates.copy_bytes_per_s / correction,
        unpack_s=work.num_unpacked * unpack_s / correction,
        unpack_again_s=unpack_s / correction,
        gaps_s=work.num_layers * _LAYER_PASS_S / correction,
        launch_s=launch * work.launch_s,
        launch_again_s=launch * work.launch_again_s,
        optimizer_s=work.step_bytes / (rates.copy_bytes_per_s * TRAFFIC_SHARE),
        num_layers=work.num_layers,
        may_replay=may_replay,
    )


def can_replay(spec: RunSpec, gpu: GpuMemory) -> bool:
    """Return whether the trainer replays micro-batches, as `autotune.make_replayer` decides."""
    # A recording repeats the same kernels on the same memory, which only compiled layers allow.
    return is_compiled(spec, gpu)


def arithmetic_share(spec: RunSpec, gpu: PlannedGpu) -> float:
    """Return the rate of products in the data type of this run, relative to half precision.

    >>> from agents.contract.spec import DataSpec
    >>> spec = RunSpec(model="m", data=DataSpec(train="d"), precision="fp32")
    >>> [arithmetic_share(spec, PlannedGpu(name=name)) for name in ("RTX 4070", "T4", "GTX 1060")]
    [0.5, 0.25, 1.0]
    """
    memory, card = gpu.memory, gpu.similar
    if gpu.device == "cpu" or memory is None:
        return 1.0
    emulates = choose_precision(memory.capability) != "bf16"
    fp32 = _FP32_SHARE_TURING if emulates else _FP32_SHARE
    if card is not None and not card.has_tensor_cores:
        fp32 = _FP32_SHARE_PLAIN
    # A card without bf16 computes it in fp32.
    slow = {"fp32": fp32, "fp64": fp32 / 32, "bf16": fp32 if emulates else 1.0}
    return slow.get(choose_dtype(spec, memory), 1.0)
