"""Turn a plan that divides the model into the cut that the intent carries to the ranks."""

from __future__ import annotations

from collections.abc import Sequence

from agents.contract.model_cut import ModelCut
from agents.contract.parallel import PARALLEL
from agents.contract.run import RankPlacement
from app.planning.build_context import open_case
from app.planning.candidate import Advice, Candidate, PlanRequest
from app.planning.memory.forecast import GIB
from app.planning.strategies.registry import PLANNED_MODES, find_divided
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
    divided = PLANNED_MODES[candidate.mode].divided
    if divided is None:
        # Without a cut a rank holds the whole model.
        is_whole = PARALLEL[candidate.mode].holds == "model"
        return None if is_whole else ModelCut(mode=candidate.mode)
    by_place = {(gpu.node, gpu.device): gpu for gpu in candidate.gpus}
    stages = tuple(
        divided.make_stage(candidate, by_place[place.node, place.device], place.rank, num_layers)
        for place in ranks
    )
    return ModelCut(mode=candidate.mode, stages=stages)


def find_absence(
    request: PlanRequest, advice: Sequence[Advice], num_gpus: int
) -> tuple[str, str] | None:
    """Return message and hint if the mode that a run names cannot train it; None: it can.

    Args:
        request: the request of the plan.
        advice: the plan's advice.
        num_gpus: number of ranks.
    """
    mode, case = request.spec.parallel, open_case(request)
    divided = find_divided(mode)
    if divided is None or num_gpus < 2:
        return None  # one GPU holds the whole model in every mode
    refusal = divided.refuse(case) or divided.refuse_gpus(case, num_gpus)
    if not refusal:
        return None
    change = next((one.text for one in advice if one.change), "Use parallel: auto")
    return f"parallel: {mode} does not train this run. {refusal}", f"{change}."


def find_problem(candidate: Candidate, advice: Sequence[Advice]) -> tuple[str, str] | None:
    """Return message and hint if a GPU or PC cannot hold its part; None: it may fit."""
    if PARALLEL[candidate.mode].holds == "model" or candidate.fits:
        return None
    label = f"parallel: {candidate.mode}"
    crowded = next((gpu for gpu in candidate.gpus if not gpu.fits_host), None)
    # The lower end, since a forecast that is a little too high must not prevent a start.
    short = [gpu for gpu in candidate.gpus if gpu.memory.low_bytes > gpu.room_bytes]
    if crowded is not None:
        needed, room = crowded.host_bytes / GIB, (crowded.host_room_bytes or 0) / GIB
        message = (
            f"{label} does not fit on {crowded.node}: it would need {needed:.1f} GiB of RAM and "
            f"has {room:.1f} to spare{crowded.why_little_ram}"
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
