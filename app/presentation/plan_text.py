"""Describe plans and measurements, for the window and the command line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from agents.contract.node import Calibration
from agents.contract.parallel import find_mode
from agents.contract.spec import AdapterKind, RunSpec, run_keys
from app.planning.accuracy.forecast_accuracy import ForecastComparison, error_of
from app.planning.accuracy.misses import PlanMiss
from app.planning.candidate import Candidate, GpuPlan, Plan
from app.planning.upgrades import Upgrade, Upgrades
from app.presentation import stage_text
from app.text import (
    DASH,
    capitalize,
    count_of,
    name_layers,
    short_card,
    show_bytes,
    show_duration,
    show_list,
    show_rate,
)

MEMORY_GROUPS = {
    "weights": ("weights", "constants"),
    "training": ("adapter", "gradients", "optimizer"),
    "activations": ("activations", "inputs"),
    "working": ("loss", "workspace", "communication"),
    "other": ("slack", "context", "desktop"),
}
"""Parts of a memory forecast in each segment of a memory bar."""
_STEP_PARTS = (
    ("compute_s", "computing"),
    ("network_s", "network"),
    ("bubble_s", "pipeline bubble"),
    ("optimizer_s", "optimizer"),
    ("input_s", "waiting for weights"),
    ("checkpoint_s", "checkpoints"),
)
# Parts below this share of a step are left out of its description.
_LEAST_SHOWN = 0.005
KWH = 1000.0
# Values in a sentence: numbers, and words up to a space or a mark.
_NUMBERS, _WORD = r"\d[\d.]*(?:, \d[\d.]*)*", "[^ ;,:]+"


def describe_step(candidate: Candidate) -> str:
    """Describe the time of a step and its parts."""
    step_s = candidate.step_s
    parts = [
        f"{show_duration(seconds)} {words}"
        for name, words in _STEP_PARTS
        if (seconds := getattr(candidate.parts_s, name)) > _LEAST_SHOWN * step_s
    ]
    if len(parts) < 2:
        return show_duration(step_s)
    return f"{show_duration(step_s)} ({', '.join(parts)})"


def describe_candidate(candidate: Candidate) -> list[tuple[str, str]]:
    """Return (caption, text) of the costs of a candidate."""
    steps = count_of(candidate.num_steps, "step") if candidate.num_steps else ""
    total = show_duration(candidate.total_s)
    if candidate.has_estimated_steps:
        steps, total = f"about {steps}", f"about {total}"
    rows = [
        ("Step", describe_step(candidate)),
        ("Speed", show_rate(candidate.tokens_per_s)),
        ("10 million tokens", _show_ten_million(candidate)),
        ("Division", _describe_division(candidate)),
        ("Total time", f"{total}, {steps}" if steps and candidate.total_s else steps or DASH),
        ("Energy", describe_energy(candidate)),
        ("Electricity", DASH if candidate.cost is None else f"{candidate.cost:,.2f}"),
    ]
    return [(caption, text) for caption, text in rows if text != DASH]


def compare_plans(plans: Sequence[Plan]) -> list[list[str]]:
    """Return the rows of a table that compares plans: a caption, then a cell for each plan."""
    found: list[dict[str, str]] = []
    for plan in plans:
        one = plan.chosen
        cells = {"Plan": "does not fit"}
        if one is not None:
            cells = {"Plan": find_mode(one.mode).label, "GPUs": _list_cards(one)}
            cells |= dict(describe_candidate(one))
            cells["Step"] = show_duration(one.step_s)
            most = max(one.gpus, key=lambda gpu: gpu.memory.expected_bytes / gpu.room_bytes)
            used = f"{show_bytes(most.memory.expected_bytes)} of {show_bytes(most.room_bytes)}"
            cells["Fullest GPU"] = used
        found.append(cells)
    captions = dict.fromkeys(caption for cells in found for caption in cells)
    captions.pop("Division", None)
    return [[one, *(cells.get(one, DASH) for cells in found)] for one in captions]


def _list_cards(candidate: Candidate) -> str:
    counts = Counter(short_card(gpu.card) for gpu in candidate.gpus)
    return ", ".join(card if num == 1 else f"{num} x {card}" for card, num in counts.items())


def describe_base(found: Upgrades) -> str:
    """Describe the plan that purchases are compared with."""
    if found.base is None:
        return "The run does not fit these PCs."
    mode = capitalize(find_mode(found.base.mode).label)
    return f"{mode} on {show_list(found.base.nodes)}: {show_rate(found.base.tokens_per_s)}."


def name_method(kind: AdapterKind) -> str:
    """Return an adapter as users write it.

    >>> name_method("qlora")
    'QLoRA'
    """
    return {"lora": "LoRA", "qlora": "QLoRA", "full": "all weights"}[kind]


def show_value(value: object) -> str:
    """Return a setting as a run file has it.

    >>> show_value(True), show_value(40)
    ('true', '40')
    """
    return str(value).lower() if isinstance(value, bool) else str(value)


def describe_upgrade(one: Upgrade, currency: str) -> str:
    """Describe a purchase: what and where, then gain, price and needs."""
    price = show_price(one.price, currency)
    per_100 = "" if one.gain_per_100 is None else f", {one.gain_per_100:,.0f} for each 100"
    gain = f"{show_rate(one.tokens_per_s)} (+{one.gain_tokens_per_s:,.0f}{per_100}) for {price}"
    return "\n".join([capitalize(one.text), "; ".join([gain, *one.caveats])])


def show_price(value: float | None, currency: str = "") -> str:
    """Return an amount of money, with cents if it is small.

    >>> show_price(1900.0, "EUR"), show_price(3.5)
    ('1,900 EUR', '3.50')
    """
    if value is None:
        return DASH
    return f"{value:,.{0 if value >= 100 else 2}f} {currency}".rstrip()


def _describe_division(candidate: Candidate) -> str:
    rows = stage_text.list_planned_stages(candidate)
    bubble_s = candidate.parts_s.bubble_s
    words = stage_text.describe_division(rows, candidate.step_s, bubble_s, candidate.wire_s)
    return capitalize(words) if words else DASH


def _show_ten_million(candidate: Candidate) -> str:
    """Return the hours for ten million tokens, as in docs/big-models.md."""
    seconds = candidate.ten_million_tokens_s
    if not candidate.divides_layers or seconds is None:
        return DASH
    return f"{seconds / 3600:,.1f} h"


def describe_recovery(spec: RunSpec, mode: str | None = None) -> str:
    """Describe what happens to a run when a rank or node is lost, and when a node comes back.

    Args:
        spec: the run's spec.
        mode: the planned mode, if known; a pipeline cannot continue without a stage.

    >>> from agents.contract.spec import DataSpec
    >>> describe_recovery(RunSpec(model="m", data=DataSpec(train="t"), recovery="off"))
    'waits for you to resume it (recovery: off)'
    >>> describe_recovery(RunSpec(model="m", data=DataSpec(train="t"), rejoin="off"), "pipeline")
    ... # doctest: +ELLIPSIS
    'resumed automatically with another cut, by the window or by `rackless watch`; nodes...'
    """
    if spec.recovery == "off":
        return "waits for you to resume it (recovery: off)"
    resumed = "resumed automatically by the window, by `rackless watch`, or by three or more nodes"
    # Either may have stages: the plan's mode is not always known.
    rows = [find_mode(one) for one in (mode or "auto", spec.parallel)]
    if any(row.has_stages for row in rows):
        resumed = "resumed automatically with another cut, by the window or by `rackless watch`"
    elif spec.recovery == "auto" and all(row.keeps_whole_state for row in rows):
        resumed = (
            f"continues in its processes if most of three or more nodes are left, else {resumed}"
        )
    if spec.rejoin == "off":
        return f"{resumed}; nodes that come back do not join (rejoin: off)"
    unless = "" if spec.rejoin == "always" else " if the rest takes longer than a restart"
    return f"{resumed}; nodes that come back join at a checkpoint{unless}"


def describe_divergence(spec: RunSpec) -> str:
    """Describe the reaction to a loss that is not finite.

    >>> from agents.contract.spec import DataSpec
    >>> describe_divergence(RunSpec(model="m", data=DataSpec(train="t")))
    'waits for you to resume it at a lower learning rate (divergence: wait)'
    """
    if spec.divergence == "retry" and spec.recovery != "off":
        return "resumed automatically at half the learning rate (divergence: retry)"
    off = "recovery: off" if spec.divergence == "retry" else "divergence: wait"
    return f"waits for you to resume it at a lower learning rate ({off})"


def describe_energy(candidate: Candidate) -> str:
    """Describe the energy of a run: of its GPUs, and of the PCs around them."""
    gpus, pcs = show_energy(candidate.energy_wh), show_energy(candidate.pc_energy_wh)
    return gpus if pcs == DASH else f"{gpus} by the GPUs, {pcs} with their PCs"


def show_energy(energy_wh: float | None) -> str:
    """Return an amount of energy.

    >>> show_energy(1930.0), show_energy(12.0), show_energy(None) == DASH
    ('1.9 kWh', '12 Wh', True)
    """
    if energy_wh is None:
        return DASH
    return f"{energy_wh / KWH:.1f} kWh" if energy_wh >= 100 else f"{energy_wh:.0f} Wh"


def describe_setting(gpu: GpuPlan, num_replicas: int = 1) -> str:
    """Describe the settings of a GPU: tokens at once, and recomputed or offloaded layers.

    Args:
        gpu: the GPU's plan.
        num_replicas: number of pipelines of the plan; with several, the text names the GPU's.
    """
    setting = gpu.setting
    parts = [f"{setting.micro_tokens:,} tokens at once"]
    if num_replicas > 1:
        parts.append(f"pipeline {gpu.replica + 1}")
    if gpu.layers is not None and gpu.max_in_flight is not None:
        parts.append(name_layers(gpu.layers))
    if gpu.max_in_flight is not None and gpu.max_in_flight > 1:
        parts.append(f"{gpu.max_in_flight} in flight")
    if gpu.num_streamed and gpu.streams_from is not None:
        parts.append(
            f"{count_of(gpu.num_streamed, 'layer')} from {stage_text.TIERS[gpu.streams_from]}"
        )
    if setting.num_recomputed:
        source = f" with {stage_text.INPUTS_IN_RAM}" if gpu.offloads else ""
        parts.append(f"{count_of(setting.num_recomputed, 'layer')} recomputed{source}")
    if setting.num_moved:
        parts.append(f"{count_of(setting.num_moved, 'layer')} offloaded to RAM")
    return ", ".join(parts)


def describe_memory(gpu: GpuPlan) -> str:
    """Describe expected bytes with their range and the available memory."""
    memory = gpu.memory
    span = f"{_gib(memory.low_bytes)} to {_gib(memory.high_bytes)} GiB"
    return f"{show_bytes(memory.expected_bytes)} ({span}) of {show_bytes(gpu.room_bytes)}"


def _gib(value: float) -> str:
    return f"{value / 2**30:.1f}"


def group_memory(parts: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Group the parts of a forecast into the segments of a memory bar.

    >>> group_memory([("weights", 5), ("constants", 1), ("slack", 2), ("desktop", 3)])
    [('weights', 6), ('training', 0), ('activations', 0), ('working', 0), ('other', 5)]
    """
    known = dict(parts)
    return [
        (name, sum(known.get(part, 0) for part in members))
        for name, members in MEMORY_GROUPS.items()
    ]


