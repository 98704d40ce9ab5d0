"""What a person does with files that a run begins from: data, recipes and run files."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from agents.contract.data import DataPreview
from agents.contract.spec import RunSpec
from app.runs.services import Services

if TYPE_CHECKING:
    from app.core.api import OnMessage
    from app.library.recipes import Recipe


class CoreLibrary:
    """Part of `app.core.core.Core`."""

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
        """Look a run's training data over before it is started; needs no GPU.

        Returns what format was recognised, how many rows, examples and tokens there are, which
        rows are left out or cut and why, how full packs are, and three rendered rows with what is
        learned of them; `app.presentation.data_text` says it in words.

        Args:
            spec: `data`, `model`, `objective`, `sequence_tokens` and `packing` count.
            part: `eval`: look at the evaluation data instead, which has to be given.
            node: do it there; None: on this PC where the model's folder and the packages are, else
                on the first of the run's nodes that can train.
            whole: read all rows, and keep their tokens for the run; False: the first rows only,
                which takes seconds however big the data is.
            progress: hears how far it is, in a sentence.

        Raises:
            UserError: the data is of no use (naming file, row and reason), or nothing here can
                look at it: no node that can train, and no training packages on this PC.
        """
        from app.forecasts.learning import store_counted
        from app.runs.preview import preview_data

        found = await preview_data(
            self._services, spec, part=part, node=node, whole=whole, progress=progress
        )
        if part == "train":
            store_counted(self._services.planning, spec, found)
        return found

    async def find_missing(self, names: Mapping[str, str]) -> dict[str, str]:
        """Return which of `model`, `train` and `eval` cannot be what it names, and why."""
        from app.library.data import tell_missing_data
        from app.library.models import tell_missing_model

        def look() -> dict[str, str]:
            ways = {"model": tell_missing_model}
            told = {key: ways.get(key, tell_missing_data)(name) for key, name in names.items()}
            return {key: text for key, text in told.items() if text}

        return await asyncio.to_thread(look)

    def recipes(self) -> tuple[Recipe, ...]:
        """Return the run files to start from: those that ship with Rackless, then one's own."""
        from app.library.recipes import list_recipes

        return list_recipes(self._services.paths.recipes)

    def recipe(self, name: str) -> Recipe:
        """Return one of them.

        Raises:
            UsageError: there is none of that name.
        """
        from app.library.recipes import find_recipe

        return find_recipe(name, self._services.paths.recipes)

    def save_recipe(self, title: str, spec: RunSpec) -> Recipe:
        """Keep the settings of a run to start others from.

        Raises:
            UserError: another recipe has that title, or the disk is full.
        """
        from app.library.recipes import save_recipe

        return save_recipe(self._services.paths.recipes, title, spec)

    def delete_recipe(self, name: str) -> Recipe:
        """Delete a recipe of one's own.

        Raises:
            UserError: there is none, or it ships with Rackless.
        """
        from app.library.recipes import delete_recipe

        return delete_recipe(self._services.paths.recipes, name)

    def run_file_text(self, spec: RunSpec) -> str:
        """Return the run file that reads back as `spec`."""
        from app.runfile.run_file import format_run

        return format_run(spec)

    def read_run_file(self, path: Path) -> RunSpec:
        """Read a run file.

        Raises:
            UsageError: with every problem in it, each with its line.
        """
        from app.runfile.run_file import read_run_file

        return read_run_file(path)

    def write_run_file(self, spec: RunSpec, path: Path) -> None:
        """Write a run file that reads back as `spec`.

        Raises:
            UserError: the place cannot be written.
        """
        from app.runfile.run_file import write_run_file

        write_run_file(spec, path)
