"""Recipes: run files that ship with Rackless, as starting points for one's own.

A recipe is an ordinary run file. Its first line is a comment with the title; the comment lines
below it, up to an empty one, say what it is for. Its model and data stand for a person's own.
"""

from __future__ import annotations

import importlib.resources
from dataclasses import dataclass

from agents.spec import RunSpec
from app.errors import UsageError
from app.runs.spec_file import parse_run


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    name: str
    """As the command line calls it: the file's name without `.yaml`."""
    title: str
    purpose: str
    """When to take it, in a few sentences."""
    text: str
    """The whole run file, with the reason of each value beside it."""
    spec: RunSpec


def list_recipes() -> tuple[Recipe, ...]:
    """Return all recipes, in the order of their files."""
    folder = importlib.resources.files("resources").joinpath("recipes")
    files = sorted((file for file in folder.iterdir()), key=lambda file: file.name)
    return tuple(
        _read(file.name.removesuffix(".yaml"), file.read_text(encoding="utf-8"))
        for file in files
        if file.name.endswith(".yaml")
    )


def find_recipe(name: str) -> Recipe:
    """Return one recipe.

    Raises:
        UsageError: there is none of that name.
    """
    recipes = list_recipes()
    for recipe in recipes:
        if recipe.name == name:
            return recipe
    names = ", ".join(recipe.name for recipe in recipes)
    raise UsageError(f"there is no recipe '{name}'", f"The recipes are {names}.")


def _read(name: str, text: str) -> Recipe:
    comments = []
    for line in text.splitlines():
        if not line.startswith("#") or line == "#":
            break
        comments.append(line.removeprefix("#").strip())
    return Recipe(
        name=name,
        title=comments[0],
        purpose=" ".join(comments[1:]),
        text=text,
        spec=parse_run(text, f"recipe {name}"),
    )
