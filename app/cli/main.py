"""Read the arguments, run the command, and turn every error into words and an exit code.

Each command is one module of this package, imported only if the command line names it. So that
module imports all that it needs at its top, while `rackless --help` loads argparse alone.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from app.cli.gui import open_window
from app.cli.kit import failures
from app.cli.kit.command import INTERRUPTED, Parser, add_command, add_json_option
from app.cli.kit.output import Output, prepare_console
from app.errors import UserError

_EPILOG = "Exit codes: 0 done, 1 could not be done, 2 wrong usage. State lives in $RACKLESS_HOME."
_COMMANDS = {
    "gui": "open the window (also: rackless alone)",
    "demo": "run the whole workflow with a small model on this PC",
    "nodes": "add, list, show, remove, set up and measure PCs",
    "check": "check that nodes are ready for a run",
    "monitor": "show live readings of all nodes",
    "plan": "show what a run needs, where it would train and how fast, without starting it",
    "preview": "preview the data of a run and what the model learns from it",
    "models": "find, download and list models of the hub",
    "data": "find, download and list data sets of the hub, and show rows of data",
    "recipes": "list and show run files to start from",
    "start": "start a run from its run file",
    "watch": "watch all nodes and runs without a window, and resume runs that lost a rank or node",
    "runs": "list, show, trace, stop, resume, delete runs",
    "checkpoints": "list checkpoints over all nodes",
    "export": "write a run's model to a folder",
    "artifacts": "list artifacts, the results of exports, and work with them",
    "chat": "chat with a trained model",
    "compare": "ask models the same prompts",
    "settings": "list and change settings",
    "help": "explain a problem: a topic, or words of it",
    "doctor": "collect what support needs to know into one file, without passwords and keys",
}
"""Help text of each command; its module has the same name, and declares its arguments."""


def build_parser(argv: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Return the parser; with `argv`, commands that it does not name lack their arguments."""
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
    for name, text in _COMMANDS.items():
        command = add_command(commands, name, text)
        # A word of `argv` may equal a name by chance, which only costs an import.
        if argv is None or name in argv:
            import_module(f"app.cli.{name}").declare(command)
    # `rackless` alone opens the window; each command's own handler replaces this one.
    parser.set_defaults(handler=open_window, command_name=parser.prog)
    return parser


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code; never raises for a user's mistake."""
    prepare_console()
    # Read from the arguments, since parsing them may be what fails.
    as_json = failures.wants_json(argv)
    command = "rackless"
    try:
        args = build_parser(argv).parse_args(argv)
        command = args.command_name
        # Its default is suppressed, so the attribute exists only if --json was given.
        return int(args.handler(args, Output(getattr(args, "json", False))))
    except SystemExit as end:  # --help and --version
        return int(end.code or 0)
    except BrokenPipeError:
        return 1  # the reader of the output has gone
    except KeyboardInterrupt as error:
        _print_failure(error, command, as_json)
        return INTERRUPTED
    except UserError as error:
        _print_failure(error, command, as_json)
        return error.exit_code
    except Exception as error:  # noqa: BLE001 -- the outermost edge of the command line
        _print_fault(error, command, as_json)
        return 1
    finally:
        _drop_what_cannot_be_written()


def _drop_what_cannot_be_written() -> None:
    # Python flushes once more when it ends, and would complain and exit with 120.
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_failure(error: BaseException, command: str, as_json: bool) -> None:
    failure = failures.describe(error, command)
    failures.print_json(failure) if as_json else failures.print_words(failure)


def _print_fault(error: Exception, command: str, as_json: bool) -> None:
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
