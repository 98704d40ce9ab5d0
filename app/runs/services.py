"""What every action on a run is given: the book, the nodes, and where files lie."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass

from app.errors import UserError
from app.filelock import try_locked
from app.library.configs import ConfigLibrary
from app.paths import Paths, private_folder
from app.runs.node_pool import NodePool
from app.runs.run_repository import RunRepository
from app.settings import Settings
from app.storage.artifacts import ArtifactStore
from app.storage.hashes import HashStore
from app.storage.planning import PlanningStore
from app.storage.prompts import PromptStore

_LAUNCH_LOCK = "launch.lock"
_LOOKS = 10
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Services:
    paths: Paths
    book: RunRepository
    hashes: HashStore
    cluster: NodePool
    settings: Settings
    planning: PlanningStore
    configs: ConfigLibrary
    artifacts: ArtifactStore
    prompts: PromptStore

    @contextlib.contextmanager
    def launching(self, run_id: str) -> Iterator[None]:
        """Hold the right to launch a run, against other processes of this home too.

        Raises:
            UserError: somebody else is launching it now.
        """
        path = private_folder(self.paths.run(run_id)) / _LAUNCH_LOCK
        handle = try_locked(path)
        for _ in range(_LOOKS):
            if handle is not None:
                break
            time.sleep(_LOOK_S)  # somebody may only have looked whether it is held
            handle = try_locked(path)
        if handle is None:
            raise UserError(
                f"run {run_id} is being launched right now",
                "Look at it with: rackless runs show " + run_id,
            )
        try:
            yield
        finally:
            os.close(handle)

    def is_launching(self, run_id: str) -> bool:
        """Tell whether a living process is launching the run."""
        path = self.paths.run(run_id) / _LAUNCH_LOCK
        if not path.exists():
            return False
        handle = try_locked(path)
        if handle is None:
            return True
        os.close(handle)
        return False

    def remove_folder(self, run_id: str) -> None:
        """Remove the run's mirrors from this PC."""
        shutil.rmtree(self.paths.run(run_id), ignore_errors=True)
