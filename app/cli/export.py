"""`rackless export`: a run's model as a folder on this PC."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from agents.artifacts import FORMATS
from app.cli.command import Commands, add_command, with_core
from app.cli.output import Output
from app.telling import describe_verdict

if TYPE_CHECKING:
    from app.core import Core


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "export", "write a run's model to a folder", with_core(_export))
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
    parser.add_argument("--out", required=True, type=Path, metavar="DIR")
    parser.add_argument("--checkpoint", type=int, metavar="STEP", help="none: the newest whole one")
    parser.add_argument("--node", metavar="NAME", help="none: the first that has it and the room")
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="data that awq and gptq are fitted to; none: the run's own",
    )


async def _export(core: Core, args: argparse.Namespace, out: Output) -> int:
    made = await core.export_run(
        args.run,
        args.to,
        out=args.out,
        types=args.type,
        checkpoint=args.checkpoint,
        node=args.node,
        calibration=args.calibration,
        progress=out.note,
    )
    measured = {"verdicts": made.verdicts} if made.verdicts else {}
    out.document({"path": str(made.path), "artifact": made.artifact, **measured})
    out.text(str(made.path))
    for verdict in made.verdicts:
        out.text(describe_verdict(verdict))
    return 0
