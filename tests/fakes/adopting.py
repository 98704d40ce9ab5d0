"""A second home meets the runs of the first one: it adopts them, or it has a copy of its key."""

from __future__ import annotations

import shutil
from pathlib import Path

from app.runs.lifecycle.adoption import adopt_run, find_runs
from app.runs.services import Services
from tests.fakes.cluster import FakeCluster, make_services


async def adopt(services: Services, run_id: str, node: str = "alpha") -> None:
    """Adopt a run as its user does after a yes to the files that it names."""
    found = [r for r in await find_runs(services) if (r.run_id, r.node) == (run_id, node)]
    newest = max(found, key=lambda run: run.attempt)
    await adopt_run(services, run_id, node, newest.files)


def lose_store(services: Services, home: Path, cluster: FakeCluster) -> Services:
    """Return the services of a new home that has only the key of another one."""
    home.mkdir(mode=0o700)
    shutil.copy(services.paths.master_key, home)
    return make_services(home, cluster)
