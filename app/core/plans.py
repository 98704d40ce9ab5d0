"""Actions that compare plans: purchases, and models for the PCs."""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from app.core.action import Action, Report, action
from app.core.runs import find_cluster, require_run_data

if TYPE_CHECKING:
    from agents.contract.spec import RunSpec
    from app.core.state import CoreState
    from app.planning.best import BestLimits, FittingModel
    from app.planning.upgrades import Upgrades


_INSTRUCTED = re.compile(r"-(instruct|chat|it)\b", re.IGNORECASE)


@action("plans.upgrades")
class RankUpgrades(Action["Upgrades"]):
    """Rank single purchases for a run by the speed that they add for their price.

    Raises:
        UserError: as for `PlanRun`, or the price list is not valid.
    """

    spec: RunSpec
    cluster: Path | None = None
    """File that describes PCs; None: the nodes."""
    prices: Path | None = None
    """Price list; None: the user's own in the home of Rackless, else the shipped guesses."""
    ask_remote: bool = True
    """As for `PlanRun`."""

    async def perform(self, core: CoreState, report: Report) -> Upgrades:
        # Imported on use, here and below: other actions start sooner.
        from app.library.price_list import find_prices

        home = core.services.paths.home
        prices = await asyncio.to_thread(find_prices, self.prices, home)
        found = await find_cluster(core, self.spec, self.cluster, ask_remote=self.ask_remote)
        return await core.planner.rank_upgrades(
            self.spec,
            found.cluster,
            prices,
            online=found.online,
            silent=found.silent,
            ask_remote=self.ask_remote,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FittingModels:
    """Models that fit the PCs and the limits."""

    found: tuple[FittingModel, ...]
    num_tried: int
    assumptions: tuple[str, ...]


@action("plans.best")
class FindFittingModels(Action["FittingModels"]):
    """Find the models that fit the PCs, with time and cost for the data of a run.

    Tried are the models that Rackless knows and those in this PC's cache of the hub.

    Raises:
        UserError: the data cannot be used, there are no nodes, or the file is not valid.
    """

    spec: RunSpec
    """Run whose model and adapter do not matter."""
    limits: BestLimits
    cluster: Path | None = None
    """File that describes PCs; None: the nodes."""

    async def perform(self, core: CoreState, report: Report) -> FittingModels:
        from agents.shared.files.hub_cache import list_cache
        from app.library.configs import read_known

        await asyncio.to_thread(require_run_data, self.spec)
        # Nodes of a run file with shares could not change with the model.
        spec = replace(self.spec, shares=None)
        found = await find_cluster(core, spec, self.cluster, ask_remote=True)
        # Of one shape, the model that follows instructions, as users tune that one.
        known = [
            next((name for name in entry["names"] if _INSTRUCTED.search(name)), entry["names"][0])
            for entry in read_known()
        ]
        cached = await asyncio.to_thread(list_cache, os.environ)
        named = {name for entry in read_known() for name in entry["names"]}
        more = [repo.name for repo in cached if repo.kind == "model" and repo.name not in named]
        models = [*known, *more]
        fitting, assumptions = await core.planner.find_fitting(
            spec, found.cluster, models, self.limits
        )
        return FittingModels(found=fitting, num_tried=len(models), assumptions=assumptions)


@action("plans.export_cluster")
class ExportCluster(Action["Path"]):
    """Write the nodes as a cluster file, with what was measured; return its path.

    Raises:
        UserError: there are no nodes, none is known, or the file exists or cannot be written.
    """

    path: Path

    async def perform(self, core: CoreState, report: Report) -> Path:
        from agents.contract.spec import DataSpec, RunSpec
        from app.library.cluster_export import write_cluster

        # A run on all nodes, whose model and data do not matter.
        everything = RunSpec(model="-", data=DataSpec(train="-"))
        found = await find_cluster(core, everything, None, ask_remote=True)
        return await asyncio.to_thread(write_cluster, found.cluster, self.path)