def describe_plan(plan: Plan) -> str:
    """Return the plan in a sentence."""
    if plan.chosen is not None:
        return as_sentence(plan.chosen)
    if not plan.others:
        return "No plan fits these settings."
    nearest = plan.others[0]
    # A candidate that fits has another mode or other nodes, and the advice names the change.
    what = "the requested mode and nodes" if nearest.fits else "these settings"
    return f"No plan fits {what}. {as_sentence(nearest)}"


def describe_warnings(plan: Plan) -> list[str]:
    """Return the warnings of a plan: unusual settings, and the miss of the last plan."""
    found = [f"{one.key}: {one.text}" for one in plan.warnings]
    if plan.miss is not None:
        found.append(describe_miss(plan.miss))
    return found


def describe_miss(miss: PlanMiss) -> str:
    """Describe the miss of the last plan for the same GPUs.

    >>> text = describe_miss(PlanMiss(run_id="r-1", nodes=("alpha",), planned_tokens_per_s=1000.0,
    ...     measured_tokens_per_s=250.0))
    >>> "4.0 times slower" in text
    True
    """
    ratio = miss.ratio
    pace = f"{1 / ratio:.1f} times slower" if ratio < 1 else f"{ratio:.1f} times faster"
    return (
        f"The last plan for these GPUs missed: run {miss.run_id} reached "
        f"{show_rate(miss.measured_tokens_per_s)} instead of "
        f"{show_rate(miss.planned_tokens_per_s)}, {pace}. This one may be off as much"
    )


