"""Declare and run commands: parsers that raise UsageError, and a core for each handler."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from app.cli.kit.failures import logging_json, print_notice
from app.cli.kit.output import Output
from app.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from app.core.action import CoreApi

INTERRUPTED = Interrupted.exit_code
"""Exit code after Ctrl-C, by the convention of shells (128 + SIGINT)."""
Handler = Callable[[argparse.Namespace, Output], int]
CoreHandler = Callable[["CoreApi", argparse.Namespace, Output], Awaitable[int]]
# argparse gives the misspelt word and the choices in its message alone.
_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """Raises UsageError for wrong arguments instead of printing and exiting."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(_shortened(message), f"See: {self.prog} --help", where=self.prog)


def _shortened(message: str) -> str:
    """Return argparse's message; for a misspelt word with the nearest right one."""
    match = _CHOICE.search(message)
    if match is None:
        return message
    word, listed = match.groups()
    choices = [choice.strip().strip("'") for choice in listed.split(",")]
    import difflib  # on use: only a misspelt word needs it

    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    guess = f"; did you mean {near[0]}?" if near else f"; choose from {', '.join(choices)}"
    return f"unknown command or choice '{word}'{guess}"


Commands = Any
"""Return type of `ArgumentParser.add_subparsers`, for which argparse has no public name."""


def add_command(
    commands: Commands, name: str, help_text: str, handler: Handler | None = None
) -> argparse.ArgumentParser:
    """Declare a command; without `handler` it is a noun with verbs below it."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=help_text, description=help_text[0].upper() + help_text[1:] + "."
    )
    add_json_option(parser)
    parser.set_defaults(command_name=parser.prog)
    if handler is not None:
        parser.set_defaults(handler=handler)
    return parser


def add_run_file(parser: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    """Declare the run file of a command, and the values that replace those of the file."""
    nargs = "?" if is_optional else None
    parser.add_argument("run_file", metavar="RUN.yaml", type=Path, nargs=nargs)
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="use this value instead of the file's, such as learning_rate=1e-4 or "
        "adapter.rank=32; may be repeated",
    )


def add_acceptance(parser: argparse.ArgumentParser) -> None:
    """Declare the option that accepts the loss of many rows."""
    parser.add_argument(
        "--accept-left-out",
        action="store_true",
        help="accept that more than 5 %% of the rows, or of their tokens, are left out",
    )


def add_verbs(parser: argparse.ArgumentParser) -> Commands:
    return parser.add_subparsers(title="what to do", metavar="VERB", required=True)


def add_shared_option(parser: argparse.ArgumentParser, *names: str, **options: Any) -> None:
    """Declare an option of a noun that its verbs declare too, so that it may stand on either side.

    A default here would overwrite a value given before the verb's name. So the option has no
    default, and the attribute exists only if it was given.
    """
    parser.add_argument(*names, default=argparse.SUPPRESS, **options)


def add_json_option(parser: argparse.ArgumentParser) -> None:
    add_shared_option(
        parser, "--json", action="store_true", help="print JSON on stdout and nothing else"
    )


def with_core(handler: CoreHandler) -> Handler:
    """Make a handler that opens the core, runs on its loop, and closes it."""

    def run(args: argparse.Namespace, out: Output) -> int:
        import asyncio  # 50 ms that --help does not need

        try:
            with logging_json() if out.as_json else contextlib.nullcontext():
                return asyncio.run(_run_with_core(handler, args, out))
        except asyncio.CancelledError:  # by a listener whose reader has gone, and nothing else
            raise BrokenPipeError from None

    return run


async def _run_with_core(handler: CoreHandler, args: argparse.Namespace, out: Output) -> int:
    from app.core.core import Core
    from app.paths import default_home

    async with Core.open(default_home()) as core:
        if core.notice:
            print_notice(core.notice, as_json=out.as_json)
        return await handler(core, args, out)


def names_of(text: str) -> tuple[str, ...]:
    """Argument type of comma-separated names.

    >>> names_of("alpha, beta")
    ('alpha', 'beta')
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError("name at least one node, such as alpha,beta")
    return names
