"""Make docs/commands.md from the parsers: `python -m tests.commands_page`.

Lines are built from argparse's actions, because its own usage text differs between Pythons.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from app.cli.main import build_parser

PAGE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"
_HEAD = """\
# Commands

Everything that the window does, `rackless` does too. This page is made from the command line's
parsers; `rackless COMMAND --help` prints the same.

Every command takes `--json`. Exit codes: 0 done, 1 could not be done, 2 wrong usage
([Automation](automation.md)). State lives in `$RACKLESS_HOME` (default: the system's folder for
app data). `rackless` alone opens the window.
"""
Verbs = argparse._SubParsersAction  # argparse has no public name for it


def make_page() -> str:
    """Return the page: a section per command, below it one per verb, with its arguments."""
    parser = build_parser()
    return "\n".join([_HEAD, *_arguments_of(parser), *_sections_below(parser)]).rstrip() + "\n"


def verbs_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the commands below a command by their names; empty if it has none."""
    found = [action for action in parser._actions if isinstance(action, Verbs)]
    return dict(found[0].choices) if found else {}


def _sections_below(parser: argparse.ArgumentParser) -> Iterator[str]:
    for verb in verbs_of(parser).values():
        yield from (f"{'#' * (verb.prog.count(' ') + 1)} {verb.prog}", "")
        yield from (str(verb.description), "")
        if not verbs_of(verb) and _shown(verb):
            yield from ("```", " ".join([verb.prog, *_usage(verb)]), "```", "")
        yield from _arguments_of(verb)
        yield from _sections_below(verb)


def _arguments_of(parser: argparse.ArgumentParser) -> list[str]:
    lines = [
        f"- `{_spell(action)}`: {str(action.help) % {**vars(action), 'prog': parser.prog}}"
        for action in _shown(parser)
        if action.help
    ]
    return [*lines, ""] if lines else []


def _shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the arguments of this command alone, positional ones first."""
    shown = [
        action
        for action in parser._actions
        if not isinstance(action, (argparse._HelpAction, Verbs))
        and "--json" not in action.option_strings
        and action.help != argparse.SUPPRESS
    ]
    return sorted(shown, key=lambda action: bool(action.option_strings))


def _usage(parser: argparse.ArgumentParser) -> Iterator[str]:
    shown = _shown(parser)
    groups = {
        id(action): group
        for group in parser._mutually_exclusive_groups
        for action in group._group_actions
    }
    for action in shown:
        group = groups.get(id(action))
        if group is None:
            optional = action.option_strings and not action.required
            yield f"[{_spell(action)}]" if optional else _spell(action)
        elif group._group_actions[0] is action:
            choices = " | ".join(_spell(one) for one in group._group_actions)
            yield f"({choices})" if group.required else f"[{choices}]"


def _spell(action: argparse.Action) -> str:
    choices = "|".join(map(str, action.choices)) if action.choices else action.dest.upper()
    value = str(action.metavar or choices)
    repeats = {0: "", "?": f"[{value}]", "*": f"[{value} ...]", "+": f"{value} [{value} ...]"}
    values = repeats.get(1 if action.nargs is None else action.nargs, value)
    return " ".join(part for part in (*action.option_strings[:1], values) if part)


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
