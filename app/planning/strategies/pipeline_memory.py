"""Memory of a pipeline's stage on its GPU, and in the RAM of its PC if it offloads.

A stage holds several micro-batches between their passes. If its layers recompute, it holds only the
layers' inputs, possibly in pinned host memory (agents/trainer/execution/activation_offload.py).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agents.contract.layer_plan import HOST_SHARE, STAGE_CHUNK_BYTES
from agents.contract.spec import RunSpec
from app.planning.memory.forecast import Fit, MemoryForecast, MemorySetting, estimate_memory
from app.planning.memory.gpu import choose_width
from app.planning.plan_context import Case, Worker, correct
from app.planning.shape.model_shape import ModelShape

# Copies of a micro-batch's features that stay on the GPU until its backward pass: those that
# entered the stage, where that pass ends, and those that left it, where it begins.
_ENTERED, _LEFT = 1, 1
# Fragmented share of a stage's memory if torch's segments cannot grow, as under WSL2: 1.07 GiB in
# addition to 9.74, measured in the first stage of a 70B model on an H200 with nine micro-batches of
# 2,048 tokens.
_STAGE_HOLES_SHARE = 0.11


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """How all stages hold a micro-batch until its backward pass."""

    again: bool
    """True if layers recompute their activations."""
    offloads: bool = False
    """True if inputs of recomputing layers are kept in host memory."""

    def set_up(self, case: Case, num_layers: int) -> MemorySetting:
        """Return the setting of a stage with this number of layers."""
        return MemorySetting(
            micro_tokens=case.longest_tokens, num_recomputed=num_layers if self.again else 0
        )


def list_holdings(case: Case) -> list[Holding]:
    """Return the holdings that the run allows, the fastest first."""
    keeps, again = Holding(again=False), Holding(again=True)
    moves = Holding(again=True, offloads=True)
    return {"none": [keeps], "all": [again, moves], "auto": [keeps, again, moves]}[
        case.spec.recompute
    ]


def can_offload(case: Case, worker: Worker, layer_s: float) -> bool:
    """Return whether a layer's input can be copied to the host during the layer's forward pass.

    Args:
        case: the prepared request.
        worker: the GPU.
        layer_s: duration of both passes of a recomputing layer, in seconds.
    """
    num_bytes, rate = _count_features(case, worker), worker.rates.to_host_bytes_per_s
    if worker.gpu.device == "cpu" or num_bytes > STAGE_CHUNK_BYTES or not rate:
        return False
    # Forward, forward again, and a backward pass of twice that: one forward pass is a quarter.
    return num_bytes / rate <= layer_s / 4


def count_host_bytes(case: Case, worker: Worker, num_layers: int, in_flight: int) -> int:
    """Return the RAM for the inputs of a stage's layers, in bytes."""
    # The trainer allocates whole chunks for each micro-batch.
    in_chunk = STAGE_CHUNK_BYTES // _count_features(case, worker)
    return in_flight * math.ceil(num_layers / in_chunk) * STAGE_CHUNK_BYTES


def host_room_bytes(worker: Worker) -> int:
    """Return the RAM that the trainer allows a GPU's rank for offloading, in bytes."""
    return int(HOST_SHARE * worker.host_bytes)


