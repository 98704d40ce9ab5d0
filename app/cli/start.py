"""`rackless start`: start a run, and with `--watch` stay until it ends."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from app.cli.command import Commands, add_command, add_run_file, with_core
from app.cli.output import Output
from app.text import show_list

if TYPE_CHECKING:
    from agents.contract.spec import RunSpec
    from app.core.core import Core


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "start", "start a run from its run file", with_core(_start))
    add_run_file(parser)
    parser.add_argument("--watch", action="store_true", help="show progress until the run ends")


async def _start(core: Core, args: argparse.Namespace, out: Output) -> int:
    spec = core.library.read_run_file(args.run_file, args.set)
    from app.library.sent_files import say_sent

    for sent in await core.library.list_sent(spec):
        out.note(f"goes to nodes that lack it: {say_sent(sent)}")
    if args.watch:
        return await _start_and_watch(core, spec, out)
    # The id is printed before any node is asked, so that an interrupted start can be found.
    run = await core.runs.start(spec, out.text, out.progress)
    out.document(run)
    out.note(f"running on {show_list(run.nodes)}; see: rackless runs show {run.run_id}")
    return 0


async def _start_and_watch(core: Core, spec: RunSpec, out: Output) -> int:
    from app.cli.watching import Watching

    def announced(run_id: str) -> None:
        out.text(run_id)
        out.line({"kind": "announced", "run_id": run_id})
        watching.run_id = run_id

    # Listening begins before the start, or the first events would be missed; until the id is
    # announced nothing matches.
    with Watching(core, out) as watching:
        run = await core.runs.start(spec, announced, out.progress)
        return await watching.until_end(run.run_id)
