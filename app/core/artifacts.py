"""Actions on artifacts: export, copy, push, verify, serve and delete them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from app.core.action import Action, Report, action, as_progress
from app.events import ArtifactsChanged

if TYPE_CHECKING:
    from app.artifact import ArtifactSnapshot
    from app.artifacts.deletion import DeletedArtifact
    from app.artifacts.estimates.plan import ExportPlan
    from app.artifacts.exports.request import ExportRequest
    from app.artifacts.serving import ServeCommand
    from app.core.state import CoreState
    from app.events import ExportedModel


@action("artifacts.export")
class ExportModel(Action["ExportedModel"]):
    """Write a run's model to the new folder `out`.

    Raises:
        UserError: `out` is in use, no complete checkpoint is available, or the export failed.
    """

    request: ExportRequest
    out: Path

    async def perform(self, core: CoreState, report: Report) -> ExportedModel:
        # Imported on use, here and below: other actions start sooner.
        from app.artifacts.exports import export

        request = replace(self.request, run_id=core.full_id(self.request.run_id))
        made = await export.export_run(core.services, request, self.out, report)
        core.events.publish(ArtifactsChanged())
        return made


@action("artifacts.plan_export")
class PlanExport(Action["ExportPlan"]):
    """Forecast an export: its files, its time and memory on each node, nodes that cannot run it.

    Raises:
        UserError: there is no such run, format, type, node or data file.
    """

    request: ExportRequest

    async def perform(self, core: CoreState, report: Report) -> ExportPlan:
        from app.artifacts.exports.export import forecast_export

        return await forecast_export(core.services, self.request)


@action("artifacts.all")
class ListArtifacts(Action["tuple[ArtifactSnapshot, ...]"]):
    """Return the artifacts (of a run, if one is given), newest first.

    Copies on this PC are checked by file names and sizes only; `VerifyArtifact` reads them.

    Raises:
        UserError: neither a run nor an artifact has this run id.
    """

    run_id: str | None = None

    async def perform(self, core: CoreState, report: Report) -> tuple[ArtifactSnapshot, ...]:
        from app.artifacts import record

        found = record.list_artifacts(core.services, self.run_id)
        nodes = core.services.pool.names()
        return await asyncio.to_thread(
            lambda: tuple(record.look_at_folders(one, nodes) for one in found)
        )


@action("artifacts.get")
class GetArtifact(Action["ArtifactSnapshot"]):
    """Return the artifact NAME (its newest version) or NAME:VERSION.

    Raises:
        UserError: the artifact is unknown.
    """

    name: str

    async def perform(self, core: CoreState, report: Report) -> ArtifactSnapshot:
        return await _find(core, self.name)


@action("artifacts.add")
class AddArtifact(Action["ArtifactSnapshot"]):
    """Register a folder that was made elsewhere, or the new place of a moved one.

    Raises:
        UserError: it is not an artifact.
    """

    folder: Path
    name: str | None = None

    async def perform(self, core: CoreState, report: Report) -> ArtifactSnapshot:
        from app.artifacts import record

        # On threads, here and below: a folder may be large, or on a network drive.
        found = await asyncio.to_thread(record.add_folder, core.services, self.folder, self.name)
        core.events.publish(ArtifactsChanged())
        return found


@action("artifacts.copy")
class CopyArtifact(Action["ArtifactSnapshot"]):
    """Copy an artifact to a node, by its name, or to a new folder on this PC.

    Raises:
        UserError: it is unknown, no complete copy is readable, or the destination cannot take it.
    """

    name: str
    to: str

    async def perform(self, core: CoreState, report: Report) -> ArtifactSnapshot:
        from app.artifacts import copies

        found = await _find(core, self.name)
        await copies.copy_artifact(core.services, found, self.to, as_progress(report))
        return await _publish_change(core, found)


@action("artifacts.push")
class PushArtifact(Action["ArtifactSnapshot"]):
    """Push an artifact to the model `hub_id` of the Hugging Face hub, with the user's token.

    Raises:
        UserError: this PC has no copy or no token, the token may not write there, or the hub
            cannot be reached.
    """

    name: str
    hub_id: str
    private: bool = True

    async def perform(self, core: CoreState, report: Report) -> ArtifactSnapshot:
        from app.artifacts import copies

        found = await _find(core, self.name)
        await copies.push_artifact(
            core.services, found, self.hub_id, self.private, as_progress(report)
        )
        return await _publish_change(core, found)


@action("artifacts.verify")
class VerifyArtifact(Action["ArtifactSnapshot"]):
    """Read every copy of an artifact, compare it with the hashes, and return the results.

    Raises:
        UserError: there is no such artifact.
    """

    name: str

    async def perform(self, core: CoreState, report: Report) -> ArtifactSnapshot:
        from app.artifacts import verification

        found = await _find(core, self.name)
        await verification.check_artifact(core.services, found, as_progress(report))
        return await _publish_change(core, found)


@action("artifacts.delete")
class DeleteCopies(Action["DeletedArtifact"]):
    """Delete one copy of an artifact, or (None) all of them and the artifact itself.

    Raises:
        UserError: the copy is unknown, or is the last one and `even_last` is not set.
    """

    name: str
    place: str | None = None
    even_last: bool = False

    async def perform(self, core: CoreState, report: Report) -> DeletedArtifact:
        from app.artifacts import deletion

        found = await _find(core, self.name)
        done = await deletion.delete_artifact(core.services, found, self.place, self.even_last)
        core.events.publish(ArtifactsChanged())
        return done


@action("artifacts.serve_commands")
class ListServeCommands(Action["tuple[ServeCommand, ...]"]):
    """Return the commands that serve an artifact from this PC, for programs that load it.

    Raises:
        UserError: there is no such artifact, or no copy of it on this PC.
    """

    name: str

    async def perform(self, core: CoreState, report: Report) -> tuple[ServeCommand, ...]:
        from app.artifacts.serving_files import hand_off

        return await asyncio.to_thread(hand_off, await _find(core, self.name))


@action("artifacts.card")
class ReadCard(Action[str]):
    """Return the README.md of an artifact's copy on this PC; empty without one.

    Raises:
        UserError: there is no such artifact.
    """

    name: str

    async def perform(self, core: CoreState, report: Report) -> str:
        from app.artifacts import record

        return await asyncio.to_thread(record.read_card, await _find(core, self.name))


@action("artifacts.write_modelfile")
class WriteModelfile(Action["Path | None"]):
    """Write the Modelfile of an Ollama command into the folder of the weights; return its path.

    Raises:
        UserError: the folder is gone, or cannot be written.
    """

    name: str
    command: ServeCommand

    async def perform(self, core: CoreState, report: Report) -> Path | None:
        from app.artifacts.serving_files import write_modelfile

        return await asyncio.to_thread(write_modelfile, await _find(core, self.name), self.command)


@action("artifacts.check_export_folders")
class CheckExportFolders(Action[None]):
    """Check that each folder is free for an export. Creates nothing.

    Raises:
        UserError: one is in use, or cannot be written.
    """

    folders: Sequence[Path]

    async def perform(self, core: CoreState, report: Report) -> None:
        from app.artifacts.exports.place import expect_free

        for folder in self.folders:
            await asyncio.to_thread(expect_free, folder)


@action("artifacts.check_calibration")
class CheckCalibration(Action[int]):
    """Return the number of words in a calibration file; 0 if they were not counted.

    Raises:
        UserError: the file does not exist, is not data, or is too short.
    """

    path: Path

    async def perform(self, core: CoreState, report: Report) -> int:
        from app.library.calibration import check_calibration

        return await asyncio.to_thread(check_calibration, self.path, core.services.hashes)


async def _find(core: CoreState, name: str) -> ArtifactSnapshot:
    from app.artifacts import record

    found = record.find_artifact(core.services, name)
    return await asyncio.to_thread(record.look_at_folders, found, core.services.pool.names())


async def _publish_change(core: CoreState, artifact: ArtifactSnapshot) -> ArtifactSnapshot:
    core.events.publish(ArtifactsChanged())
    # By its label: the name alone would mean the newest version.
    return await _find(core, artifact.label)
