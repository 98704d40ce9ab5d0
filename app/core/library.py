"""Actions on the files a run starts from: data, recipes and run files."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from agents.contract.data import DataPreview
from agents.contract.spec import RunSpec
from app.errors import UserError, describe_error, located
from app.runs.services import Services
from app.text import capitalize

if TYPE_CHECKING:
    from app.core.api import OnMessage
    from app.library.recipes import Recipe
    from app.library.sent_files import SentFiles


class CoreLibrary:
    """`core.library`."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def preview(
        self,
        spec: RunSpec,
        *,
        part: Literal["train", "eval"] = "train",
        node: str | None = None,
        whole: bool = True,
        progress: OnMessage | None = None,
    ) -> DataPreview:
        """Preview the data of a run before it starts; needs no GPU.

        Returns the recognised format, the numbers of rows, examples and tokens, the rows that are
        left out or cut with reasons, the fill of packs, and three rendered rows with their learned
        parts; `app.presentation.data_text` puts it into words.

        Args:
            spec: only `data`, `model`, `objective`, `sequence_tokens` and `packing` matter.
            part: `eval` previews the evaluation data, which the spec must name.
            node: node that reads the data; None: this PC if it has the model's folder and the
                packages, else the first of the run's nodes that can train.
            whole: read all rows and cache their tokens for the run; False: only the first rows,
                which takes seconds for any size of data.
            progress: called with a sentence about the progress.

        Raises:
            UserError: the data cannot be used (naming file, row and reason), or there is neither
                a node that can train nor the training packages on this PC.
        """
        # Imported on use, here and below: commands that do not need it start sooner.
        from app.forecasts.learning import store_counted
        from app.runs.inputs.preview import preview_data

        found = await preview_data(
            self._services, spec, part=part, node=node, whole=whole, progress=progress
        )
        # Plans need the size of the training data only.
        if part == "train":
            store_counted(self._services.planning, spec, found)
        return found

    async def find_missing(self, names: Mapping[str, str]) -> dict[str, str]:
        """Return why `model`, `data.train` or `data.eval` cannot be used, for each that cannot."""

        def find() -> dict[str, str]:
            problems = {
                key: self._explain_model(name) if key == "model" else _explain_data(name, key)
                for key, name in names.items()
            }
            return {key: problem for key, problem in problems.items() if problem}

        # On a thread: a folder may be on a slow or absent network drive.
        return await asyncio.to_thread(find)

    async def list_sent(self, spec: RunSpec) -> tuple[SentFiles, ...]:
        """Return which files of this PC a run copies to its nodes."""
        from app.library.sent_files import list_sent

        return await asyncio.to_thread(list_sent, spec)

    def _explain_model(self, name: str) -> str:
        from app.library.model_check import find_folder, require_usable
        from app.library.models import explain_missing_model

        if missing := explain_missing_model(name):
            return missing
        folder = find_folder(name)
        try:
            if folder is not None:
                require_usable("", self._services.models.inspect(folder, whole=False))
        except UserError as error:
            return _as_sentences(error)
        return ""

    def recipes(self) -> tuple[Recipe, ...]:
        """Return the recipes: those that ship with Rackless, then the user's own."""
        from app.library.recipes import list_recipes

        return list_recipes(self._services.paths.recipes)

    def recipe(self, name: str) -> Recipe:
        """Return the recipe of that name.

        Raises:
            UsageError: there is no recipe of that name.
        """
        from app.library.recipes import find_recipe

        return find_recipe(name, self._services.paths.recipes)

    def save_recipe(self, title: str, spec: RunSpec) -> Recipe:
        """Save the settings of a run as a recipe.

        Raises:
            UserError: another recipe has that title, or the disk is full.
        """
        from app.library.recipes import save_recipe

        return save_recipe(self._services.paths.recipes, title, spec)

    def delete_recipe(self, name: str) -> Recipe:
        """Delete one of the user's own recipes.

        Raises:
            UserError: there is none, or it ships with Rackless.
        """
        from app.library.recipes import delete_recipe

        return delete_recipe(self._services.paths.recipes, name)

    def run_file_text(self, spec: RunSpec) -> str:
        """Return the run file that reads back as `spec`."""
        from app.runfile.run_file import format_run

        return format_run(spec)

    def read_run_file(self, path: Path, settings: Sequence[str] = ()) -> RunSpec:
        """Read a run file, with `settings` (`KEY=VALUE`) instead of its own values.

        Raises:
            UsageError: lists every problem of the file with its line.
        """
        from app.runfile.run_file import read_run_file

        with located(str(path)):
            return read_run_file(path, settings)

    def write_run_file(self, spec: RunSpec, path: Path) -> None:
        """Write a run file that reads back as `spec`.

        Raises:
            UserError: the file cannot be written.
        """
        from app.runfile.run_file import write_run_file

        write_run_file(spec, path)


def _explain_data(name: str, key: str) -> str:
    from app.library.data import explain_missing_data, require_data

    if missing := explain_missing_data(name):
        return missing
    try:
        require_data(name, key)
    except UserError as error:
        return _as_sentences(error)
    return ""


def _as_sentences(error: UserError) -> str:
    return capitalize(describe_error(error).replace("  ", " "))
