"""A model of the hub is fetched by one and copied to the others."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download

from agents.contract.hub import HubFile, HubSnapshot, SnapshotPlace, read_snapshot
from app.errors import UserError
from app.library.bundles import Source
from app.nodes.files import transfer
from app.runs.hub_models import spread_hub_model
from app.runs.services import Services
from tests.app.nodes.files.test_transfer import HOME
from tests.fakes.cluster import FakeCluster
from tests.fakes.ssh import nodes

MODEL, REVISION = "org/tiny", "c" * 40
FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"weights" * 999}


def fill_cache(cache: Path) -> Path:
    """Write a snapshot as huggingface_hub leaves it; return the repository's folder."""
    repository = cache / "models--org--tiny"
    for name, data in FILES.items():
        is_large = name.endswith(".safetensors")
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        blob = repository / "blobs" / (hashlib.sha256(data).hexdigest() if is_large else git)
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        link = repository / "snapshots" / REVISION / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"../../blobs/{blob.name}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)
    return repository


async def test_a_snapshot_of_one_node_is_in_the_cache_of_another_and_on_its_disk_once(
    tmp_path: Path,
) -> None:
    caches = [tmp_path / f"pc-{n}" / ".cache" / "huggingface" / "hub" for n in range(2)]
    fill_cache(caches[0])
    async with nodes(tmp_path, 2) as (one, two):
        snapshot = await one.hub_snapshot(MODEL)
        assert snapshot is not None
        assert await two.hub_snapshot(MODEL) is None
        place = SnapshotPlace(model=MODEL, snapshot=snapshot, folder="models/org-tiny-c")
        await one.hub_offer(place)
        await transfer.copy(one, [two], place.folder, {})
        await two.hub_show(place)
        await two.hub_show(place)  # again changes nothing
        assert await two.hub_snapshot(MODEL) == snapshot
        # huggingface_hub itself finds it there.
        found = await asyncio.to_thread(
            snapshot_download, MODEL, cache_dir=caches[1], local_files_only=True
        )
        for name, data in FILES.items():
            assert (Path(found) / name).read_bytes() == data
            assert (Path(found) / name).samefile(tmp_path / "pc-1" / HOME / place.folder / name)
        # A file that is not what the hub calls by that name gets no name in the cache.
        false = HubFile(path="config.json", blob="d" * 40, size_bytes=1)
        lie = SnapshotPlace(
            model="org/other",
            snapshot=HubSnapshot(revision=REVISION, files=(false,)),
            folder=place.folder,
        )
        with pytest.raises(UserError, match="is not the file of the hub"):
            await two.hub_show(lie)
        assert await two.hub_snapshot("org/other") is None


def test_a_snapshot_that_is_not_whole_is_none(tmp_path: Path) -> None:
    environ = {"HF_HUB_CACHE": str(tmp_path)}
    assert read_snapshot(MODEL, environ) is None
    repository = fill_cache(tmp_path)
    assert read_snapshot(MODEL, environ) is not None
    half = repository / "blobs" / "e.incomplete"
    half.write_text("")
    assert read_snapshot(MODEL, environ) is None
    half.unlink()
    index = repository / "snapshots" / REVISION / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-2.safetensors"}}')
    assert read_snapshot(MODEL, environ) is None


def test_nodes_get_it_from_one_that_has_it_else_from_this_pc(
    services: Services, cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def spread(value: str = MODEL) -> None:
        source = Source(value=value)
        asyncio.run(spread_hub_model(services, ("alpha", "beta"), source, said.append))

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    spread()  # nobody has it: each fetches it
    assert (said, cluster.copies) == ([], [])
    fill_cache(tmp_path / "cache")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    spread()
    assert said == [f"this PC has {MODEL}: copying it to alpha and beta"]
    assert len(cluster["beta"].pushed) == 1
    snapshot = cluster["alpha"].snapshots[MODEL]
    assert {file.path for file in snapshot.files} == set(FILES)
    del cluster["beta"].snapshots[MODEL]
    spread()
    assert said[-1] == f"alpha has {MODEL}: copying it to beta"
    assert cluster.copies == [("alpha", "beta", f"models/org-tiny-{REVISION[:16]}")]
    assert cluster["beta"].snapshots == {MODEL: snapshot}
    spread("/models/on/the/nodes")
    assert len(said) == 2
