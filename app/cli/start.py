"""`rackless start`: start a run, and with `--watch` stay until it ends."""

from __future__ import annotations

import argparse

from app.cli.kit.command import add_acceptance, add_run_file, with_core
from app.cli.kit.output import Output
from app.cli.kit.watching import Watching
from app.core.action import CoreApi
from app.core.library import ListSentFiles, ReadRunFile
from app.core.runs import RunAnnounced, StartRun
from app.library.sent_files import say_sent
from app.text import show_list


def declare(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(handler=with_core(_start))
    add_run_file(parser)
    parser.add_argument("--watch", action="store_true", help="show progress until the run ends")
    add_acceptance(parser)


async def _start(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    spec = await core.do(ReadRunFile(path=args.run_file, settings=args.set))
    for sent in await core.do(ListSentFiles(spec=spec)):
        out.note(f"goes to nodes that lack it: {say_sent(sent)}")
    start = StartRun(spec=spec, accept_left_out=args.accept_left_out)
    if args.watch:
        return await _start_and_watch(core, start, out)

    def report(event: object) -> None:
        # The id is printed before any node is asked, so that an interrupted start can be found.
        if isinstance(event, RunAnnounced):
            out.text(event.run_id)
        out.report(event)

    run = await core.do(start, report)
    out.document(run)
    out.note(f"running on {show_list(run.nodes)}; see: rackless runs show {run.run_id}")
    return 0


async def _start_and_watch(core: CoreApi, start: StartRun, out: Output) -> int:
    def report(event: object) -> None:
        if isinstance(event, RunAnnounced):
            out.text(event.run_id)
            out.line({"kind": "announced", "run_id": event.run_id})
            watching.run_id = event.run_id
        out.report(event)

    # Listening begins before the start, or the first events would be missed; until the id is
    # announced nothing matches.
    with Watching(core, out) as watching:
        run = await core.do(start, report)
        return await watching.until_end(run.run_id)
