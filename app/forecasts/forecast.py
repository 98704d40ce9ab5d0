"""Reduce a plan to the forecast that is stored when a run is launched. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from agents.contract.run import RankPlacement
from app.planning.accuracy.forecast_accuracy import Forecast, RankForecast
from app.planning.candidate import Candidate, GpuPlan, PlanRequest
from app.planning.hardware.cluster import Cluster, PlannedGpu


def make_forecast(
    candidate: Candidate,
    request: PlanRequest,
    ranks: Sequence[RankPlacement],
    assumptions: Sequence[str],
) -> Forecast:
    """Return the forecast of a candidate with its ranks in order."""
    spec, learned = request.spec, request.learned
    by_place = {(gpu.node, gpu.device): gpu for gpu in candidate.gpus}
    # Corrections are stored with the forecast, since learning has to divide them out again.
    network = learned.network.value
    return Forecast(
        mode=candidate.mode,
        family=request.shape.family,
        adapter=spec.adapter.kind,
        # If the longest example is unknown, a sequence bounds it.
        longest_tokens=request.data.longest_tokens or spec.sequence_tokens,
        ranks=tuple(_of_rank(by_place[p.node, p.device], request) for p in ranks),
        step_s=candidate.step_s,
        network_s=candidate.parts_s.network_s,
        bubble_s=candidate.parts_s.bubble_s,
        wire_s=candidate.wire_s,
        tokens_per_s=candidate.tokens_per_s,
        total_s=candidate.total_s,
        energy_wh=candidate.energy_wh,
        network_factor=network,
        assumptions=tuple(assumptions),
    )


def _of_rank(gpu: GpuPlan, request: PlanRequest) -> RankForecast:
    is_cpu = gpu.device == "cpu"
    planned = _planned(request.cluster, gpu)
    is_calibrated = planned.calibration is not None
    known = request.learned.find(
        gpu.card, request.shape.family, request.spec.adapter.kind, is_calibrated=is_calibrated
    )
    memory = gpu.memory
    return RankForecast(
        node=gpu.node,
        device=gpu.device,
        card=None if is_cpu else gpu.card,
        share=gpu.share,
        tokens_per_s=gpu.tokens_per_s,
        setting=gpu.setting,
        gpu=None if is_cpu else planned.memory,
        allocated_bytes=memory.allocated_bytes,
        low_bytes=memory.low_bytes,
        expected_bytes=memory.expected_bytes,
        high_bytes=memory.high_bytes,
        memory_parts=tuple(memory.parts.items()),
        memory_factor=known.memory.value,
        speed_factor=known.speed.value,
        is_calibrated=is_calibrated,
        room_bytes=gpu.room_bytes,
        layers=gpu.layers,
        replica=gpu.replica,
        max_in_flight=gpu.max_in_flight,
        offloads=gpu.offloads,
        num_streamed=gpu.num_streamed,
        streams_from=gpu.streams_from,
    )


def _planned(cluster: Cluster, gpu: GpuPlan) -> PlannedGpu:
    return next(
        planned
        for node in cluster.nodes
        if node.name == gpu.node
        for planned in node.gpus
        if planned.device == gpu.device
    )
