"""Advise changes of a run file: the smallest that makes a run fit, or one that is faster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from agents.contract.parallel import PARALLEL
from agents.contract.spec import run_keys
from app.planning.advice.changes import Change, apply_change
from app.planning.advice.fit_advice import advise_fit
from app.planning.build_context import open_case
from app.planning.candidate import Advice, Candidate, PlanRequest
from app.planning.choice import find_least
from app.planning.hardware.cluster import ASSUMED_DISK_BYTES_PER_S
from app.planning.plan_context import Case
from app.planning.reasons import name_nodes, name_places
from app.planning.split import split_rows
from app.planning.strategies.data_parallel import plan_data
from app.planning.strategies.registry import propose_candidates
from app.text import show_share

# Minimum speed-up that justifies leaving nodes out or changing the batch, as a ratio.
_MIN_GAIN = 1.05
# Share of a step spent waiting for the network from which compression is advised.
_SLOW_NETWORK = 0.1
# Share of a step spent waiting for weights from an SSD from which its rate is reported.
_SLOW_DISK = 0.2
# Minimum gain from which another batch size is advised, as a share of tokens per second.
_MIN_BATCH_GAIN = 0.08
# Minimum gain from which weights in 4 bits are advised to a run that streams them, as a ratio.
_MIN_4_BIT_GAIN = 1.5
# Maximum number of sequences by which the advised batch exceeds the requested one.
_MAX_EXTRA_ROWS = 16


def give_advice(
    request: PlanRequest, case: Case, chosen: Candidate | None, found: Sequence[Candidate]
) -> tuple[Advice, ...]:
    """Return the advice for a plan, the most important first."""
    if not case.workers:
        return (Advice(text=_explain_no_gpu(case)),)
    together = find_together(case, found)
    advice: list[Advice] = []
    if chosen is None or (not chosen.divides_layers and together is not None and not together.fits):
        advice += advise_fit(request, case, chosen, found)
    if chosen is not None:
        advice += _fewer_nodes(case, chosen, found)
        advice += _fill_batch(request, case, chosen, together)
        advice += _compress(request, chosen)
        advice += _hold_in_4_bits(request, chosen)
        advice += _name_slow_disks(case, chosen)
    return tuple(advice)


def _explain_no_gpu(case: Case) -> str:
    """Return what to change if no node can train."""
    if not case.cluster.nodes:
        return "There is no node: add one, or describe PCs in a cluster file"
    names = name_nodes(tuple(node.name for node in case.cluster.nodes))
    has = "has" if len(case.cluster.nodes) == 1 else "have"
    if any(node.gpus for node in case.cluster.nodes):
        return f"The memory of the GPUs of {names} is not known: give it, as memory_gib"
    # A real node without a GPU trains on its CPU, so this PC comes from a cluster file.
    return f"{names} {has} no GPU: add gpus to the cluster file, such as gpus: [RTX 4070]"


def find_together(case: Case, found: Sequence[Candidate]) -> Candidate | None:
    """Return the plan that uses all GPUs; None: it was not computed."""
    mode = "data" if len(case.workers) > 1 else "single"
    return next((o for o in found if o.mode == mode and len(o.gpus) == len(case.workers)), None)


def _fewer_nodes(case: Case, chosen: Candidate, found: Sequence[Candidate]) -> Iterator[Advice]:
    """Advise a subset of the nodes if it is faster than all that the spec lists."""
    if case.spec.nodes == "all" and case.spec.shares is None:
        return  # the plan has left them out
    best = find_least(one for one in found if one.fits and one.runnable) or chosen
    together = find_together(case, found)
    slower = chosen if best is not chosen and best.nodes != chosen.nodes else together
    if slower is None or not slower.fits or not set(best.nodes) < set(slower.nodes):
        return
    gain = slower.step_s / best.step_s
    if gain < _MIN_GAIN:
        return
    who = name_nodes(best.nodes)
    alone = f"{who} alone" if len(best.nodes) == 1 else who
    it = "it is" if len(best.nodes) == 1 else "they are"
    yield Advice(
        text=f"Use {alone}: {it} {gain:.1f} times faster than {name_nodes(slower.nodes)} together",
        change={"nodes": name_places(case, best)},
    )


def _fill_batch(
    request: PlanRequest, case: Case, chosen: Candidate, together: Candidate | None
) -> Iterator[Advice]:
    """Advise a batch size that divides better among the GPUs."""
    # A share consists of whole sequences: seven equal GPUs need as long for 24 as for 28.
    if together is None or not together.fits or case.spec.shares is not None:
        return
    speeds, rows = [gpu.tokens_per_s for gpu in together.gpus], case.spec.batch_sequences
    limit = int(run_keys()["batch_sequences"].about.maximum or 0)
    lost = {
        more: _lost(more, speeds)
        for more in range(rows, min(2 * rows, rows + _MAX_EXTRA_ROWS, limit) + 1)
    }
    # Rounded, so that a slightly better but much larger batch does not win.
    best = min(lost, key=lambda more: (round(lost[more], 2), more))
    if lost[rows] / lost[best] < 1 + _MIN_BATCH_GAIN:
        return
    # A larger batch also waits for the network less often.
    changed = open_case(replace(request, spec=replace(case.spec, batch_sequences=best)))
    gain = plan_data(changed, changed.team(changed.workers)).tokens_per_s / chosen.tokens_per_s
    if gain >= 1 + _MIN_BATCH_GAIN:
        yield Advice(
            text=f"A batch of {best} sequences divides better among {len(speeds)} GPUs than one "
            f"of {rows}: {show_share(gain - 1)} more tokens per second, but fewer and larger steps",
            change={"batch_sequences": best},
        )


def _lost(rows: int, speeds: list[float]) -> float:
    """Return the time of a step relative to shares that follow the speeds exactly.

    >>> round(_lost(24, [1.0] * 7), 3), _lost(28, [1.0] * 7)
    (1.167, 1.0)
    """
    ideal = rows / sum(speeds)
    return max(count / v for count, v in zip(split_rows(rows, speeds), speeds, strict=True)) / ideal


def _compress(request: PlanRequest, chosen: Candidate) -> Iterator[Advice]:
    """Advise compressed gradients where a step waits for the network."""
    waited = chosen.parts_s.network_s
    if request.spec.compression != "none" or waited < _SLOW_NETWORK * chosen.step_s:
        return
    if PARALLEL[chosen.mode].has_stages:
        return  # a pipeline waits for activations, which compression does not shorten
    yield Advice(
        text=f"{show_share(waited / chosen.step_s)} of each step waits for the network: send "
        "gradients as bf16, which halves the wait and changes the last digits of results",
        change={"compression": "bf16"},
    )


def _hold_in_4_bits(request: PlanRequest, chosen: Candidate) -> Iterator[Advice]:
    """Advise QLoRA if copying 16-bit weights takes most of the time."""
    if not PARALLEL[chosen.mode].streams or request.spec.adapter.kind != "lora":
        return
    change: Change = {"adapter.kind": "qlora"}
    changed = open_case(replace(request, spec=apply_change(request.spec, change)))
    able = [one for one in propose_candidates(changed) if one.fits and one.runnable]
    # On the same nodes, so that the gain is that of the quantization.
    best = min((one.step_s for one in able if one.nodes == chosen.nodes), default=chosen.step_s)
    if chosen.step_s > _MIN_4_BIT_GAIN * best:
        share = best / chosen.step_s
        text = (
            f"Hold the weights in 4 bits (QLoRA): a step then takes {show_share(share)} of the time"
        )
        yield Advice(text=text, change=change)


def _name_slow_disks(case: Case, chosen: Candidate) -> Iterator[Advice]:
    """Name the slowest SSD if a good part of each step waits for weights from SSDs."""
    share = chosen.parts_s.input_s / chosen.step_s
    reading = {gpu.node for gpu in chosen.gpus if gpu.streams_from == "disk"}
    if share < _SLOW_DISK or not reading:
        return
    rates = {
        node.name: (node.disk_bytes_per_s or ASSUMED_DISK_BYTES_PER_S) / 1e9
        for node in case.cluster.nodes
        if node.name in reading
    }
    slowest = min(rates, key=lambda name: rates[name])
    yield Advice(
        text=f"{show_share(share)} of each step waits for weights from the SSD, that of {slowest} "
        f"at {rates[slowest]:g} GB/s: a faster SSD or more RAM shortens it"
    )
