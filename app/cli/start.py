"""`rackless start`: start a run, and with `--watch` stay until it ends."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.command import Commands, add_command, with_core
from app.cli.output import Output
from app.text import show_list

if TYPE_CHECKING:
    from app.core import Core


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "start", "start a run from its run file", with_core(_start))
    parser.add_argument("run_file", metavar="RUN.yaml", type=Path)
    parser.add_argument("--watch", action="store_true", help="show progress until the run ends")


async def _start(core: Core, args: argparse.Namespace, out: Output) -> int:
    def announced(run_id: str) -> None:
        out.text(run_id)
        if args.watch:
            out.line({"kind": "announced", "run_id": run_id})

    run = await core.start_run(core.read_run_file(args.run_file), announced)
    out.note(f"running on {show_list(run.nodes)}")
    if args.watch:
        from app.cli.watching import watch

        return await watch(core, run.run_id, out)
    out.document(run)
    out.note(f"look at it with: rackless runs show {run.run_id}")
    return 0
