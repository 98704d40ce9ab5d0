"""`rackless doctor`: one file with everything that support will ask for, without secrets."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from app.cli.kit.output import Output
from app.doctor.part import ReportPart
from app.doctor.report import collect_report, default_file, save_report
from app.paths import default_home


def declare(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(handler=_report)
    parser.add_argument("node", nargs="?", metavar="NODE", help="only about this node")
    parser.add_argument("--out", metavar="FILE", type=Path, help="zip file to write")
    parser.add_argument(
        "--keep-names",
        action="store_true",
        help="keep names of home folders and logins; they become USER otherwise",
    )


def _report(args: argparse.Namespace, out: Output) -> int:
    parts = asyncio.run(
        collect_report(
            default_home(), node=args.node, keep_names=args.keep_names, progress=out.note
        )
    )
    out.table(["FILE", "CHARACTERS", "WHAT"], [_row(part) for part in parts])
    path = (args.out or default_file(Path())).absolute()
    num_bytes = save_report(parts, path)
    contents = [{"name": p.name, "what": p.what, "characters": len(p.text)} for p in parts]
    out.document({"file": str(path), "bytes": num_bytes, "parts": contents})
    out.text(f"\n{path}: {num_bytes:,} bytes. Read it before you send it: logs quote programs.")
    return 0


def _row(part: ReportPart) -> list[str]:
    return [part.name, f"{len(part.text):,}", part.what]
