"""`rackless export`: a run's model as a folder on this PC."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from agents.contract.formats import ENGINES, FORMATS
from app.artifacts.estimates.plan import ExportPlan, describe_plan
from app.artifacts.exports.request import ExportRequest
from app.cli.kit.command import with_core
from app.cli.kit.output import Output
from app.core.action import CoreApi
from app.core.artifacts import ExportModel, PlanExport
from app.errors import UsageError
from app.presentation.result_text import describe_verdict
from app.program import started_s
from app.shell_words import command_here


def declare(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(handler=with_core(_export))
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--to", required=True, choices=FORMATS)
    parser.add_argument(
        "--type",
        action="append",
        default=[],
        metavar="TYPE",
        help="of gguf: Q8_0 (the default), F16, Q6_K, Q5_K_M, Q4_K_M, Q3_K_M, several at once; "
        "of gptq: 4-bit (the default), 8-bit",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="a new or empty folder")
    parser.add_argument(
        "--plan",
        action="store_true",
        help="only show the forecast: time, memory and disk on each node",
    )
    parser.add_argument(
        "--checkpoint", type=int, metavar="STEP", help="default: the newest complete checkpoint"
    )
    parser.add_argument(
        "--node", metavar="NAME", help="default: the first with the checkpoint and enough room"
    )
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default=ENGINES[0],
        help=f"package that makes awq (default: {ENGINES[0]}; autoawq is archived)",
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="calibration data for awq and gptq; default: the run's own data",
    )


async def _export(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    if args.plan:
        return await _plan(core, args, out)
    if args.out is None:
        raise UsageError("the folder for the result is missing", "Name one with --out DIR.")
    made = await core.do(ExportModel(request=_read_request(args), out=args.out), out.report)
    measured = {"verdicts": made.verdicts} if made.verdicts else {}
    out.document({"path": str(made.path), "artifact": made.artifact, **measured})
    out.text(str(made.path))
    out.note(
        f"saved as {made.artifact}; see: "
        + command_here("rackless", "artifacts", "show", made.artifact)
    )
    for verdict in made.verdicts:
        out.text(describe_verdict(verdict))
    return 0


async def _plan(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    plan = await core.do(PlanExport(request=_read_request(args)))
    out.document(_plan_document(plan))
    out.text("\n".join(describe_plan(plan)))
    return 0 if plan.best is not None else 1


def _read_request(args: argparse.Namespace) -> ExportRequest:
    return ExportRequest(
        run_id=args.run,
        to=args.to,
        types=tuple(args.type),
        checkpoint=args.checkpoint,
        node=args.node,
        calibration=args.calibration,
        engine=args.engine,
        asked_s=started_s(),
    )


def _plan_document(plan: ExportPlan) -> dict[str, Any]:
    places = [
        {
            "node": one.node,
            "seconds": one.seconds,
            "ram_bytes": one.ram_bytes,
            "vram_bytes": one.vram_bytes,
            "node_bytes": one.node_bytes,
            "is_unpacked": one.is_unpacked,
            "problems": one.problems,
            "note": one.note,
            "learned": one.learned,
            "phases": one.phases,
        }
        for one in plan.places
    ]
    return {
        "to": plan.to,
        "types": plan.types,
        "step": plan.step,
        "made": plan.made,
        "best": plan.best and plan.best.node,
        "places": places,
    }
