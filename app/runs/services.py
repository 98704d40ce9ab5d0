"""Services for all actions on runs: stores, nodes, settings and paths."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from agents.contract.model_cut import ModelCut
from agents.contract.node import NodeFacts
from agents.contract.run import MasterIdentity, RankPlacement
from agents.contract.spec import RunSpec
from app.errors import UserError
from app.filelock import is_held, read_holder, try_held
from app.library.configs import ConfigLibrary
from app.library.model_check import ModelInspector
from app.paths import Paths, UnsafeName, private_folder
from app.runs.mandates import MasterKey
from app.runs.nodes.node_pool import NodePool
from app.runs.run_repository import LAUNCH_LOCK, RESUME_LOCK, RunRepository
from app.settings import Settings
from app.storage.artifacts import ArtifactStore
from app.storage.hashes import HashStore
from app.storage.planning import PlanningStore
from app.storage.recoveries import RecoveryStore
from app.storage.runs import RunRecord

if TYPE_CHECKING:
    from app.planning.accuracy.forecast_accuracy import Forecast


@dataclass(frozen=True, slots=True)
class LaunchForecast:
    """Result of planning an attempt just before its launch."""

    forecast: Forecast | None = None
    """None if the model's sizes are unknown here; it can still be trained."""
    cut: ModelCut | None = None
    """Mode and layers of each rank; None if every rank has the whole model, or the trainer divides
    it."""
    problem: tuple[str, str] | None = None
    """Message and hint if the run file's mode does not fit; None if it may."""
    advice: tuple[str, ...] = ()
    """Sentences on the choice of GPUs, such as which take no part."""
    places: tuple[tuple[str, str], ...] = ()
    """Node and device of each rank, in order; empty: all GPUs take part."""
    nodes: tuple[str, ...] = ()
    """Entries of `nodes` that name this choice; empty: the run file's own."""
    plan_id: str = ""
    """Id of the plan; empty if there is none."""
    changed: str = ""
    """What changed since the plan was shown, as a sentence; empty: nothing, or none was shown."""


def _read_user() -> str:
    import getpass  # late, here and below: lists of runs do not need it

    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container may run under an id without a name
        return "somebody"


async def _forecast_nothing(
    spec: RunSpec, facts: Mapping[str, NodeFacts], ranks: Sequence[RankPlacement]
) -> LaunchForecast:
    return LaunchForecast()


@dataclass(slots=True)
class RunHooks:
    """Calls to packages above this one, set by `app.core`.

    Forecasts read the journals of runs, so `app.runs` cannot import them in turn.
    """

    forecast: Callable[
        [RunSpec, Mapping[str, NodeFacts], Sequence[RankPlacement]], Awaitable[LaunchForecast]
    ] = _forecast_nothing
    """Called before an attempt is launched."""
    learn: Callable[[RunRecord], None] = lambda run: None
    """Called once an attempt has ended and its journals are complete here."""


@dataclass(frozen=True, slots=True)
class Services:
    paths: Paths
    runs: RunRepository
    hashes: HashStore
    pool: NodePool
    settings: Settings
    planning: PlanningStore
    configs: ConfigLibrary
    artifacts: ArtifactStore
    recoveries: RecoveryStore
    key: MasterKey
    """Key with which this home signs its launches."""
    hooks: RunHooks = field(default_factory=RunHooks)
    models: ModelInspector = field(default_factory=ModelInspector)

    @property
    def identity(self) -> MasterIdentity:
        """Identity of this master, for other masters of the same nodes."""
        import platform

        return MasterIdentity(host=platform.node(), user=_read_user(), home=str(self.paths.home))

    @contextlib.contextmanager
    def launching(self, run_id: str) -> Iterator[None]:
        """Claim the launch of a run inside the block, also against other processes of this home.

        Raises:
            UserError: it is being launched already, or a link lies in place of its folder.
        """
        path = self._lock_folder(run_id) / LAUNCH_LOCK
        # A file lock ends with its process, so a killed launcher never blocks the run.
        handle = try_held(path)
        if handle is None:
            holder = read_holder(path)
            by = f" by {holder}" if holder else ""
            hint = f"See its progress: rackless runs show {run_id}. "
            raise UserError(
                f"run {run_id} is being launched right now{by}",
                hint + (f"{holder.advice}." if holder and holder.is_suspended else ""),
            )
        try:
            yield
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def resuming(self, run_id: str) -> Iterator[None]:
        """Show other processes inside the block that the user resumes the run from here."""
        handle = try_held(self._lock_folder(run_id) / RESUME_LOCK)
        try:
            yield
        finally:
            if handle is not None:  # else another process resumes it, which is shown as well
                os.close(handle)

    def _lock_folder(self, run_id: str) -> Path:
        folder = self.paths.run(run_id)
        if folder.is_symlink():
            raise UserError(
                f"{folder} is a symbolic link, so nothing is written there", "Remove the link."
            )
        return private_folder(folder)

    def is_launching(self, run_id: str) -> bool:
        """Return True if a living process is launching the run."""
        try:
            return is_held(self.paths.run(run_id) / LAUNCH_LOCK)
        except UnsafeName:
            return False  # no run with such an id is ever launched

    def remove_folder(self, run_id: str) -> None:
        """Remove the run's mirrors from this PC; follow no symbolic link.

        Raises:
            UnsafeName: the id of the run leads elsewhere.
        """
        self.remove_link(run_id)
        folder = self.paths.run(run_id)
        if not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)

    def remove_link(self, run_id: str) -> None:
        """Remove a link in place of the run's folder, but not its target.

        Raises:
            UnsafeName: the id of the run leads elsewhere.
        """
        folder = self.paths.run(run_id)
        if folder.is_symlink():
            with contextlib.suppress(OSError):
                folder.unlink()