def use_labels(text: str) -> str:
    """Return a sentence of a plan with the form's labels in place of keys of the run file.

    >>> use_labels("With optimizer: adamw and compression: none: 12 s a step")
    'With Optimizer "AdamW" and Gradient compression "None: fp32, exact": 12 s a step'
    >>> use_labels("without memory_gib, as adapter.targets: q_proj says; no nodes: start")
    'without GPU memory limit, as Layers with an adapter "q_proj" says; no nodes: start'
    """
    for key, row in sorted(run_keys().items(), key=lambda one: -len(one[0])):
        label, choices = row.about.label, dict(row.about.choices)
        # A key that is no English word may have any value, and may stand alone.
        is_odd = "." in key or "_" in key
        values = [*map(re.escape, choices), _NUMBERS, "true", "false", *([_WORD] if is_odd else [])]
        for value in re.findall(rf"(?<![\w.]){re.escape(key)}: ({'|'.join(values)})(?!\w)", text):
            text = text.replace(f"{key}: {value}", f'{label} "{choices.get(value, value)}"')
        if is_odd:
            text = re.sub(rf"(?<![\w.]){re.escape(key)}(?![\w.])", label, text)
    return text


def describe_other(candidate: Candidate) -> str:
    """Explain why a candidate was not chosen, with the time of its step if it fits."""
    step = f" ({show_duration(candidate.step_s)} a step)" if candidate.fits else ""
    # The full stop belongs after the time.
    return f"{as_sentence(candidate)[:-1]}{step}."


