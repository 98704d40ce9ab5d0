"""Read the arguments, run the command, and turn every error into words and an exit code.

Heavy modules are imported by the commands that need them: `rackless --help` reads argparse alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from app.cli import (
    artifacts,
    chat,
    check,
    checkpoints,
    compare,
    demo,
    export,
    gui,
    monitor,
    nodes,
    plan,
    preview,
    recipes,
    runs,
    settings,
    start,
)
from app.cli.command import INTERRUPTED, Parser, add_json_option
from app.cli.output import Output
from app.errors import RacklessError, UserError

_EPILOG = "Exit codes: 0 done, 1 could not be done, 2 wrong usage. State lives in $RACKLESS_HOME."


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = Parser(
        prog="rackless",
        description="The control centre for the GPU cluster you already own.",
        epilog=_EPILOG,
    )
    add_json_option(parser)
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="print the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for noun in (
        gui,
        demo,
        nodes,
        check,
        monitor,
        plan,
        preview,
        recipes,
        start,
        runs,
        checkpoints,
        export,
        artifacts,
        chat,
        compare,
        settings,
    ):
        noun.add_parser(commands)
    # `rackless` alone opens the window; each command's own handler replaces this one.
    parser.set_defaults(handler=gui.open_window)
    return parser


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code; never raises for a user's mistake."""
    # Read from the arguments, since parsing them may be what fails.
    as_json = "--json" in argv
    try:
        args = build_parser().parse_args(argv)
        # Its default is suppressed, so the attribute exists only if --json was given.
        out = Output(getattr(args, "json", False))
        return int(args.handler(args, out))
    except SystemExit as end:  # --help and --version
        return int(end.code or 0)
    except UserError as error:
        _tell(error.message, error.hint)
        return error.exit_code
    except KeyboardInterrupt:
        if not as_json:
            _tell("interrupted; runs that were started keep training", "See: rackless runs list")
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone. Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except RacklessError as error:
        _tell_bug(str(error), getattr(error, "traceback", ""))
        return 1
    except Exception as error:  # noqa: BLE001 -- the outermost edge of the command line
        _tell_bug(f"{type(error).__name__}: {error}", traceback.format_exc())
        return 1


def _tell(message: str, hint: str) -> None:
    print(f"rackless: {message}", file=sys.stderr)
    if hint:
        print(f"  what to do: {hint}", file=sys.stderr)


def _tell_bug(message: str, trace: str) -> None:
    _tell(f"internal error: {message}", "Please report it with the lines below.")
    print(trace.rstrip(), file=sys.stderr)


class _ShowVersion(argparse.Action):
    """Print the version, looked up only on request: it takes 20 ms."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"rackless {version('rackless')}")
        parser.exit()
