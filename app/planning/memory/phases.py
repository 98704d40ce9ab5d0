"""List the moments of a step at which memory may peak, and the allocated bytes at each.

At the loss and in the gradient of the last norm all kept activations are allocated. The backward
pass then frees them layer by layer. Layers that recompute are the first of the model, so their
backward passes come last. The optimizer steps when all activations are freed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from agents.contract.layer_plan import LayerPlan
from agents.contract.objectives import OBJECTIVES
from agents.contract.spec import RunSpec
from app.planning.memory.eager_layers import measure_eager_layer
from app.planning.memory.experts import count_experts
from app.planning.memory.gpu import GpuMemory, MemorySetting, choose_width, has_kernels, is_compiled
from app.planning.memory.layers import LayerMemory, measure_layer, read_sizes
from app.planning.shape.model_shape import LayerShape, ModelShape

# Number of logits that the loss computes at once: with PyTorch's functions, and with a kernel that
# turns logits in half precision into their gradient in place.
_CHUNK_VALUES, _KERNEL_VALUES = 1 << 24, 1 << 25
# Bytes per logit: logits, exponents and gradients, those of the previous chunk included.
_CHUNK_BYTES = 16
# Bytes per weight of a trained head: its fp32 gradient and two narrow copies. If it is tied to the
# embedding, the gradient stays allocated until the embedding's is added at the end of the pass.
_HEAD_BYTES_FULL, _HEAD_BYTES_HELD = 8, 4
# Bytes per logit and per weight when a chunk's part is added to that gradient: one more narrow copy
# of the weights, but less of the chunk.
_ADDED_CHUNK, _ADDED_HEAD = 10, 10
# Bytes per feature of each token in the gradient of a last norm that is not compiled: fp32 copies,
# counted tensor by tensor. In full training one of them is the residual stream itself.
_NORM_BYTES, _NORM_BYTES_FULL = 24, 20
# Copies in the products' type in the gradient of a compiled last norm: its input, the gradient of
# the features, that gradient times a factor, and spread over all tokens.
_NORM_COPIES = 4
# Flat rows are padded to a multiple of this number of tokens.
_SIZE_STEP = 64
# Inputs of recomputed layers on the GPU: being copied to the host at the loss, and being copied
# back in addition to the current layer's; the last figure if few layers keep or move activations.
_LEAVING_INPUTS, _COMING_INPUTS, _FEW_INPUTS = 5, 4, 2
# Limit up to which gradients of adapters are held to the end of a micro-batch
# (agents/trainer/execution/executor.py).
_MAX_HELD_BYTES = 1 << 28
# Values of rotary angles for each token, in copies of a head's width: sine and cosine.
_ANGLES = 2
# Logits come in multiples of this number of tokens.
_TILE_TOKENS = 128
_HOPPER = 9
# Bytes per trained value while the optimizer steps: AdamW's denominator takes two tensors.
_STEP_BYTES = {"adamw": 8, "adamw_8bit": 0, "paged_adamw_8bit": 0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Bytes at one moment, beyond the permanently allocated ones."""

    activations_bytes: float = 0.0
    inputs_bytes: float = 0.0
    loss_bytes: float = 0.0
    workspace_bytes: float = 0.0
    step_bytes: float = 0.0

    def add(self, *, loss_bytes: float, workspace_bytes: float) -> Moment:
        """Return a moment with these bytes added."""
        return replace(
            self,
            loss_bytes=self.loss_bytes + loss_bytes,
            workspace_bytes=self.workspace_bytes + workspace_bytes,
        )

    @property
    def sum_bytes(self) -> float:
        """Sum of all parts, in bytes."""
        held = self.activations_bytes + self.inputs_bytes + self.loss_bytes
        return held + self.workspace_bytes + self.step_bytes


