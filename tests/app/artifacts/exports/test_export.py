"""Exports of one run do not meet, and what cannot come here is known before a node works."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents.contract.node import GpuFacts, GpuUse
from agents.contract.requests.exports import ExportedFiles, MakeJob, MergeJob
from agents.contract.spec import RunSpec
from app.artifacts.exports.export import export_run
from app.errors import UsageError, UserError
from app.runs.lifecycle.stop import delete_run
from app.runs.services import Services
from tests.fakes.cluster import FakeCluster
from tests.fakes.exports import ask_export

LLAMA_7B = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32,
}  # fmt: skip


def test_two_exports_at_once_have_a_folder_each_and_the_next_takes_one_again(
    services: Services,
    interrupted: str,
    cluster: FakeCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node, plain = cluster["alpha"], cluster["alpha"].export_made
    both = asyncio.Barrier(2)

    async def together(job: MakeJob, *told: object) -> ExportedFiles:
        await both.wait()
        return await plain(job)

    async def scenario() -> None:
        monkeypatch.setattr(node, "export_made", together)
        await asyncio.gather(
            export_run(services, ask_export(interrupted, "gguf"), tmp_path / "x"),
            export_run(services, ask_export(interrupted, "gguf"), tmp_path / "y"),
        )
        monkeypatch.setattr(node, "export_made", plain)
        await export_run(services, ask_export(interrupted, "gguf"), tmp_path / "z")
        await export_run(services, ask_export(interrupted, "gguf", types=("F16",)), tmp_path / "u")
        await export_run(services, ask_export(interrupted, "awq", engine="autoawq"), tmp_path / "v")

    asyncio.run(scenario())
    first, second, third, fourth, fifth = (Path(job.destination).name for job in node.made)
    assert first != second
    assert third in (first, second), "what a killed one has left is found by its name"
    assert first.startswith("gguf-10-Q8_0-")
    assert fourth.startswith("gguf-10-F16-")
    assert fifth.startswith("awq-10-autoawq-")


def test_a_run_is_not_deleted_while_it_is_exported(
    services: Services,
    interrupted: str,
    cluster: FakeCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node, tried = cluster["alpha"], list[str]()

    def trying(plain: Any) -> Any:
        async def work(job: Any, *told: object) -> ExportedFiles:
            with pytest.raises(UserError, match=f"an export of run {interrupted} is under way"):
                await delete_run(services, interrupted)
            tried.append(job.destination)
            made: ExportedFiles = await plain(job)
            return made

        return work

    for name in ("export_merged", "export_made"):
        monkeypatch.setattr(node, name, trying(getattr(node, name)))
    asyncio.run(export_run(services, ask_export(interrupted, "gguf"), tmp_path / "out"))
    assert len(tried) == 2
    assert asyncio.run(delete_run(services, interrupted)) == ("gamma",)


def test_a_second_export_to_a_folder_is_refused_before_a_node_works(
    services: Services,
    interrupted: str,
    cluster: FakeCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node, plain, out = cluster["alpha"], cluster["alpha"].export_merged, tmp_path / "out"

    async def meanwhile(job: MergeJob, *told: object) -> ExportedFiles:
        with pytest.raises(UserError, match="another export is writing to"):
            await export_run(services, ask_export(interrupted, "gguf"), out)
        return await plain(job)

    monkeypatch.setattr(node, "export_merged", meanwhile)
    asyncio.run(export_run(services, ask_export(interrupted), out))
    assert (out.is_dir(), node.made) == (True, [])
    assert list((services.paths.home / "exports").iterdir()) == []


@pytest.fixture
def with_gpus(cluster: FakeCluster) -> FakeCluster:
    """Alpha has a GPU of 12 GB and one of 24."""
    sizes = enumerate((12 << 30, 24 << 30))
    cards = tuple(GpuFacts(uuid=f"GPU-{i}", index=i, name="RTX", memory_bytes=b) for i, b in sizes)
    node = cluster["alpha"]
    node.facts_now = replace(node.facts_now, gpus=cards)
    return cluster


def use(cluster: FakeCluster, *uuids: str) -> None:
    node = cluster["alpha"]
    uses = tuple(GpuUse(uuid=uuid, name=f"run of {uuid}", run_id="r") for uuid in uuids)
    node.facts_now = replace(node.facts_now, gpu_uses=uses)


def test_a_node_whose_folder_another_pc_uses_exports_nothing(
    services: Services, interrupted: str, cluster: FakeCluster, tmp_path: Path
) -> None:
    node = cluster["alpha"]
    node.facts_now = replace(node.facts_now, recorder="elsewhere")
    with pytest.raises(UserError, match="another PC uses the agent's folder of alpha"):
        asyncio.run(
            export_run(services, ask_export(interrupted, "merged", node="alpha"), tmp_path / "x")
        )
    assert not node.made


def test_an_export_takes_the_largest_gpu_that_no_run_uses(
    services: Services, interrupted: str, with_gpus: FakeCluster, tmp_path: Path
) -> None:
    for place, uuids in enumerate(((), ("GPU-1",), ("GPU-0", "GPU-1"))):
        use(with_gpus, *uuids)
        asyncio.run(
            export_run(
                services, ask_export(interrupted, "nf4", node="alpha"), tmp_path / str(place)
            )
        )
    devices = [(job.device, job.device_id) for job in with_gpus["alpha"].made]
    assert devices == [("cuda:1", "GPU-1"), ("cuda:0", "GPU-0"), ("cpu", "cpu")]


def test_a_gpu_that_is_taken_during_the_merge_is_not_quietly_replaced_by_the_cpu(
    services: Services,
    interrupted: str,
    with_gpus: FakeCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node, plain = with_gpus["alpha"], with_gpus["alpha"].export_merged
    taken = ["GPU-0", "GPU-1"]

    async def merge(job: MergeJob, *told: object) -> ExportedFiles:
        use(with_gpus, *taken)
        return await plain(job)

    monkeypatch.setattr(node, "export_merged", merge)
    with pytest.raises(UserError) as caught:
        asyncio.run(
            export_run(services, ask_export(interrupted, "nf4", node="alpha"), tmp_path / "x")
        )
    assert caught.value.message == (
        "every GPU of alpha was taken during the merge: run of GPU-0 and run of GPU-1 use its GPUs"
    )
    assert not node.made
    taken.pop()
    use(with_gpus)
    asyncio.run(export_run(services, ask_export(interrupted, "nf4", node="alpha"), tmp_path / "x"))
    assert node.made[-1].device == "cuda:1"


def test_a_place_that_takes_nothing_is_refused_before_a_node_works(
    services: Services, interrupted: str, cluster: FakeCluster, tmp_path: Path
) -> None:
    out = tmp_path / ("x" * 250)  # may be made, but nothing may be put beside it
    with pytest.raises(UserError, match="cannot be written: File name too long"):
        asyncio.run(export_run(services, ask_export(interrupted), out))
    assert not cluster["alpha"].merges
    asyncio.run(export_run(services, ask_export(interrupted), tmp_path / "out"))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_links_are_followed_and_the_folder_that_this_runs_in_stays(
    services: Services, interrupted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "new")
    found = asyncio.run(export_run(services, ask_export(interrupted), tmp_path / "link"))
    assert (found.path, found.path.is_dir()) == (tmp_path / "disk" / "new", True)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UserError, match="loop is not a usable path"):
        asyncio.run(export_run(services, ask_export(interrupted), tmp_path / "loop"))

    (tmp_path / "empty").mkdir()
    again = tmp_path / "empty" / ".." / "empty"
    found = asyncio.run(export_run(services, ask_export(interrupted), again))
    assert found.path == tmp_path / "empty"

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match="here is the current folder"):
        asyncio.run(export_run(services, ask_export(interrupted), Path()))
    assert (tmp_path / "here").is_dir()


def test_a_disk_that_is_too_full_is_refused_before_a_node_works(
    services: Services,
    interrupted: str,
    cluster: FakeCluster,
    spec: RunSpec,
    tmp_path: Path,
    free_bytes: list[int],
) -> None:
    Path(spec.model, "config.json").write_text(json.dumps(LLAMA_7B))
    free_bytes[0] = 6 << 30
    with pytest.raises(UserError, match=r"x needs 6\.7 GiB, and 6\.0 GiB are free on that disk"):
        asyncio.run(export_run(services, ask_export(interrupted, "gguf"), tmp_path / "x"))
    assert not cluster["alpha"].merges
    free_bytes[0] = 7 << 30
    asyncio.run(export_run(services, ask_export(interrupted, "gguf"), tmp_path / "x"))


def test_what_cannot_be_fetched_does_not_stay_on_the_node(
    services: Services,
    interrupted: str,
    cluster: FakeCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(*asked: object) -> None:
        raise UserError("the disk is full")

    monkeypatch.setattr(cluster, "fetch", fail)
    with pytest.raises(UserError, match="the disk is full"):
        asyncio.run(export_run(services, ask_export(interrupted, "nf4"), tmp_path / "x"))
    assert len(cluster["alpha"].made) == 1
    assert cluster["alpha"].artifacts == {}


def test_the_licence_of_the_base_goes_along(
    services: Services, interrupted: str, cluster: FakeCluster, spec: RunSpec, tmp_path: Path
) -> None:
    asyncio.run(export_run(services, ask_export(interrupted), tmp_path / "x"))
    card = (tmp_path / "x" / "README.md").read_text()
    assert "license:" not in card
    assert "- Licence of the base: not known\n" in card
    Path(spec.model, "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    asyncio.run(export_run(services, ask_export(interrupted), tmp_path / "y"))
    asyncio.run(export_run(services, ask_export(interrupted, "nf4"), tmp_path / "z"))
    card = (tmp_path / "y" / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n")
    assert "- Licence of the base: apache-2.0\n" in card
    assert cluster["alpha"].made[0].origin.licence == "apache-2.0"


def test_a_node_that_there_is_not_is_named(
    services: Services, interrupted: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="there is no node nope"):
        asyncio.run(
            export_run(services, ask_export(interrupted, "nf4", node="nope"), tmp_path / "x")
        )
