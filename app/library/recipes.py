"""Manage recipes: run files as starting points, shipped or saved by the user.

A recipe is an ordinary run file. Its first line is a comment with the title, and the comment lines
below it, up to an empty line, give its purpose. Its model and data are placeholders.
"""

from __future__ import annotations

import importlib.resources
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.resources.abc import Traversable
from pathlib import Path

from agents.contract.spec import RunSpec
from agents.shared.files.full_disk import advise_room, name_disk_error
from app.errors import UsageError, UserError
from app.library.bundles import safe_name
from app.paths import replace_text
from app.runfile.run_file import format_run, parse_run
from app.text import free_name

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    name: str
    """Name on the command line: the file's name without `.yaml`."""
    title: str
    purpose: str
    """Purpose in a few sentences."""
    text: str
    """Text of the run file, with a comment on each value."""
    spec: RunSpec
    is_own: bool = False
    """True if the user saved it; only such a recipe can be deleted."""


def list_recipes(own: Path | None = None) -> tuple[Recipe, ...]:
    """Return all recipes in the order of their files; the user's, in the folder `own`, last.

    The user's recipes that are no longer valid are skipped and logged.
    """
    shipped = importlib.resources.files("resources").joinpath("recipes")
    found = [_read(file) for file in _files(shipped)]
    if own is not None and own.is_dir():
        for file in _files(own):
            try:
                found.append(replace(_read(file), is_own=True))
            # IndexError: the file does not begin with a comment, so it has no title.
            except (UsageError, OSError, UnicodeDecodeError, IndexError) as error:
                _log.warning("the recipe %s is skipped: %s", file, error)
    return tuple(found)


def save_recipe(own: Path, title: str, spec: RunSpec) -> Recipe:
    """Save the settings of a run, without its name, nodes and shares, as a recipe.

    Raises:
        UsageError: the title is empty, or another recipe has it.
        UserError: the folder cannot be written.
    """
    title = " ".join(title.split())
    if not title:
        raise UsageError("the recipe has no title", "Give it one of a few words.")
    there = list_recipes(own)
    # Titles that differ only in case would look like duplicates.
    if title.casefold() in (recipe.title.casefold() for recipe in there):
        raise UsageError(f"there is a recipe '{title}' already", "Take another title.")
    name = free_name(safe_name(title.lower()), {recipe.name for recipe in there})
    purpose = f"Your own, saved from the run {spec.name}."
    # Nodes and shares belong to one cluster; a recipe should suit any.
    settings = replace(spec, name=name, nodes="all", shares=None)
    text = f"# {title}\n# {purpose}\n\n{format_run(settings)}"
    path = own / f"{name}.yaml"
    try:
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_text(path, text)
    except OSError as error:
        raise UserError(
            f"the recipe {path} cannot be written: {name_disk_error(error)}",
            f"{advise_room(error)}, or check the owner of the folder.",
        ) from error
    return replace(_read(path), is_own=True)


def delete_recipe(own: Path, name: str) -> Recipe:
    """Delete a recipe of the user and return it.

    Raises:
        UsageError: there is no such recipe, or it ships with Rackless.
        UserError: it cannot be deleted.
    """
    recipe = find_recipe(name, own)
    if not recipe.is_own:
        raise UsageError(
            f"the recipe '{name}' ships with Rackless", "You can delete only your own recipes."
        )
    try:
        (own / f"{name}.yaml").unlink()
    except OSError as error:
        raise UserError(f"the recipe '{name}' cannot be deleted: {error.strerror}") from error
    return recipe


def find_recipe(name: str, own: Path | None = None) -> Recipe:
    """Return a recipe by name.

    Raises:
        UsageError: there is no such recipe.
    """
    recipes = list_recipes(own)
    for recipe in recipes:
        if recipe.name == name:
            return recipe
    names = ", ".join(recipe.name for recipe in recipes)
    raise UsageError(f"there is no recipe '{name}'", f"The recipes are {names}.")


def _files(folder: Traversable) -> Iterator[Traversable]:
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".yaml"):
            yield file


def _read(file: Traversable) -> Recipe:
    name, text = file.name.removesuffix(".yaml"), file.read_text(encoding="utf-8")
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
