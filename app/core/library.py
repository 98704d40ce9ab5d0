"""Actions on the files a run starts from: data, recipes and run files."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from app.core.action import Action, Report, action, as_progress
from app.errors import UserError, describe_error, located
from app.text import capitalize

if TYPE_CHECKING:
    from agents.contract.data import DataPreview
    from agents.contract.spec import RunSpec
    from app.core.state import CoreState
    from app.library.recipes import Recipe
    from app.library.sent_files import SentFiles
    from app.runs.inputs.left_out import DataCount


@action("library.preview")
class PreviewData(Action["DataPreview"]):
    """Preview the data of a run before it starts; needs no GPU.

    Returns the recognised format, the numbers of rows, examples and tokens, the rows that are
    left out or cut with reasons, the fill of packs, and three rendered rows with their learned
    parts; `app.presentation.data_text` puts it into words.

    Raises:
        UserError: the data cannot be used (naming file, row and reason), or there is neither
            a node that can train nor the training packages on this PC.
    """

    spec: RunSpec
    """Run; only `data`, `model`, `objective`, `sequence_tokens` and `packing` matter."""
    part: Literal["train", "eval"] = "train"
    """Data to read; the spec must name evaluation data for `eval`."""
    node: str | None = None
    """Node that reads the data; None: this PC if it has the model's folder and the packages, else
    the first of the run's nodes that can train."""
    whole: bool = True
    """Read all rows and cache their tokens for the run; False: only the first rows, which takes
    seconds for any size of data."""

    async def perform(self, core: CoreState, report: Report) -> DataPreview:
        # Imported on use, here and below: other actions start sooner.
        from app.forecasts.learning import store_counted
        from app.runs.inputs.preview import preview_data

        found = await preview_data(
            core.services,
            self.spec,
            part=self.part,
            node=self.node,
            whole=self.whole,
            progress=as_progress(report),
        )
        # Plans need the size of the training data only.
        if self.part == "train":
            store_counted(core.services.planning, self.spec, found)
        return found


@action("library.count_left_out")
class CountLeftOut(Action["tuple[DataCount, ...]"]):
    """Count the rows that a run would leave out or cut, as far as this PC can read its data.

    Raises:
        UserError: the data cannot be used, naming file, row and reason.
    """

    spec: RunSpec

    async def perform(self, core: CoreState, report: Report) -> tuple[DataCount, ...]:
        from app.runs.inputs.left_out import count_left_out

        return await count_left_out(core.services, self.spec, as_progress(report))


@action("library.find_missing")
class FindMissing(Action["dict[str, str]"]):
    """Return the reason for each of `model`, `data.train` and `data.eval` that cannot be used."""

    names: Mapping[str, str]

    async def perform(self, core: CoreState, report: Report) -> dict[str, str]:
        def find() -> dict[str, str]:
            problems = {
                key: _explain_model(core, name)
                if key == "model"
                else _explain_template(name)
                if key == "data.chat_template"
                else _explain_data(name, key)
                for key, name in self.names.items()
            }
            return {key: problem for key, problem in problems.items() if problem}

        # On a thread: a folder may be on a slow or absent network drive.
        return await asyncio.to_thread(find)


@action("library.list_sent")
class ListSentFiles(Action["tuple[SentFiles, ...]"]):
    """Return the files of this PC that a run copies to its nodes."""

    spec: RunSpec

    async def perform(self, core: CoreState, report: Report) -> tuple[SentFiles, ...]:
        from app.library.sent_files import list_sent

        # On a thread: a network drive may take long to answer.
        return await asyncio.to_thread(list_sent, self.spec)


@action("library.recipes")
class ListRecipes(Action["tuple[Recipe, ...]"]):
    """Return the recipes: those that ship with Rackless, then the user's own."""

    async def perform(self, core: CoreState, report: Report) -> tuple[Recipe, ...]:
        from app.library.recipes import list_recipes

        return list_recipes(core.services.paths.recipes)


@action("library.recipe")
class FindRecipe(Action["Recipe"]):
    """Return the recipe of that name.

    Raises:
        UsageError: there is no recipe of that name.
    """

    name: str

    async def perform(self, core: CoreState, report: Report) -> Recipe:
        from app.library.recipes import find_recipe

        return find_recipe(self.name, core.services.paths.recipes)


@action("library.save_recipe")
class SaveRecipe(Action["Recipe"]):
    """Save the settings of a run as a recipe.

    Raises:
        UserError: another recipe has that title, or the disk is full.
    """

    title: str
    spec: RunSpec

    async def perform(self, core: CoreState, report: Report) -> Recipe:
        from app.library.recipes import save_recipe

        return save_recipe(core.services.paths.recipes, self.title, self.spec)


@action("library.delete_recipe")
class DeleteRecipe(Action["Recipe"]):
    """Delete one of the user's own recipes.

    Raises:
        UserError: the recipe is unknown, or ships with Rackless.
    """

    name: str

    async def perform(self, core: CoreState, report: Report) -> Recipe:
        from app.library.recipes import delete_recipe

        return delete_recipe(core.services.paths.recipes, self.name)


@action("library.run_file_text")
class FormatRunFile(Action[str]):
    """Return the run file that reads back as `spec`."""

    spec: RunSpec

    async def perform(self, core: CoreState, report: Report) -> str:
        from app.runfile.run_file import format_run

        return format_run(self.spec)


@action("library.read_run_file")
class ReadRunFile(Action["RunSpec"]):
    """Read a run file.

    Raises:
        UsageError: lists every problem of the file with its line.
    """

    path: Path
    settings: Sequence[str] = ()
    """`KEY=VALUE` instead of the file's own values."""

    async def perform(self, core: CoreState, report: Report) -> RunSpec:
        from app.runfile.run_file import read_run_file

        with located(str(self.path)):
            return read_run_file(self.path, self.settings)


@action("library.write_run_file")
class WriteRunFile(Action["Path"]):
    """Write a run file that reads back as `spec`; return its path.

    Raises:
        UserError: the file cannot be written.
    """

    spec: RunSpec
    path: Path

    async def perform(self, core: CoreState, report: Report) -> Path:
        from app.runfile.run_file import write_run_file

        write_run_file(self.spec, self.path)
        return self.path


def _explain_model(core: CoreState, name: str) -> str:
    from app.library.model_check import find_folder, require_usable
    from app.library.models import explain_missing_model

    if missing := explain_missing_model(name):
        return missing
    folder = find_folder(name)
    try:
        if folder is not None:
            require_usable("", core.services.models.inspect(folder, whole=False))
    except UserError as error:
        return _as_sentences(error)
    return ""


def _explain_template(name: str) -> str:
    from app.library.chat_template import read_template

    try:
        read_template(name)
    except UserError as error:
        return _as_sentences(error)
    return ""


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