def as_sentence(candidate: Candidate) -> str:
    """Return a candidate's reason with a full stop, and a capital unless a node's name leads."""
    text = candidate.reason.rstrip(".")
    if not text.startswith(candidate.nodes):
        text = capitalize(text)
    return f"{text}."


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """One figure of a run, forecast and measured."""

    what: str
    foretold: str
    measured: str
    error: str
    """Relative error of the forecast, above 0 if it was too high."""


def describe_comparison(found: ForecastComparison) -> list[ComparedRow]:
    """Return forecast and measurement of each figure of a run."""
    planned, seen = found.forecast, found.measured
    rows = [
        _compare("Step", planned.step_s, seen.step_s if seen else None, show_duration),
        _compare("Speed", planned.tokens_per_s, seen.tokens_per_s if seen else None, show_rate),
        _compare("Whole run", planned.total_s, seen.total_s if seen else None, show_duration),
    ]
    # A single rank has no network to wait for.
    if len(planned.ranks) > 1:
        network_s = seen.network_s if seen else None
        rows.insert(1, _compare("Network per step", planned.network_s, network_s, show_duration))
    for number, rank in enumerate(planned.ranks):
        was = seen.ranks[number] if seen and number < len(seen.ranks) else None
        place = f"{rank.node} {rank.device}"
        rows.append(
            _compare(
                f"{place}: speed", rank.tokens_per_s, was.tokens_per_s if was else None, show_rate
            )
        )
        if rank.card is not None:
            memory_bytes = was.memory_bytes if was else None
            rows.append(
                _compare(f"{place}: memory", rank.allocated_bytes, memory_bytes, show_bytes)
            )
    return [row for row in rows if row.foretold != DASH or row.measured != DASH]


def _compare(
    what: str, planned: float | None, seen: float | None, show: Callable[[float | None], str]
) -> ComparedRow:
    error = error_of(planned, seen)
    off = DASH if error is None else f"{error * 100:+.1f} %"
    return ComparedRow(what, show(planned), show(seen), off)


def describe_calibration(found: Calibration) -> str:
    """Describe the calibration of a card in one line.

    >>> describe_calibration(Calibration(card="x", matrix_flops_per_s=4.21e13,
    ...     memory_bytes_per_s=4.7e11, to_host_bytes_per_s=1.26e10))
    '42.1 TFLOP/s, memory 470 GB/s, to the PC 12.6 GB/s'
    """
    parts = []
    if found.matrix_flops_per_s is not None:
        parts.append(f"{found.matrix_flops_per_s / 1e12:.3g} TFLOP/s")
    if found.memory_bytes_per_s is not None:
        parts.append(f"memory {found.memory_bytes_per_s / 1e9:.3g} GB/s")
    if found.to_host_bytes_per_s is not None:
        parts.append(f"to the PC {found.to_host_bytes_per_s / 1e9:.3g} GB/s")
    if found.unpack_values_per_s is not None:
        parts.append(f"4-bit weights {found.unpack_values_per_s / 1e9:.3g} billion/s")
    if found.disk_bytes_per_s is not None:
        parts.append(f"disk {found.disk_bytes_per_s / 1e9:.3g} GB/s")
    return ", ".join(parts)
