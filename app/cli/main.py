"""Read the arguments, run the command, and turn every error into words and an exit code.

Heavy modules are imported by the commands that need them: `rackless --help` reads argparse alone.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from app.cli import (
    artifacts,
    chat,
    check,
    checkpoints,
    compare,
    demo,
    doctor,
    export,
    gui,
    help,
    monitor,
    nodes,
    plan,
    preview,
    recipes,
    runs,
    settings,
    start,
    watch,
)
from app.cli.kit import failures
from app.cli.kit.command import INTERRUPTED, Parser, add_json_option
from app.cli.kit.output import Output, prepare_console
from app.errors import UserError

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
    parser.add_argument(
        "--self-test", action=_TestSelf, nargs=0, help="try every part of this installation"
    )
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
        watch,
        runs,
        checkpoints,
        export,
        artifacts,
        chat,
        compare,
        settings,
        help,
        doctor,
    ):
        noun.add_parser(commands)
    # `rackless` alone opens the window; each command's own handler replaces this one.
    parser.set_defaults(handler=gui.open_window, command_name=parser.prog)
    return parser


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code; never raises for a user's mistake."""
    prepare_console()
    # Read from the arguments, since parsing them may be what fails.
    as_json = failures.wants_json(argv)
    command = "rackless"
    try:
        args = build_parser().parse_args(argv)
        command = args.command_name
        # Its default is suppressed, so the attribute exists only if --json was given.
        return int(args.handler(args, Output(getattr(args, "json", False))))
    except SystemExit as end:  # --help and --version
        return int(end.code or 0)
    except BrokenPipeError:
        return 1  # whoever read our output has gone
    except KeyboardInterrupt as error:
        _tell(error, command, as_json)
        return INTERRUPTED
    except UserError as error:
        _tell(error, command, as_json)
        return error.exit_code
    except Exception as error:  # noqa: BLE001 -- the outermost edge of the command line
        _tell_fault(error, command, as_json)
        return 1
    finally:
        _drop_what_cannot_be_written()


def _drop_what_cannot_be_written() -> None:
    # Python flushes once more when it ends, and would complain and exit with 120.
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell(error: BaseException, command: str, as_json: bool) -> None:
    failure = failures.describe(error, command)
    failures.print_json(failure) if as_json else failures.print_words(failure)


def _tell_fault(error: Exception, command: str, as_json: bool) -> None:
    if as_json:
        # A trace of many lines is no JSON, so it goes to a file.
        report = failures.write_report(error, command)
        failures.print_json(failures.describe(error, command, report))
    else:
        failures.print_words(failures.describe(error, command))
        print(failures.trace_of(error), file=sys.stderr)


class _ShowVersion(argparse.Action):
    """Print the version, looked up only on request: it takes 20 ms."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"rackless {version('rackless')}")
        parser.exit()


class _TestSelf(argparse.Action):
    """Try this installation, and exit with 0 if all of it works."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from app.cli.self_test import test_self

        parser.exit(test_self())
