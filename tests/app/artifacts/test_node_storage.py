"""Checkpoints and artifacts of a node go only while another copy elsewhere is whole."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agents.contract.requests.environment import PruneKept
from agents.contract.requests.runs import DeleteCheckpoint
from agents.contract.requests.storage import (
    DeleteStorage,
    Freed,
    ListStorage,
    StorageItem,
    StorageKind,
    StorageReport,
)
from agents.contract.run import FileEntry
from agents.contract.spec import DataSpec, RunSpec
from app.artifact import ArtifactCopy, ArtifactSnapshot
from app.artifacts.node_storage import FreedStorage, free_storage, list_storage
from app.artifacts.storage_rules import choose
from app.errors import UserError
from app.events import RunState
from app.runs.services import Services
from app.storage.runs import RunRecord
from tests.fakes.cluster import FakeCluster, FakeNode, make_services
from tests.fakes.requests import FakeAgent, answers

FILES = (FileEntry(path="model.safetensors", size_bytes=8, sha256="a" * 64),)
POEMS = "artifacts/poems-0011"
MODEL, WHEELS = "models/llama-0022", "wheels-1"


def checkpoint(step: int) -> str:
    return f"runs/r-1/checkpoints/step-{step:08d}"


@dataclass
class Disk(FakeAgent):
    """The disk of alpha."""

    node: FakeNode
    name: str = "alpha"
    needs: dict[str, str] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)

    @answers(ListStorage)
    async def storage(self, request: ListStorage, progress: object) -> StorageReport:
        places: list[tuple[StorageKind, str]] = [("model", MODEL), ("wheels", WHEELS)]
        places += [("checkpoint", info.path) for info in self.node.checkpoints.values()]
        places += [("artifact", path) for path in self.node.artifacts]
        items = tuple(
            StorageItem(
                kind=kind,
                name=name,
                size_bytes=1000,
                used_s=1.0,
                needed_by=self.needs.get(name, ""),
            )
            for kind, name in places
        )
        size = 1000 * len(items)
        return StorageReport(items=items, size_bytes=size, disk_bytes=10**6, disk_free_bytes=10**5)

    @answers(DeleteStorage)
    async def delete_storage(self, request: DeleteStorage, progress: object) -> Freed:
        self.deleted += request.names
        return Freed(freed_bytes=1000)

    @answers(PruneKept)
    async def prune_environments(self, request: PruneKept, progress: object) -> Freed:
        raise UserError(f"{request.names[0]} is not deleted: training needs it by now.")

    @answers(DeleteCheckpoint)
    async def checkpoint_delete(self, request: DeleteCheckpoint, progress: object) -> None:
        await self.node.ask(request)


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster("alpha", "beta", "gamma")


@pytest.fixture
def services(tmp_path: Path, cluster: FakeCluster) -> Services:
    made = make_services(tmp_path, cluster)
    add_run(made, "stopped")
    for node in ("alpha", "beta"):
        for step in (100, 200):
            cluster.nodes[node].add_checkpoint("r-1", step)
    cluster.nodes["alpha"].add_checkpoint("r-1", 50)
    return made


@pytest.fixture
def disk(cluster: FakeCluster) -> Disk:
    return Disk(cluster.nodes["alpha"])


def add_run(services: Services, state: RunState) -> None:
    spec = RunSpec(model="org/base", data=DataSpec(train="rows.jsonl"))
    services.runs.store.discard("r-1")
    services.runs.store.add(
        RunRecord(
            run_id="r-1", name="r-1", state=state, spec=spec, attempt=1, nodes=("alpha",),
            created_s=1.0,
        )
    )  # fmt: skip


def reasons(services: Services, disk: Disk) -> dict[str, str]:
    found = asyncio.run(list_storage(services, disk))
    return {item.name: item.protected for item in found.items}


def free(services: Services, disk: Disk, *names: str) -> FreedStorage:
    return asyncio.run(free_storage(services, disk, names, lambda text: None))


def test_a_checkpoint_goes_only_while_a_twin_elsewhere_is_whole(
    services: Services, cluster: FakeCluster, disk: Disk
) -> None:
    beta = cluster.nodes["beta"]
    found = reasons(services, disk)
    assert found[checkpoint(50)] == "the last checkpoint"
    assert found[checkpoint(100)] == ""
    assert found[checkpoint(200)] == "run r-1 resumes from it"
    beta.damaged.add(100)
    done = free(services, disk, checkpoint(100), checkpoint(50))
    assert done.kept == (
        (checkpoint(100), "no other copy is whole"),
        (checkpoint(50), "the last checkpoint"),
    )
    beta.damaged.clear()
    beta.reachable = False
    last = "the last checkpoint that can be reached; beta does not answer"
    assert reasons(services, disk)[checkpoint(100)] == last
    beta.reachable = True
    beta.add_checkpoint("r-1", 100, content="other")
    assert reasons(services, disk)[checkpoint(100)] == "the last checkpoint"
    beta.add_checkpoint("r-1", 100)
    add_run(services, "running")
    assert reasons(services, disk)[checkpoint(100)] == "run r-1 is active"
    add_run(services, "done")
    done = free(services, disk, checkpoint(100), checkpoint(200), "models/gone")
    assert (done.deleted, done.freed_bytes) == ((checkpoint(100), checkpoint(200)), 2000)
    assert list(cluster.nodes["alpha"].checkpoints) == [("r-1", 50)]
    # Of a run that another PC has started, only the newest is sure to be wanted.


def test_an_artifact_goes_only_while_another_copy_is_whole(
    services: Services, cluster: FakeCluster, disk: Disk
) -> None:
    alpha, beta = cluster.nodes["alpha"], cluster.nodes["beta"]
    alpha.artifacts[POEMS] = beta.artifacts[POEMS] = FILES
    assert reasons(services, disk)[POEMS].startswith("not in the list of artifacts")
    made = ArtifactSnapshot(
        name="poems", version=1, format="merged", size_bytes=8, created_s=1.0, files=FILES
    )
    made = services.artifacts.add(made)
    here, there = (
        ArtifactCopy(kind="node", place=node, path=POEMS, made_s=time.time())
        for node in ("alpha", "beta")
    )
    services.artifacts.save_copy(made, here)
    assert reasons(services, disk)[POEMS] == "the last copy"
    services.artifacts.save_copy(made, there)
    assert reasons(services, disk)[POEMS] == ""
    beta.reachable = False
    assert reasons(services, disk)[POEMS].endswith("beta does not answer")
    beta.reachable = True
    beta.artifacts[POEMS] = (FileEntry(path="model.safetensors", size_bytes=8, sha256="b" * 64),)
    assert free(services, disk, POEMS).kept == ((POEMS, "no other copy is whole"),)
    assert reasons(services, disk)[POEMS] == "the last copy"
    beta.artifacts[POEMS] = FILES
    services.artifacts.save_copy(made, there)
    assert free(services, disk, POEMS).deleted == (POEMS,)
    assert (list(alpha.artifacts), list(beta.artifacts)) == ([], [POEMS])
    (left,) = services.artifacts.versions("poems")
    assert [copy.place for copy in left.copies] == ["beta"]


def test_what_a_node_refuses_stays_and_the_rest_goes(services: Services, disk: Disk) -> None:
    storage = asyncio.run(list_storage(services, disk))
    assert [item.name for item in choose(storage, ())] == [WHEELS]
    assert [item.name for item in choose(storage, ("model", "checkpoint"))] == [
        MODEL,
        checkpoint(100),
    ]
    assert choose(storage, ("partial",)) == ()
    done = free(services, disk, WHEELS, MODEL)
    assert done.kept == ((WHEELS, "wheels-1 is not deleted: training needs it by now."),)
    assert (done.deleted, disk.deleted) == ((MODEL,), [MODEL])
    disk.needs[MODEL] = "run r-2"
    assert free(services, disk, MODEL).kept == ((MODEL, "needed by run r-2"),)
