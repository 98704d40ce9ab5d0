"""`rackless recipes`: run files to start from."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from app.cli.command import Commands, add_command, add_verbs, with_core
from app.cli.output import Output

if TYPE_CHECKING:
    from app.core import Core


def add_parser(commands: Commands) -> None:
    verbs = add_verbs(add_command(commands, "recipes", "list and show run files to start from"))
    add_command(verbs, "list", "list all recipes", with_core(_list))
    show = add_command(
        verbs, "show", "print a recipe; '> my-run.yaml' keeps it as a run file", with_core(_show)
    )
    show.add_argument("recipe", metavar="NAME")


async def _list(core: Core, args: argparse.Namespace, out: Output) -> int:
    recipes = core.recipes()
    out.document(recipes)
    out.table(["NAME", "WHAT"], [[recipe.name, recipe.title] for recipe in recipes])
    return 0


async def _show(core: Core, args: argparse.Namespace, out: Output) -> int:
    recipe = core.recipe(args.recipe)
    out.document(recipe)
    out.text(recipe.text.rstrip("\n"))
    return 0