def list_pass_moments(
    shape: ModelShape,
    spec: RunSpec,
    setting: MemorySetting,
    gpu: GpuMemory,
    *,
    longest_tokens: int,
    inputs_stay: bool = False,
    has_head: bool = True,
    trained: int = 0,
) -> list[Moment]:
    """Return the moments of the forward and backward passes of a micro-batch.

    For the arguments see `estimate_memory`; `trained` is the number of trained values.
    """
    asked = max(setting.micro_tokens, longest_tokens)
    tokens = -(-asked // _SIZE_STEP) * _SIZE_STEP
    one = measure_layers(shape, spec, gpu, tokens, max(1, asked // longest_tokens))
    num_recomputed = min(setting.num_recomputed, shape.num_layers)
    num_moved = min(setting.num_moved, shape.num_layers - num_recomputed)
    plan = LayerPlan(num_recomputed=num_recomputed, num_moved=num_moved)
    width = choose_width(spec, gpu)
    held = Moment(
        activations_bytes=_count_activations(shape, spec, plan, one),
        inputs_bytes=_count_inputs(plan, inputs_stay=inputs_stay) * one.input_bytes,
        workspace_bytes=_ANGLES * width * shape.head_dim * tokens,
    )
    ends = _list_ends(shape, spec, tokens, gpu) if has_head else []
    # All kept activations are still allocated while the loss is computed.
    moments = [replace(held, loss_bytes=end) for end in ends]
    full = spec.adapter.kind == "full"
    waiting = _HEAD_BYTES_HELD * shape.num_embedding if full and shape.is_tied else 0
    if num_recomputed < shape.num_layers:
        moments.append(held.add(loss_bytes=waiting, workspace_bytes=one.backward_bytes))
    if num_recomputed:
        gradients = 0 if full or 4 * trained > _MAX_HELD_BYTES else 4 * trained
        in_flight = plan.count_in_flight(shape.num_layers)
        most = num_recomputed if inputs_stay else _COMING_INPUTS
        if plan.is_sparse(shape.num_layers) and not inputs_stay:
            most = _FEW_INPUTS
        # Two candidates for the peak: while inputs of earlier layers are copied back, and in the
        # first layer, whose backward pass is the last, when gradients of all others are held.
        for others in {min(num_recomputed - 1, most), 0}:
            done = max(0, shape.num_layers - 1 - others) / shape.num_layers
            moments.append(
                Moment(
                    activations_bytes=in_flight * one.kept_bytes,
                    inputs_bytes=others * one.input_bytes,
                    loss_bytes=waiting,
                    workspace_bytes=held.workspace_bytes + one.again_bytes + done * gradients,
                )
            )
    return moments


def _count_activations(
    shape: ModelShape, spec: RunSpec, plan: LayerPlan, one: LayerMemory
) -> float:
    """Return the bytes of kept activations when the loss is computed."""
    num_kept = shape.num_layers - plan.num_recomputed - plan.num_moved
    found = (num_kept + plan.count_in_flight(shape.num_layers)) * one.kept_bytes
    # The first layer keeps no input, since an adapter run trains nothing before it.
    is_first_kept = num_kept == shape.num_layers and spec.adapter.kind != "full"
    return found - one.input_bytes if is_first_kept else found


def _count_inputs(plan: LayerPlan, *, inputs_stay: bool) -> int:
    """Return the number of recomputed layers' inputs on the GPU when the loss is computed."""
    if inputs_stay:
        return plan.num_recomputed
    # Recomputed layers come first, so layers that offload later have waited for their copies.
    return 0 if plan.num_moved else min(plan.num_recomputed, _LEAVING_INPUTS)


def _list_ends(
    shape: ModelShape, spec: RunSpec, tokens: int, gpu: GpuMemory
) -> tuple[float, float]:
    """Return the bytes of the model's end: in the loss, and in the gradient of its last norm."""
    features, width = tokens * shape.hidden, choose_width(spec, gpu)
    chunk_bytes = _count_chunk(shape, spec, tokens, gpu)
    if spec.adapter.kind != "full":
        # A compiled norm keeps its input, one that is not compiled an fp32 copy of it.
        kept = width if is_compiled(spec, gpu) else 4
        norm = _NORM_COPIES * width if is_compiled(spec, gpu) else _NORM_BYTES
        return chunk_bytes + (kept + 2 * width) * features, norm * features
    head = shape.num_embedding
    # A chunk of the kernel does not shrink while its part is added to the gradient.
    added_bytes = min(chunk_bytes, _ADDED_CHUNK * _CHUNK_VALUES)
    loss = 12 * features + max(
        chunk_bytes + _HEAD_BYTES_FULL * head, added_bytes + _ADDED_HEAD * head
    )
    return loss, _NORM_BYTES_FULL * features + _HEAD_BYTES_HELD * head


def _count_chunk(shape: ModelShape, spec: RunSpec, tokens: int, gpu: GpuMemory) -> int:
    """Return the bytes of the logits that exist at once, those of the previous chunk included."""
    width = choose_width(spec, gpu)
    if not OBJECTIVES[spec.objective].fuses_loss or width != 2 or not has_kernels(gpu):
        return _CHUNK_BYTES * _CHUNK_VALUES
    rows = _KERNEL_VALUES // shape.vocab
    rows = rows // _TILE_TOKENS * _TILE_TOKENS or rows
    return width * shape.vocab * min(tokens, 2 * rows)


def find_step_moment(spec: RunSpec, num_trained: int) -> Moment:
    """Return the moment of the optimizer's step."""
    return Moment(step_bytes=_STEP_BYTES[spec.optimizer] * num_trained)


def worst_pass_bytes(
    shape: ModelShape, spec: RunSpec, setting: MemorySetting, gpu: GpuMemory, *, longest_tokens: int
) -> float:
    """Return the peak of the passes beyond the permanently allocated memory, in bytes."""
    moments = list_pass_moments(shape, spec, setting, gpu, longest_tokens=longest_tokens)
    return max(moment.sum_bytes for moment in moments)


def measure_layers(
    shape: ModelShape, spec: RunSpec, gpu: GpuMemory, tokens: int, num_segments: int
) -> LayerMemory:
    """Return the memory of a layer: the mean of the kept bytes, the maximum of the peaks.

    Layers count as compiled if they would be on this card.
    """
    found = {
        layer: _measure_layer(shape, layer, spec, gpu, tokens, num_segments)
        for layer, _ in shape.kinds
    }
    kept_bytes = sum(count * found[layer].kept_bytes for layer, count in shape.kinds)
    backward_bytes = freed_bytes = 0.0
    for layer in reversed(shape.layers):
        memory = found[layer]
        # The activations of later layers are freed by then.
        backward_bytes = max(backward_bytes, memory.backward_bytes - freed_bytes)
        freed_bytes += memory.kept_bytes
    return LayerMemory(
        kept_bytes=kept_bytes / shape.num_layers,
        input_bytes=found[shape.layers[0]].input_bytes,
        backward_bytes=backward_bytes,
        again_bytes=max(one.again_bytes for one in found.values()),
    )


def _measure_layer(
    shape: ModelShape,
    layer: LayerShape,
    spec: RunSpec,
    gpu: GpuMemory,
    tokens: int,
    num_segments: int,
) -> LayerMemory:
    sizes = read_sizes(shape, layer, spec)
    kind, width = spec.adapter.kind, choose_width(spec, gpu)
    experts = count_experts(shape, layer, spec, width=width, tokens=tokens)
    if is_compiled(spec, gpu):
        return measure_layer(
            sizes,
            kind=kind,
            width=width,
            tokens=tokens,
            num_segments=num_segments,
            num_multiprocessors=gpu.num_multiprocessors,
            is_exact=spec.exact,
            is_hopper=gpu.capability[0] == _HOPPER,
            experts=experts,
        )
    return measure_eager_layer(
        sizes,
        kind=kind,
        width=width,
        tokens=tokens,
        longest_tokens=-(-tokens // num_segments),
        num_segments=num_segments,
        num_multiprocessors=gpu.num_multiprocessors,
        is_exact=spec.exact,
        has_kernels=has_kernels(gpu),
        experts=experts,
    )
