"""Turn a plan that divides the model into the cut that the intent takes to the ranks."""

from __future__ import annotations

from collections.abc import Sequence

from agents.contract.model_cut import ModelCut, Stage
from agents.contract.run import RankPlacement
from app.planning.build_context import open_case
from app.planning.candidate import CUT_MODES, Advice, Candidate, GpuPlan, PlanRequest
from app.planning.memory.forecast import GIB
from app.planning.strategies.pipeline_plan import refuse_pipeline
from app.planning.strategies.trained_layers import list_trained_layers
from app.planning.strategies.weight_streaming import refuse_streamed
from app.text import name_layers


def make_cut(
    candidate: Candidate, ranks: Sequence[RankPlacement], num_layers: int
) -> ModelCut | None:
    """Return mode and stages of a candidate; None: every rank holds the whole model.

    Args:
        candidate: plan of exactly these ranks.
        ranks: ranks of the attempt, in order.
        num_layers: number of layers of the model.
    """
    if candidate.mode not in CUT_MODES:
        return None
    by_place = {(gpu.node, gpu.device): gpu for gpu in candidate.gpus}
    stages = tuple(
        _stage(candidate, by_place[place.node, place.device], place.rank, num_layers)
        for place in ranks
    )
    return ModelCut(mode=candidate.mode, stages=stages)


def _stage(candidate: Candidate, gpu: GpuPlan, rank: int, num_layers: int) -> Stage:
    if candidate.mode == "streamed":
        # Where the GPU is a CPU, its memory is the RAM, and nothing is won by copying.
        num_resident = None if gpu.device == "cpu" else num_layers - gpu.num_streamed
        return Stage(
            rank=rank,
            replica=rank,
            first_layer=0,
            stop_layer=num_layers,
            num_resident=num_resident,
            streams_from=gpu.streams_from,
        )
    first, stop = gpu.layers or (0, num_layers)
    return Stage(
        rank=rank,
        replica=gpu.replica,
        first_layer=first,
        stop_layer=stop,
        has_embedding=first == 0,
        has_head=stop == num_layers,
        max_in_flight=gpu.max_in_flight,
        num_recomputed=gpu.setting.num_recomputed,
        offloads=gpu.offloads,
    )


def find_absence(
    request: PlanRequest, advice: Sequence[Advice], num_gpus: int
) -> tuple[str, str] | None:
    """Return message and hint where the mode that a run names has no plan at all; None: it may run.

    One GPU holds the whole model in every mode, and the trainer says what is missing.

    Args:
        request: what was planned.
        advice: of its plan.
        num_gpus: number of ranks.
    """
    mode, case = request.spec.parallel, open_case(request)
    if mode not in CUT_MODES or num_gpus < 2:
        return None
    refusal = refuse_pipeline(case) if mode == "pipeline" else refuse_streamed(case)
    num_trained = len(list_trained_layers(case.shape, case.spec))
    if not refusal and mode == "pipeline" and num_trained < num_gpus:
        refusal = (
            f"Each stage of a pipeline needs a layer with an adapter: {num_gpus} GPUs are more "
            f"than the {num_trained} layers that have one"
        )
    if not refusal:
        return None
    change = next((one.text for one in advice if one.change), "Use parallel: auto")
    return f"parallel: {mode} does not train this run. {refusal}", f"{change}."


def find_problem(candidate: Candidate, advice: Sequence[Advice]) -> tuple[str, str] | None:
    """Return message and hint where a GPU or PC cannot hold its part; None: it may.

    Even the lower end of the forecast has to be too much: a forecast that is a little off must not
    keep a run from starting.
    """
    if candidate.mode not in CUT_MODES or candidate.fits:
        return None
    label = f"parallel: {candidate.mode}"
    crowded = next((gpu for gpu in candidate.gpus if not gpu.fits_host), None)
    short = [gpu for gpu in candidate.gpus if gpu.memory.low_bytes > gpu.room_bytes]
    if crowded is not None:
        needed, room = crowded.host_bytes / GIB, (crowded.host_room_bytes or 0) / GIB
        message = (
            f"{label} does not fit on {crowded.node}: it would need {needed:.1f} GiB of RAM and "
            f"has {room:.1f} to spare"
        )
    elif short:
        worst = max(short, key=lambda gpu: gpu.memory.low_bytes - gpu.room_bytes)
        needed, room = worst.memory.low_bytes / GIB, worst.room_bytes / GIB
        part = name_layers(worst.layers) if worst.layers else "its part"
        message = (
            f"{label} does not fit on {worst.node}: {part} would need at least {needed:.1f} GiB, "
            f"and its {worst.card} has {room:.1f}"
        )
    else:
        return None
    text = advice[0].text if advice else "Add a node, or choose a smaller model"
    return message, f"{text}."
