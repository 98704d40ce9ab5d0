"""`rackless watch`: keep nodes connected, watch all runs and recover them, without a window."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from app.cli.command import Commands, add_command, with_core
from app.cli.output import Output
from app.errors import UserError
from app.text import count_of

if TYPE_CHECKING:
    from app.core.core import Core


def add_parser(commands: Commands) -> None:
    text = "watch all nodes and runs without a window, and resume runs that lost a rank or node"
    add_command(commands, "watch", text, with_core(_watch))


async def _watch(core: Core, args: argparse.Namespace, out: Output) -> int:
    import asyncio  # here and below: --help does not need it
    import signal

    from app.cli.watching import ChangeLines, while_read
    from app.events import ACTIVE_STATES

    nodes = core.nodes.all()
    if not nodes:
        raise UserError("there are no nodes yet", "Add one: rackless nodes add NAME --local")
    ended = asyncio.Event()
    # Windows event loops have no signal handlers.
    if sys.platform != "win32":
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    with core.events.listening(while_read(ChangeLines(out).take)):
        await core.nodes.connect()
        active = [run for run in core.runs.all() if run.state in ACTIVE_STATES]
        out.note(
            f"watching {count_of(len(nodes), 'node')} and {count_of(len(active), 'active run')}; "
            "runs keep training when this ends"
        )
        await ended.wait()
    return 0
