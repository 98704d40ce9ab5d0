"""`rackless recipes`: run files to start from."""

from __future__ import annotations

import argparse
from pathlib import Path

from app.cli.kit.command import add_command, add_verbs, with_core
from app.cli.kit.output import Output
from app.core.action import CoreApi
from app.core.library import DeleteRecipe, FindRecipe, ListRecipes, ReadRunFile, SaveRecipe
from app.shell_words import command_here


def declare(parser: argparse.ArgumentParser) -> None:
    verbs = add_verbs(parser)
    add_command(verbs, "list", "list all recipes", with_core(_list))
    show = add_command(
        verbs, "show", "print a recipe; '> my-run.yaml' keeps it as a run file", with_core(_show)
    )
    show.add_argument("recipe", metavar="NAME")
    save = add_command(
        verbs, "save", "save the settings of a run file as a recipe", with_core(_save)
    )
    save.add_argument("run_file", metavar="RUN.yaml", type=Path)
    save.add_argument("--title", required=True, help="title shown in lists")
    delete = add_command(verbs, "delete", "delete a recipe of your own", with_core(_delete))
    delete.add_argument("recipe", metavar="NAME")


async def _list(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    recipes = await core.do(ListRecipes())
    out.document(recipes)
    rows = [
        [recipe.name, recipe.title, "your own" if recipe.is_own else "Rackless"]
        for recipe in recipes
    ]
    out.table(["NAME", "WHAT", "FROM"], rows)
    return 0


async def _show(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    recipe = await core.do(FindRecipe(name=args.recipe))
    out.document(recipe)
    out.text(recipe.text.rstrip("\n"))
    return 0


async def _save(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    spec = await core.do(ReadRunFile(path=args.run_file))
    recipe = await core.do(SaveRecipe(title=args.title, spec=spec))
    out.document(recipe)
    out.text(
        f"{recipe.name} is kept; see: {command_here('rackless', 'recipes', 'show', recipe.name)}"
    )
    return 0


async def _delete(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    recipe = await core.do(DeleteRecipe(name=args.recipe))
    out.document(recipe)
    out.text(f"{recipe.name} is deleted")
    return 0
