"""`rackless plan`: announced, not here yet. A run file is read all the same, so mistakes show."""

from __future__ import annotations

import argparse
from pathlib import Path

from app.cli.command import Commands, add_command
from app.cli.output import Output
from app.errors import NotAvailableYet


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "plan", "show what a run would need (not available yet)", _plan)
    parser.add_argument("run_file", metavar="RUN.yaml", type=Path)


def _plan(args: argparse.Namespace, out: Output) -> int:
    from app.runs.spec_file import read_run_file

    read_run_file(args.run_file)
    raise NotAvailableYet(
        "plans are not available yet; the run file itself is right",
        f"Start it, shares are then measured: rackless start {args.run_file}",
    )
