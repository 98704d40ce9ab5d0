"""`rackless watch`: keep nodes connected, watch all runs and recover them, without a window."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys

from app.cli.kit.command import with_core
from app.cli.kit.output import Output
from app.cli.kit.watching import ChangeLines, while_read
from app.core.action import CoreApi
from app.core.nodes import ConnectNodes, ListNodes
from app.core.runs import ListRuns
from app.core.watch_service.service import ServiceReport
from app.core.watch_service.system import this_command, user_service
from app.errors import StoreLost, UserError
from app.events import ACTIVE_STATES, Event, NodeSnapshot, StoreFailed
from app.paths import default_home
from app.text import count_of


def declare(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(handler=_run)
    service = parser.add_mutually_exclusive_group()
    service.add_argument(
        "--install", action="store_true", help="make it a service of your user, and start it"
    )
    service.add_argument("--uninstall", action="store_true", help="end and remove that service")
    service.add_argument("--status", action="store_true", help="show that service")


def _run(args: argparse.Namespace, out: Output) -> int:
    if args.install:
        return with_core(_install)(args, out)
    if args.uninstall:
        return _uninstall(out)
    if args.status:
        return _show_status(out)
    # Opening it would create an empty one, and a service would do so again and again.
    if not (home := default_home()).is_dir():
        raise UserError(
            f"the home {home} is not there",
            "If you moved it, set RACKLESS_HOME to its new place, or install the service again: "
            "rackless watch --install",
            where=str(home),
        )
    return with_core(_watch)(args, out)


async def _watch(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    nodes = await _require_nodes(core)
    ended = asyncio.Event()
    lost: list[StoreFailed] = []

    def take(event: Event) -> None:
        if isinstance(event, StoreFailed):
            lost.append(event)
            ended.set()

    # Windows event loops have no signal handlers.
    if sys.platform != "win32":
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    with core.events.listening(while_read(ChangeLines(out).take)), core.events.listening(take):
        await core.do(ConnectNodes())
        active = [run for run in await core.do(ListRuns()) if run.state in ACTIVE_STATES]
        out.note(
            f"watching {count_of(len(nodes), 'node')} and {count_of(len(active), 'active run')}; "
            "runs keep training when this ends"
        )
        await ended.wait()
    if lost:
        # With an exit code other than 0, its service starts it again.
        raise StoreLost(lost[0].message, lost[0].hint)
    return 0


async def _require_nodes(core: CoreApi) -> tuple[NodeSnapshot, ...]:
    nodes = await core.do(ListNodes())
    if not nodes:
        raise UserError("there are no nodes yet", "Add one: rackless nodes add NAME --local")
    return nodes


async def _install(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    # The service would fail again and again.
    await _require_nodes(core)
    service = user_service()
    report = await asyncio.to_thread(service.install, this_command(default_home()))
    out.document(report)
    out.text(f"wrote {report.file}:")
    out.text("\n".join(f"    {line}" for line in report.text.splitlines()))
    _say_commands(out, report)
    out.text(f"The service is {report.state}. Undo all of it: rackless watch --uninstall")
    if report.advice:
        out.text(report.advice)
    return 0


def _uninstall(out: Output) -> int:
    report = user_service().uninstall()
    out.document(report)
    if not report.file:
        out.text("the service was not installed")
        return 0
    _say_commands(out, report)
    out.text(f"removed {report.file}. Runs keep training.")
    return 0


def _show_status(out: Output) -> int:
    report = user_service().status()
    out.document(report)
    if report.state == "not installed":
        out.text("the service is not installed. Install it: rackless watch --install")
        return 1
    home = f", for the home {report.home}" if report.home else ""
    out.text(f"the service is {report.state} ({report.file}){home}")
    if report.advice:
        out.text(report.advice)
    return 0 if report.state == "running" else 1


def _say_commands(out: Output, report: ServiceReport) -> None:
    for command in report.commands:
        out.text(f"ran {command}")