def most_layers(
    case: Case, worker: Worker, place: int, num_stages: int, *, holding: Holding, in_flight: int
) -> int:
    """Return the maximum number of layers that fit in a stage."""

    def count_bytes(num_layers: int) -> int:
        return stage_memory(
            case, worker, num_layers, place, num_stages, holding=holding, in_flight=in_flight
        ).expected_bytes

    room_bytes = case.room_bytes(worker)
    if holding.offloads:
        # A fixed number of inputs is being copied, so memory is not linear in the layers: bisect.
        num_chunks = host_room_bytes(worker) // (in_flight * STAGE_CHUNK_BYTES)
        in_host = num_chunks * (STAGE_CHUNK_BYTES // _count_features(case, worker))
        counts = range(1, min(in_host, case.shape.num_layers) + 1)
        return bisect_right(counts, room_bytes, key=count_bytes)
    # Without offloading memory is linear in the layers, so two points suffice.
    one, two = count_bytes(1), count_bytes(2)
    return 0 if room_bytes < one else 1 + int((room_bytes - one) / max(1, two - one))


def _count_features(case: Case, worker: Worker) -> int:
    """Return the bytes of the features of a micro-batch between two layers."""
    return case.longest_tokens * case.shape.hidden * choose_width(case.spec, worker.memory)


def _count_unpacked(stage: ModelShape, spec: RunSpec, width: int) -> int:
    """Return the bytes of a second 4-bit weight that is unpacked at the same time."""
    if spec.adapter.kind != "qlora":
        return 0
    # Seven stages of a 70B model on an H200 peaked at 0.46 to 0.55 GiB more than the forecast
    # without this term; its largest weight takes 0.44 GiB.
    return width * max(linear.num_weights for layer, _ in stage.kinds for linear in layer.linears)


def stage_memory(
    case: Case,
    worker: Worker,
    num_layers: int,
    place: int,
    num_stages: int,
    *,
    holding: Holding | None = None,
    in_flight: int | None = None,
    first_layer: int = 0,
) -> MemoryForecast:
    """Forecast the memory of a stage: its layers, its end of the model, micro-batches in flight.

    Args:
        case: the prepared request.
        worker: GPU of the stage.
        num_layers: number of layers of the stage.
        place: index of the stage.
        num_stages: number of stages.
        holding: treatment of micro-batches between their passes; None: layers recompute.
        in_flight: number of micro-batches in flight; None: as in 1F1B, where the first of seven
            stages has up to seven and the last has one.
        first_layer: index of the stage's first layer.
    """
    holding = holding or Holding(again=True)
    in_flight = in_flight or min(num_stages - place, case.spec.batch_sequences)
    is_first, is_last = place == 0, place == num_stages - 1
    # With layers of one kind, the number of the first one changes nothing.
    first_layer = first_layer if len(case.shape.kinds) > 1 else 0
    key = ("stage", worker.like, num_layers, is_first, is_last, holding, in_flight, first_layer)
    if key not in case.known:
        case.known[key] = _stage_memory(
            case, worker, num_layers, (is_first, is_last), holding, in_flight, first_layer
        )
    found: MemoryForecast = case.known[key]
    return found


def _stage_memory(
    case: Case,
    worker: Worker,
    num_layers: int,
    ends: tuple[bool, bool],
    holding: Holding,
    in_flight: int,
    first_layer: int,
) -> MemoryForecast:
    shape, spec = case.shape, case.spec
    is_first, is_last = ends
    stage = replace(shape, layers=shape.layers[first_layer : first_layer + num_layers])
    whole = estimate_memory(
        stage,
        spec,
        setting=holding.set_up(case, num_layers),
        longest_tokens=case.longest_tokens,
        gpu=worker.memory,
        inputs_stay=not holding.offloads,
        has_head=is_last,
    )
    gone = (0 if is_first else shape.num_embedding) + (0 if is_last else shape.num_head)
    # Tied weights are needed at both ends of the pipeline, so neither end saves them.
    if shape.is_tied and (is_first or is_last):
        gone = 0
    full = spec.adapter.kind == "full"
    width = 4 if full else choose_width(spec, worker.memory)
    # Optimizer state in bytes per value; paged states are in host memory.
    states = {"adamw": 8, "adamw_8bit": 2, "paged_adamw_8bit": 0}[spec.optimizer]
    features_bytes = in_flight * _count_features(case, worker)
    inputs_bytes = whole.inputs_bytes * in_flight + _LEFT * features_bytes
    if holding.offloads:  # the whole model's figure counts the inputs being copied
        inputs_bytes = whole.inputs_bytes + (_ENTERED + _LEFT) * features_bytes
    memory = replace(
        whole,
        weights_bytes=whole.weights_bytes - gone * width,
        gradients_bytes=whole.gradients_bytes - (4 * gone if full else 0),
        optimizer_bytes=max(0, whole.optimizer_bytes - (states * gone if full else 0)),
        # If layers recompute, only the micro-batch in its backward pass holds activations.
        activations_bytes=whole.activations_bytes * (1 if holding.again else in_flight),
        inputs_bytes=inputs_bytes,
        loss_bytes=whole.loss_bytes if is_last else 0,
        workspace_bytes=whole.workspace_bytes + _count_unpacked(stage, spec, width),
    )
    # Fragmentation grows with all tensors, those of every micro-batch in flight included.
    slack_share = whole.slack_bytes / max(1, whole.allocated_bytes)
    if not worker.memory.pieces_grow:
        slack_share = max(slack_share, _STAGE_HOLES_SHARE)
    memory = replace(memory, slack_bytes=int(slack_share * memory.allocated_bytes))
    return correct(memory, worker.correction.memory.value)


def fit_stage(
    case: Case, worker: Worker, counts: Sequence[int], place: int, in_flight: int, holding: Holding
) -> tuple[Fit, Holding]:
    """Return the memory of a stage and its holding; it offloads only if it does not fit without."""
    for tried in (replace(holding, offloads=False), holding):
        memory = stage_memory(
            case, worker, counts[place], place, len(counts),
            holding=tried, in_flight=in_flight, first_layer=sum(counts[:place]),
        )  # fmt: skip
        setting, room_bytes = tried.set_up(case, counts[place]), case.room_bytes(worker)
        fit = Fit(setting=setting, memory=memory, room_bytes=room_bytes)
        if fit.fits:
            return fit, tried
    return fit, holding
