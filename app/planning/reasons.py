"""Explain in one sentence why a candidate was chosen or rejected."""

from __future__ import annotations

from dataclasses import replace

from agents.contract.parallel import PARALLEL
from app.planning.candidate import Candidate
from app.planning.choice import is_allowed, is_asked, weigh
from app.planning.hardware.ring import link_s
from app.planning.memory.forecast import GIB
from app.planning.plan_context import Case
from app.planning.strategies.registry import PLANNED_MODES
from app.text import show_share

_NOT_YET = "not trained by this version yet"
# Share of a step from which the wait for weights is reported.
_LEAST_WAIT = 0.05


def explain(
    case: Case,
    candidate: Candidate,
    chosen: Candidate | None,
    rival: Candidate | None = None,
    together: Candidate | None = None,
) -> Candidate:
    """Return the candidate with its reason.

    Args:
        case: the prepared request.
        candidate: the candidate to explain.
        chosen: the chosen candidate, if any.
        rival: the fastest candidate that fits and whose GPUs hold the whole model, if any.
        together: the plan in which all GPUs hold the model, if it was computed.
    """
    if candidate.reason:
        return candidate
    return replace(candidate, reason=_reason(case, candidate, chosen, rival, together))


def name_nodes(nodes: tuple[str, ...]) -> str:
    """Join names of nodes as in a sentence.

    >>> name_nodes(("alpha",)), name_nodes(("alpha", "beta", "gamma"))
    ('alpha', 'alpha, beta and gamma')
    """
    return nodes[0] if len(nodes) == 1 else f"{', '.join(nodes[:-1])} and {nodes[-1]}"


def describe_candidate(case: Case, candidate: Candidate) -> str:
    """Describe a candidate, such as `data parallel on alpha and beta`."""
    if PARALLEL[candidate.mode].uses_one_gpu:
        cards = {worker.gpu.name for worker in case.of(candidate.nodes)}
        if len(case.of(candidate.nodes)) > 1 and len(cards) == 1:
            return f"one GPU of {name_nodes(candidate.nodes)}"
        return f"{name_nodes(name_places(case, candidate))} alone"
    label = PARALLEL[candidate.mode].label
    if candidate.num_replicas > 1:
        label = f"{candidate.num_replicas} pipelines"
    return f"{label} on {name_nodes(name_places(case, candidate))}"


def name_places(case: Case, candidate: Candidate) -> tuple[str, ...]:
    """Return the PCs of a plan, or the GPUs of a PC of which some take no part: `tower:0`."""
    return case.cluster.name_places((gpu.node, gpu.device) for gpu in candidate.gpus)


def _reason(
    case: Case,
    candidate: Candidate,
    chosen: Candidate | None,
    rival: Candidate | None,
    together: Candidate | None,
) -> str:
    who = describe_candidate(case, candidate)
    if not candidate.fits:
        return f"{who}: {_misfit(case, candidate)}"
    words = _network_words(case, candidate) or _wait_words(candidate)
    excluded = _exclusion(case, candidate)
    if candidate is chosen:
        gain = _gain_words(case, candidate, rival) or _team_words(case, candidate, together)
        parts = (gain, _tier_words(candidate), _order_words(case, candidate), words)
        return "; ".join([f"{who}: the fastest that fits", *(part for part in parts if part)])
    if chosen is None:
        later = "" if candidate.runnable else f", but {_NOT_YET}"
        return f"{who}: fits{later}{words and f'; {words}'}{excluded}"
    ratio = candidate.step_s / chosen.step_s
    # Differences below 5 % are within the error of forecasts.
    pace = f"{ratio:.1f} times as long per step" if ratio >= 1.05 else "about as fast"
    if ratio < 0.95:
        # A faster candidate lost: it is not runnable, or `auto` mistrusts its forecast.
        pace = f"{1 / ratio:.1f} times as fast"
        if candidate.runnable and candidate.divides_layers:
            if case.spec.parallel == "auto" and weigh(candidate) >= weigh(chosen):
                pace += f", {_doubt(candidate)}"
            pace += f"; parallel: {candidate.mode} chooses it"
    later = "" if candidate.runnable else f", and {_NOT_YET}" if ratio > 1 else f", but {_NOT_YET}"
    return f"{who}: {words or pace}{f', {pace}' if words else ''}{later}{excluded}"


def _exclusion(case: Case, candidate: Candidate) -> str:
    """Return the key that excludes a plan that fits, as a clause; empty: it may be chosen."""
    if not candidate.runnable:
        return ""
    if not is_asked(case.spec, case.cluster, candidate):
        return f"; excluded by parallel: {case.spec.parallel}"
    if not is_allowed(case.spec, case.cluster, candidate):
        return f"; excluded by {'shares' if case.spec.shares is not None else 'nodes'}"
    return ""


def _gain_words(case: Case, candidate: Candidate, rival: Candidate | None) -> str:
    """Return why a model is divided although it would fit whole; empty: not so."""
    if case.spec.parallel != "auto" or not candidate.divides_layers or rival is None:
        return ""
    ratio = rival.step_s / candidate.step_s
    who = describe_candidate(case, rival)
    return f"{ratio:.1f} times as fast as {who}, by more than forecasts may be off"


