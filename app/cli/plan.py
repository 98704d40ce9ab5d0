"""`rackless plan`: needs, speed and placement of a run, and why the alternatives lost."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents.contract.spec import RunSpec
from app.cli.kit.command import add_acceptance, add_run_file, with_core
from app.cli.kit.output import Output, plain
from app.cli.parts.comparisons import (
    add_comparisons,
    print_fitting,
    print_upgrades,
    require_matching,
)
from app.core.action import CoreApi
from app.core.library import CountLeftOut, ListSentFiles, ReadRunFile
from app.core.runs import PlanRun
from app.library.sent_files import SentFiles, say_sent
from app.planning.candidate import Candidate, Caveats, GpuPlan, Plan
from app.presentation import plan_text
from app.presentation.data_text import describe_first_rows
from app.presentation.left_out_text import ON_A_NODE, say_count
from app.presentation.model_text import CHECK, describe_caveats, describe_limits, describe_model
from app.text import capitalize, show_bytes, show_model, show_rate, show_share

if TYPE_CHECKING:
    from app.runs.inputs.left_out import DataCount

MOST_SHOWN = 6
"""Maximum number of alternatives in the human form; --json has all."""


def declare(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(handler=with_core(_plan))
    add_run_file(parser, is_optional=True)
    add_acceptance(parser)
    parser.add_argument(
        "--cluster",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="plan for the PCs described in this YAML file instead of the nodes; repeated: compare"
        " the plans for several files",
    )
    add_comparisons(parser)


async def _plan(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    require_matching(args)
    if args.best:
        return await print_fitting(core, args, out)
    spec = await core.do(ReadRunFile(path=args.run_file, settings=args.set))
    if args.upgrade:
        return await print_upgrades(core, spec, args, out)
    if len(args.cluster) > 1:
        return await _compare(core, spec, args.cluster, out)
    cluster = args.cluster[0] if args.cluster else None
    plan = await core.do(PlanRun(spec=spec, cluster=cluster))
    sent = await core.do(ListSentFiles(spec=spec))
    # Data that a start refuses anyway is not worth counting.
    counts = () if plan.refuses_data else await core.do(CountLeftOut(spec=spec), out.report)
    out.document({**plan_document(plan), "sent": plain(sent), "left_out": plain(counts)})
    print_plan(plan, spec, out)
    print_counts(counts, out)
    print_sent(sent, out)
    asks = any(one.found is not None and one.found.loses_much for one in counts)
    if asks and not args.accept_left_out:
        out.text("\nA start asks about this loss: --accept-left-out accepts it.")
        return 1
    return 0 if plan.chosen is not None and not plan.refuses_data else 1


async def _compare(core: CoreApi, spec: RunSpec, files: Sequence[Path], out: Output) -> int:
    """Print the plans for several clusters as columns of one table."""
    plans = [await core.do(PlanRun(spec=spec, cluster=file)) for file in files]
    out.document(
        {
            "clusters": [
                {"cluster": str(file), "plan": plan_document(plan)}
                for file, plan in zip(files, plans, strict=True)
            ]
        }
    )
    out.text(f"{show_model(spec.model)}, {spec.adapter.kind}")
    rows = plan_text.compare_plans(plans)
    out.table(["", *name_files(files)], [[caption, *cells] for caption, *cells in rows])
    for name, plan in zip(name_files(files), plans, strict=True):
        if plan.chosen is None:
            helps = [f"  {advice.text}" for advice in plan.advice[:1]]
            out.text("\n".join(["", f"{name}: {plan_text.describe_plan(plan)}", *helps]))
    return 0 if all(plan.chosen is not None for plan in plans) else 1


def name_files(files: Sequence[Path]) -> list[str]:
    """Return the names of cluster files, with their folders if two are equal.

    >>> name_files([Path("a/pcs.yaml"), Path("b.yaml")])
    ['pcs', 'b']
    """
    names = [file.stem for file in files]
    return names if len(set(names)) == len(names) else [str(file) for file in files]


def print_counts(counts: Sequence[DataCount], out: Output) -> None:
    """Print how many rows a run would leave out or cut."""
    lines = [
        f"{one.name}: {ON_A_NODE}" if one.found is None else say_count(one.name, one.found)
        for one in counts
    ]
    _print_list("Data, counted", lines, out)


def print_plan(plan: Plan, spec: RunSpec, out: Output) -> None:
    """Print a plan in human form."""
    out.text(f"{show_model(spec.model)}, {spec.adapter.kind}")
    if plan.model is not None:
        out.text(describe_model(plan.model))
    out.text(plan_text.describe_plan(plan))
    if plan.id:
        out.text(f"  {'Plan':<20}{plan.id}, which the next start executes")
    if plan.chosen is not None:
        for caption, text in plan_text.describe_candidate(plan.chosen):
            out.text(f"  {caption:<20}{text}")
        out.text(f"  {'After a loss':<20}{plan_text.describe_recovery(spec, plan.chosen.mode)}")
        out.text(f"  {'Loss not finite':<20}{plan_text.describe_divergence(spec)}")
    # If nothing fits, the first alternative shows which GPU lacks memory.
    shown = plan.chosen or (plan.others[0] if plan.others else None)
    if shown is not None:
        out.text("")
        _print_gpus(shown, out)
    limits = [one.text for one in describe_limits(plan.limits)]
    _print_list(CHECK, [*limits, *plan_text.describe_warnings(plan)], out)
    _print_list("What would help", [advice.text for advice in plan.advice], out)
    # Without a plan that fits, the first alternative is shown above.
    others = plan.others if plan.chosen is not None else plan.others[1:]
    ways = [plan_text.describe_other(one) for one in others[:MOST_SHOWN]]
    refused = [f"{capitalize(one.text)}." for one in plan.refused]
    _print_list("Other ways", [*ways, *refused], out)
    print_caveats(Caveats(parts=plan.parts), out)
    _print_list("Assumed", list(plan.assumptions), out)
    rows = [f"{caption}: {text}" for caption, text in describe_first_rows(plan.findings)]
    _print_list("Data, by its first rows", rows, out)
    if plan.refuses_data:
        out.text("\nA start refuses this data.")


def print_sent(sent: Sequence[SentFiles], out: Output) -> None:
    """Print which files of this PC the nodes would get."""
    _print_list("Sent from this PC to the nodes", [say_sent(one) for one in sent], out)


def print_caveats(caveats: Caveats, out: Output) -> None:
    """Print the parts of a model that a run leaves unadapted, and where layers are not compiled."""
    for title, lines in describe_caveats(caveats):
        _print_list(title, lines, out)


def _print_gpus(candidate: Candidate, out: Output) -> None:
    rows = []
    for gpu in sorted(candidate.gpus, key=lambda one: (one.replica, one.layers or (0, 0))):
        groups = plan_text.group_memory(gpu.memory.parts.items())
        rows.append(
            [
                f"{gpu.node} {gpu.device}",
                gpu.card,
                show_share(gpu.share),
                show_rate(gpu.tokens_per_s),
                plan_text.describe_memory(gpu),
                "" if gpu.fits else "does not fit",
                ", ".join(f"{name} {show_bytes(size)}" for name, size in groups if size),
                plan_text.describe_setting(gpu, candidate.num_replicas),
            ]
        )
    head = ["GPU", "CARD", "SHARE", "ALONE", "MEMORY", "", "PARTS", "SETTING"]
    # A column that is empty in every row would only take width.
    if all(gpu.fits for gpu in candidate.gpus):
        head, rows = _without(head, 5), [_without(row, 5) for row in rows]
    out.table(head, rows)


def _without(row: list[str], place: int) -> list[str]:
    return [*row[:place], *row[place + 1 :]]


def _print_list(title: str, lines: list[str], out: Output) -> None:
    if lines:
        out.text(f"\n{title}")
        for line in lines:
            out.text(f"  {line}")


# ---------------------------------------------------------------- as JSON


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return a plan as --json prints it, with the sums of its parts."""
    return {
        "fits": plan.chosen is not None,
        "chosen": _candidate(plan.chosen) if plan.chosen is not None else None,
        "id": plan.id,
        "others": [_candidate(candidate) for candidate in plan.others],
        "refused": [
            {
                "mode": one.mode,
                "keys": list(one.keys),
                "text": one.text,
                "change": dict(one.change),
                "would": _candidate(one.would) if one.would is not None else None,
            }
            for one in plan.refused
        ],
        "advice": [{"text": one.text, "change": dict(one.change)} for one in plan.advice],
        "assumptions": list(plan.assumptions),
        "model": plain(plan.model),
        "parts": plain(plan.parts),
        "limits": plain(plan.limits),
        "findings": plain(plan.findings),
        "warnings": [{"key": one.key, "text": one.text} for one in plan.warnings],
        "miss": plain(plan.miss),
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "mode": candidate.mode,
        "nodes": list(candidate.nodes),
        "fits": candidate.fits,
        "runnable": candidate.runnable,
        "step_s": candidate.step_s,
        "parts_s": plain(candidate.parts_s),
        "tokens_per_s": candidate.tokens_per_s,
        "tokens_per_step": candidate.tokens_per_step,
        "num_steps": candidate.num_steps,
        "ten_million_tokens_s": candidate.ten_million_tokens_s,
        "total_s": candidate.total_s,
        "energy_wh": candidate.energy_wh,
        "pc_energy_wh": candidate.pc_energy_wh,
        "cost": candidate.cost,
        "wire_s": candidate.wire_s,
        "reason": candidate.reason,
        "gpus": [_gpu(gpu) for gpu in candidate.gpus],
    }


def _gpu(gpu: GpuPlan) -> dict[str, Any]:
    memory = gpu.memory
    return {
        "node": gpu.node,
        "device": gpu.device,
        "card": gpu.card,
        "share": gpu.share,
        "layers": gpu.layers,
        "replica": gpu.replica,
        "max_in_flight": gpu.max_in_flight,
        "offloads": gpu.offloads,
        "num_streamed": gpu.num_streamed,
        "streams_from": gpu.streams_from,
        "host_bytes": gpu.host_bytes,
        "fits": gpu.fits,
        "tokens_per_s": gpu.tokens_per_s,
        "setting": plain(gpu.setting),
        "room_bytes": gpu.room_bytes,
        "memory": {
            "low_bytes": memory.low_bytes,
            "expected_bytes": memory.expected_bytes,
            "high_bytes": memory.high_bytes,
            "allocated_bytes": memory.allocated_bytes,
            "parts_bytes": dict(memory.parts),
        },
    }
