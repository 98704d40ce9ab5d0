"""Choose the fastest candidate that fits, with a margin between different modes.

Forecasts of two modes may err in opposite directions, and modes differ in the cost of a lost node.
So a mode that divides the model has to be faster by a margin. The forecast of a step was 8 % off at
most on GPUs, that of a pipeline 5 % (docs/measurements.md): together, and rounded up, 15 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from agents.contract.parallel import PARALLEL, find_mode
from agents.contract.spec import RunSpec
from app.planning.candidate import Candidate
from app.planning.hardware.cluster import Cluster
from app.planning.plan_context import meets_demand

MARGIN = 0.15
"""Difference in speed within which forecasts of two modes do not show which is faster, as a share.
"""
# Upper bound of the host's work between two passes of parts of a model, in seconds. Forecasts of
# such passes leave it out, but small models wait for it.
_HOST_S = 0.05


def weigh(candidate: Candidate) -> float:
    """Return the seconds of a step by which `parallel: auto` compares candidates.

    Streamed weights need one margin over GPUs that hold the model, a pipeline needs two: it alone
    cannot continue without a lost node, nor save its last step then.
    """
    num_margins = PARALLEL[candidate.mode].num_margins
    if not num_margins:
        return candidate.step_s
    if any(gpu.device == "cpu" for gpu in candidate.gpus):
        # The speed of a CPU is hardly known, so a model that fits there is not divided.
        return math.inf
    host_s = _HOST_S * _count_passes(candidate)
    return candidate.step_s * (1 + MARGIN) ** num_margins + host_s


def find_least(candidates: Iterable[Candidate]) -> Candidate | None:
    """Return the candidate that `parallel: auto` takes, the first of equal ones, or None."""
    return min(candidates, key=lambda one: (weigh(one), one.step_s), default=None)


def choose(spec: RunSpec, cluster: Cluster, found: Iterable[Candidate]) -> Candidate | None:
    """Return the best candidate that fits, can be run, and that the spec allows.

    Args:
        spec: the run's spec.
        cluster: nodes that the spec names.
        found: candidates, the fastest first.
    """
    return find_least(
        one
        for one in found
        if one.fits
        and one.runnable
        and is_asked(spec, cluster, one)
        and is_allowed(spec, cluster, one)
    )


def is_asked(spec: RunSpec, cluster: Cluster, one: Candidate) -> bool:
    """Return whether the spec asks for a candidate's mode; with one GPU, `data` is that GPU."""
    num_gpus = sum(len(node.gpus) for node in cluster.nodes)
    is_alone = PARALLEL[one.mode].uses_one_gpu and num_gpus == 1
    is_same = is_alone and find_mode(spec.parallel).copies_model
    return spec.parallel in ("auto", one.mode) or is_same


def is_allowed(spec: RunSpec, cluster: Cluster, one: Candidate) -> bool:
    """Return whether a candidate uses every PC and GPU that the spec lists."""
    if PARALLEL[one.mode].uses_one_gpu and spec.parallel == one.mode:
        return True
    return meets_demand(spec, cluster, {(gpu.node, gpu.device) for gpu in one.gpus})


def _count_passes(candidate: Candidate) -> float:
    """Return the number of micro-batches of a step that a GPU computes one after the other."""
    if PARALLEL[candidate.mode].has_stages:
        at_once = candidate.gpus[0].setting.micro_tokens * candidate.num_replicas
    else:
        at_once = sum(gpu.setting.micro_tokens for gpu in candidate.gpus)
    return candidate.tokens_per_step / at_once