def _team_words(case: Case, candidate: Candidate, together: Candidate | None) -> str:
    """Return by how much a plan is faster than all GPUs together; empty: it uses all of them."""
    if together is None or not together.fits or len(candidate.gpus) >= len(together.gpus):
        return ""
    ratio = together.step_s / candidate.step_s
    return f"{ratio:.1f} times as fast as all GPUs together" if ratio >= 1.05 else ""


def _order_words(case: Case, candidate: Candidate) -> str:
    """Return the order of PCs if their links decided it, as a clause; empty: any would do."""
    if len(candidate.nodes) < 3 or case.orders.is_uniform or case.keeps_order:
        return ""
    has_stages = PARALLEL[candidate.mode].has_stages
    # Of several pipelines, the first shows the rule.
    gpus = [gpu for gpu in candidate.gpus if gpu.replica == 0]
    gpus.sort(key=lambda gpu: (gpu.layers or (0, 0)) if has_stages else (0, 0))
    order = list(dict.fromkeys(gpu.node for gpu in gpus))
    listed = sorted(order)
    if len(order) < 3 or _slowest_s(case, order, has_stages) >= _slowest_s(
        case, listed, has_stages
    ):
        return ""
    what = "stages" if has_stages else "the ring"
    verb = "are" if has_stages else "is"
    return f"{what} {verb} ordered {', '.join(order)}, since these neighbours have faster links"


def _slowest_s(case: Case, order: list[str], is_open: bool) -> float:
    """Return the cost of the slowest link of a chain, or of a ring, of PCs."""
    after = order[1:] if is_open else [*order[1:], order[0]]
    return max(link_s(case.cluster, *pair) for pair in zip(order, after, strict=False))


def _doubt(candidate: Candidate) -> str:
    """Return why a mode that divides the model was not chosen although its forecast is better."""
    doubt = "by less than forecasts may be off"
    survives = PARALLEL[candidate.mode].keeps_whole_state
    return doubt if survives else f"{doubt}, and a lost node stops it"


def _tier_words(candidate: Candidate) -> str:
    """Return where streamed weights are kept, as a clause; empty: nothing is streamed."""
    tiers = [gpu.streams_from for gpu in candidate.gpus if gpu.streams_from is not None]
    if not tiers:
        return ""
    of = {"ram": "RAM", "disk": "the SSD"}
    where = " or ".join(of[tier] for tier in dict.fromkeys(tiers))
    nodes = [gpu.node for gpu in candidate.gpus if gpu.streams_from == "ram"]
    once = ", where the GPUs of a PC share one copy," if len(set(nodes)) < len(nodes) else ""
    return f"frozen layers come from {where}{once} while others compute"


def _misfit(case: Case, candidate: Candidate) -> str:
    """Return the GPU that lacks the most memory, else the PC that lacks RAM, as a clause."""
    short = [gpu for gpu in candidate.gpus if gpu.memory.expected_bytes > gpu.room_bytes]
    crowded = [gpu for gpu in candidate.gpus if not gpu.fits_host]
    if crowded and not short:
        needed, room = crowded[0].host_bytes / GIB, (crowded[0].host_room_bytes or 0) / GIB
        has = f"has {room:.1f} to spare{crowded[0].why_little_ram}"
        return f"{crowded[0].node} would need {needed:.1f} GiB of RAM and {has}"
    if not short:
        return "does not fit"
    worst = max(short, key=lambda gpu: gpu.memory.expected_bytes - gpu.room_bytes)
    needed, room = worst.memory.expected_bytes / GIB, worst.room_bytes / GIB
    # A CPU computes in the RAM that a limit leaves.
    limits = {node.name: node.ram_limit and node.why_little_ram for node in case.cluster.nodes}
    why = limits[worst.node] if worst.device == "cpu" else ""
    return f"{worst.card} of {worst.node} would need {needed:.1f} GiB and has {room:.1f}{why}"


def _network_words(case: Case, candidate: Candidate) -> str:
    """Describe the network's part of a step; empty: it is too small to matter."""
    if len(candidate.gpus) < 2:
        return ""
    seconds, step_s = candidate.parts_s.network_s, candidate.step_s
    if seconds <= 0.05 * step_s:
        bubble_s = candidate.parts_s.bubble_s
        return (
            f"{show_share(bubble_s / step_s)} of a step is a bubble"
            if bubble_s > 0.1 * step_s
            else ""
        )
    measure = PLANNED_MODES[candidate.mode].wire_s
    # For gathered weights the sentence names all time on the wire, hidden or not.
    if measure is not None:
        seconds = measure(case, candidate)
    return f"{_seconds(seconds)} of network per step over {_rate(case, candidate)}"


def _wait_words(candidate: Candidate) -> str:
    """Describe the wait for streamed weights; empty: it is too small to matter."""
    share = candidate.parts_s.input_s / candidate.step_s
    return (
        f"{show_share(share)} of a step waits for streamed weights" if share > _LEAST_WAIT else ""
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _rate(case: Case, candidate: Candidate) -> str:
    link = case.ring(case.of(candidate.nodes))
    if link.source == "measured":
        return f"{link.bytes_per_s / 1e6:.0f} MB/s"
    # Back from payload to the nominal speed, by which users know their network.
    return (
        f"{link.bytes_per_s * 8 / 0.94e9:.3g} Gb/s" if len(candidate.nodes) > 1 else "PCI Express"
    )
