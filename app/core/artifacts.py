"""Actions on artifacts: export, copy, push, verify, serve and delete them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from app.artifact import ArtifactSnapshot
from app.events import ArtifactsChanged, EventHub, ExportedModel
from app.library.calibration import check_calibration
from app.runs.services import Services

if TYPE_CHECKING:
    from app.artifacts.deletion import DeletedArtifact
    from app.artifacts.estimates.plan import ExportPlan
    from app.artifacts.exports.request import ExportRequest
    from app.artifacts.serving import ServeCommand
    from app.core.api import OnMessage, OnProgress


class CoreArtifacts:
    """`core.artifacts`."""

    def __init__(self, services: Services, events: EventHub) -> None:
        self._services = services
        self._events = events

    async def export(
        self, request: ExportRequest, out: Path, progress: OnProgress | None = None
    ) -> ExportedModel:
        """Write a run's model to the new folder `out`.

        Raises:
            UserError: `out` is in use, no whole checkpoint is there, or it could not be made.
        """
        # Imported on use, here and below: commands that do not need it start sooner.
        from app.artifacts.exports import export

        run_id = self._services.runs.get(request.run_id).run_id
        made = await export.export_run(
            self._services, replace(request, run_id=run_id), out, progress
        )
        self._events.publish(ArtifactsChanged())
        return made

    async def plan_export(self, request: ExportRequest) -> ExportPlan:
        """Forecast an export: what it makes, what it takes on each node, where it cannot be made.

        Raises:
            UserError: there is no such run, format, type, node or data file.
        """
        from app.artifacts.exports.export import forecast_export

        return await forecast_export(self._services, request)

    async def all(self, run_id: str | None = None) -> tuple[ArtifactSnapshot, ...]:
        """Return the artifacts (of a run, if one is given), newest first.

        Copies on this PC are checked by file names and sizes only; `verify` reads them.

        Raises:
            UserError: there is no such run, and no artifact of one that is deleted.
        """
        from app.artifacts import record

        found = record.list_artifacts(self._services, run_id)
        nodes = self._services.pool.names()
        return await asyncio.to_thread(
            lambda: tuple(record.look_at_folders(one, nodes) for one in found)
        )

    async def get(self, name: str) -> ArtifactSnapshot:
        """Return the artifact NAME (its newest version) or NAME:VERSION.

        Raises:
            UserError: there is none.
        """
        from app.artifacts import record

        found = record.find_artifact(self._services, name)
        return await asyncio.to_thread(record.look_at_folders, found, self._services.pool.names())

    async def add(self, folder: Path, name: str | None = None) -> ArtifactSnapshot:
        """Register a folder that was made elsewhere, or the new place of a moved one.

        Raises:
            UserError: it is not an artifact.
        """
        from app.artifacts import record

        found = await asyncio.to_thread(record.add_folder, self._services, folder, name)
        self._events.publish(ArtifactsChanged())
        return found

    async def copy(self, name: str, to: str, progress: OnMessage | None = None) -> ArtifactSnapshot:
        """Copy an artifact to a node, by its name, or to a new folder on this PC.

        Raises:
            UserError: there is none, no whole copy can be read, or the place cannot take it.
        """
        from app.artifacts import copies

        found = await self.get(name)
        await copies.copy_artifact(self._services, found, to, progress or (lambda text: None))
        return await self._publish_change(found)

    async def push(
        self, name: str, hub_id: str, *, private: bool = True, progress: OnMessage | None = None
    ) -> ArtifactSnapshot:
        """Push an artifact to the model `hub_id` of the Hugging Face hub, with the user's token.

        Raises:
            UserError: no copy is on this PC, there is no token, it may not write there, or the
                hub cannot be reached.
        """
        from app.artifacts import copies

        found = await self.get(name)
        tell = progress or (lambda text: None)
        await copies.push_artifact(self._services, found, hub_id, private, tell)
        return await self._publish_change(found)

    async def verify(self, name: str, progress: OnMessage | None = None) -> ArtifactSnapshot:
        """Read every copy of an artifact, compare it with the hashes, and return the results.

        Raises:
            UserError: there is no such artifact.
        """
        from app.artifacts import verification

        found = await self.get(name)
        await verification.check_artifact(self._services, found, progress or (lambda text: None))
        return await self._publish_change(found)

    async def delete(
        self, name: str, place: str | None = None, *, even_last: bool = False
    ) -> DeletedArtifact:
        """Delete one copy of an artifact, or (None) all of them and the artifact itself.

        Raises:
            UserError: there is no such copy, or none would be left and `even_last` is not set.
        """
        from app.artifacts import deletion

        found = await self.get(name)
        done = await deletion.delete_artifact(self._services, found, place, even_last)
        self._events.publish(ArtifactsChanged())
        return done

    async def serve_commands(self, name: str) -> tuple[ServeCommand, ...]:
        """Return the commands that serve an artifact from this PC, for programs that load it.

        Raises:
            UserError: there is no such artifact, or no copy of it on this PC.
        """
        from app.artifacts.serving_files import hand_off

        return await asyncio.to_thread(hand_off, await self.get(name))

    async def card(self, name: str) -> str:
        """Return the README.md of an artifact's copy on this PC; empty without one.

        Raises:
            UserError: there is no such artifact.
        """
        from app.artifacts import record

        return await asyncio.to_thread(record.read_card, await self.get(name))

    async def write_modelfile(self, name: str, command: ServeCommand) -> Path | None:
        """Write the Modelfile that a command for Ollama uses beside the weights; return its path.

        Raises:
            UserError: the folder is gone, or cannot be written.
        """
        from app.artifacts.serving_files import write_modelfile

        return await asyncio.to_thread(write_modelfile, await self.get(name), command)

    async def check_export_folders(self, folders: Sequence[Path]) -> None:
        """Check that each folder is free for an export. Creates nothing.

        Raises:
            UserError: one is in use, or cannot be written.
        """
        from app.artifacts.exports.place import expect_free

        for folder in folders:
            await asyncio.to_thread(expect_free, folder)

    async def check_calibration(self, path: Path) -> int:
        """Return the number of words a data file has to calibrate with; 0: not counted.

        Raises:
            UserError: the file does not exist, is not data, or is too short.
        """
        return await asyncio.to_thread(check_calibration, path, self._services.hashes)

    async def _publish_change(self, artifact: ArtifactSnapshot) -> ArtifactSnapshot:
        self._events.publish(ArtifactsChanged())
        # By its label: the name alone would mean the newest version.
        return await self.get(artifact.label)
