"""A model of the hub is fetched by one and copied to the others."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from agents.contract.hub import HubFile, HubSnapshot, read_snapshot
from agents.contract.node import EnvironmentReport
from agents.contract.requests.hub import (
    FetchSnapshot,
    FindSnapshot,
    KeepSnapshot,
    OfferSnapshot,
    SnapshotPlace,
)
from agents.contract.requests.models import ReadConfig
from agents.contract.wire import ForeignValueError, from_wire, to_wire
from agents.state import Home, write_json
from app.errors import NodeUnreachable, UserError
from app.events import NodeTransfer
from app.library.bundles import Source
from app.library.configs import ConfigLibrary
from app.nodes.client import NodeClient
from app.nodes.files import transfer
from app.nodes.transport.loopback import power_cut
from app.runs.inputs.hub_models import find_path, spread_hub_model
from app.runs.services import Services
from tests.app.nodes.files.test_transfer import HOME
from tests.fakes.cluster import FakeCluster
from tests.fakes.model_site import ModelSite, model_site
from tests.fakes.ssh import nodes

MODEL, REVISION = "org/tiny", "c" * 40
FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"weights" * 999}

COPIES = (
    "training.bin", "consolidated.safetensors", "consolidated.safetensors.index.json",
    "model.fp16.safetensors", "original/params.json", "onnx/model.safetensors", "x.gguf",
)  # fmt: skip


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


def list_tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


async def test_a_snapshot_of_one_node_is_a_copy_of_another_whose_cache_stays_as_it_is(
    tmp_path: Path,
) -> None:
    caches = [tmp_path / f"pc-{n}" / ".cache" / "huggingface" / "hub" for n in range(2)]
    fill_cache(caches[0])
    caches[1].mkdir(parents=True)
    before = list_tree(caches[0])
    async with nodes(tmp_path, 2) as (one, two):
        snapshot = (await one.ask(FindSnapshot(model=MODEL))).snapshot
        assert snapshot is not None
        assert (await two.ask(FindSnapshot(model=MODEL))).snapshot is None
        with pytest.raises(UserError, match="There is no training environment on this node"):
            await two.ask(FetchSnapshot(model=MODEL))
        place = SnapshotPlace(model=MODEL, snapshot=snapshot, folder="models/org-tiny-c")
        await one.ask(OfferSnapshot(place=place))
        await transfer.copy(one, [two], place.folder, {})
        kept = await two.ask(KeepSnapshot(place=place))
        assert await two.ask(KeepSnapshot(place=place)) == kept  # again changes nothing
        assert await two.ask(FindSnapshot(model=MODEL)) == kept
        assert kept.snapshot == snapshot
        folder = tmp_path / "pc-1" / HOME / place.folder
        assert kept.folder == str(folder)
        for name, data in FILES.items():
            assert (folder / name).read_bytes() == data
        assert (await two.ask(ReadConfig(model=MODEL))).config == {"model_type": "llama"}
        assert list_tree(caches[1]) == []
        assert list_tree(caches[0]) == before
        # The copy can be given on, without a name of its own in any cache.
        await two.ask(OfferSnapshot(place=dataclasses.replace(place, folder="models/again")))
        # A file that is not what the hub calls by that name is not used.
        false = HubFile(path="config.json", blob="d" * 40, size_bytes=1)
        lie = SnapshotPlace(
            model="org/other",
            snapshot=HubSnapshot(revision=REVISION, files=(false,)),
            folder=place.folder,
        )
        with pytest.raises(UserError, match="is not a file of org/other"):
            await two.ask(KeepSnapshot(place=lie))
        (folder / "model.safetensors").unlink()
        with pytest.raises(UserError, match="differs from the file on the hub"):
            await two.ask(KeepSnapshot(place=lie))
        assert (await two.ask(FindSnapshot(model="org/other"))).snapshot is None
        assert (await two.ask(FindSnapshot(model=MODEL))).snapshot is None  # no longer whole
        assert list_tree(caches[1]) == []


def test_a_snapshot_that_is_not_whole_is_none(tmp_path: Path) -> None:
    environ = {"HF_HUB_CACHE": str(tmp_path)}
    assert read_snapshot(MODEL, environ) is None
    repository = fill_cache(tmp_path)
    assert read_snapshot(MODEL, environ) is not None
    half = repository / "blobs" / "e.incomplete"
    half.write_text("")
    assert read_snapshot(MODEL, environ) is None
    half.unlink()
    whole = hashlib.sha256(FILES["model.safetensors"]).hexdigest()
    (repository / "blobs" / f"{whole}.1234abcd.incomplete").write_text("")  # killed, then done
    assert read_snapshot(MODEL, environ) is not None
    folder = repository / "snapshots" / REVISION
    (repository / "blobs" / ("d" * 40)).write_text('{"weight_map": {"a": "model-2.safetensors"}}')
    (folder / "model.safetensors.index.json").symlink_to(f"../../blobs/{'d' * 40}")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    assert read_snapshot(MODEL, environ) is None
    (folder / "model-1.safetensors").rename(folder / "model-2.safetensors")
    assert read_snapshot(MODEL, environ) is not None


def test_copies_of_the_weights_are_no_part_of_a_snapshot(tmp_path: Path) -> None:
    folder = fill_cache(tmp_path) / "snapshots" / REVISION
    (folder / "original").mkdir()
    for name in ("consolidated.safetensors", "model.fp16.safetensors", "x.index.json", "x.gguf"):
        (folder / name).symlink_to((folder / "model.safetensors").readlink())
    (folder / "original" / "tokenizer.model").symlink_to((folder / "config.json").resolve())
    found = read_snapshot(MODEL, {"HF_HUB_CACHE": str(tmp_path)})
    assert found is not None
    assert sorted(file.path for file in found.files) == sorted(FILES)


def test_nodes_get_it_from_one_that_downloads_it_or_has_it_else_from_this_pc(
    services: Services, cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def spread(value: str = MODEL, nodes: tuple[str, ...] = ("alpha", "beta")) -> None:
        asyncio.run(spread_hub_model(services, nodes, Source(value=value), said.append))

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    snapshot = HubSnapshot(
        revision=REVISION, files=(HubFile(path="config.json", blob="a" * 40, size_bytes=9),)
    )
    cluster["alpha"].hub[MODEL] = NodeUnreachable("alpha was lost")
    cluster["beta"].hub[MODEL] = snapshot
    spread(nodes=("alpha", "beta", "gamma"))  # nobody has it: beta downloads it
    assert said == [
        f"alpha downloads {MODEL} from the hub, for all nodes of the run",
        "alpha was lost",
        f"beta downloads {MODEL} from the hub, for all nodes of the run",
        f"beta: downloading {MODEL}: 50 % of 1.0 GiB",
        f"beta has {MODEL}: copying it to gamma",
        "only beta vouches for these files, neither the hub nor this PC",
    ]
    assert cluster.copies == [("beta", "gamma", f"models/org-tiny-{REVISION[:16]}-from-beta")]
    assert cluster["gamma"].snapshots == {MODEL: snapshot}
    assert "hub_fetch" not in cluster["gamma"].calls
    cluster["beta"].snapshots.clear()
    said.clear()
    cluster.copies.clear()
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


def test_code_pickles_and_notebooks_are_never_offered_nor_accepted(tmp_path: Path) -> None:
    repository = fill_cache(tmp_path)
    code = ("modeling.py", "pytorch_model.bin", "x.ipynb", ".hidden.json", "a/b.so", "run.sh")
    for name in code:
        blob = repository / "blobs" / hashlib.sha256(name.encode()).hexdigest()
        blob.write_text(name)
        link = repository / "snapshots" / REVISION / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(blob)
        with pytest.raises(ForeignValueError, match="is not a file that nodes copy"):
            from_wire(HubFile, {"path": name, "blob": "a" * 40, "size_bytes": 1})
    found = read_snapshot(MODEL, {"HF_HUB_CACHE": str(tmp_path)})
    assert found is not None
    assert {file.path for file in found.files} == set(FILES)


async def test_a_made_up_model_of_one_node_reaches_no_cache_and_only_its_listed_files_travel(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is asked first; without it, what a node made up is named after that node."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    caches = [tmp_path / f"pc-{n}" / ".cache" / "huggingface" / "hub" for n in range(2)]
    repository = fill_cache(caches[0])
    caches[1].mkdir(parents=True)
    said: list[str] = []
    genuine = {**FILES, "model.safetensors": b"genuine" * 999}
    with model_site(MODEL, genuine, ("one",)) as site:
        environ = {"HF_ENDPOINT": site.url, "HF_TOKEN": "one"}
        online = ConfigLibrary(tmp_path / "configs", environ)
        prepare(tmp_path, site, "none", "one")
        shell = site.make_shell(tmp_path / "shell")
        async with nodes(tmp_path, 2, "--shell", shell) as clients:
            real = dataclasses.replace(services, pool=RealNodes(clients))
            names = [client.name for client in clients]
            await spread_hub_model(real, names, Source(value=MODEL), said.append)
            assert "only pc-0 vouches for these files, neither the hub nor this PC" in said
            taken = await clients[1].ask(FindSnapshot(model=MODEL))
            assert taken.folder.endswith(f"models/org-tiny-{REVISION[:16]}-from-pc-0")
            assert await find_path(real, "pc-1", MODEL) == taken.folder
            assert await find_path(real, "pc-0", MODEL) == MODEL
            assert list_tree(caches[1]) == []
            # With the hub's own list, the made-up copies are neither used nor copied.
            real = dataclasses.replace(real, configs=online)
            said.clear()
            await spread_hub_model(real, names, Source(value=MODEL), said.append)
            assert f"pc-0 has other files of {MODEL} than the hub, so they are not copied" in said
            assert f"pc-1 downloads {MODEL} from the hub, for all nodes of the run" in said
            assert await find_path(real, "pc-1", MODEL) == MODEL
            # A file that the node slips into the folder that it offers is not taken.
            (tmp_path / "pc-0" / HOME / "models" / "x").mkdir(parents=True)
            (tmp_path / "pc-0" / HOME / "models" / "x" / "evil.json").write_text("{}")
            with pytest.raises(UserError, match="not the file that is known"):
                await real.pool.copy("pc-0", ["pc-1"], "models/x", None, {"config.json": 2})
            (tmp_path / "pc-0" / HOME / "models" / "x" / "evil.py").write_text("1")
            with pytest.raises(UserError, match="which is code, a pickle or a notebook"):
                await real.pool.copy("pc-0", ["pc-1"], "models/x")
    assert repository.is_dir()
    assert not (tmp_path / "pc-1" / HOME / "models" / "x").exists()


class RealNodes(FakeCluster):
    """A pool of nodes with real agents."""

    def __init__(self, clients: Sequence[NodeClient]) -> None:
        super().__init__()
        self.clients = {client.name: client for client in clients}

    def agent(self, name: str) -> NodeClient:  # type: ignore[override]
        return self.clients[name]

    async def copy(
        self,
        source: str,
        targets: Sequence[str],
        path: str,
        progress: Callable[[Sequence[NodeTransfer]], None] | None = None,
        expected: Mapping[str, int] | None = None,
    ) -> tuple[str, ...]:
        clients = [self.clients[target] for target in targets]
        return await transfer.copy(self.clients[source], clients, path, {}, progress, expected)


def prepare(tmp_path: Path, site: ModelSite, *tokens: str) -> None:
    """Give homes of nodes the tests' own Python as environment, and their tokens."""
    for number, token in enumerate(tokens):
        home = tmp_path / f"pc-{number}"
        (home / HOME).mkdir(parents=True)
        report = EnvironmentReport(python=sys.executable)
        write_json(Home(home / HOME).environment_file, to_wire(report))
        site.use(home, token)


async def test_nodes_ask_the_hub_once_also_if_one_may_not_and_one_is_lost_in_the_middle(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    said: list[str] = []
    files = {**FILES, "tokenizer.json": b"{}"}
    copies = {name: b"weights" * 999 for name in COPIES}
    with model_site(MODEL, files | copies, ("one", "two")) as site:

        def cut(name: str, token: str) -> bool:
            if token == "one" and name == "config.json":
                power_cut(tmp_path / "pc-1")
            return token != "one"

        site.before = cut
        prepare(tmp_path, site, "none", "one", "two")
        shell = site.make_shell(tmp_path / "shell")
        async with nodes(tmp_path, 3, "--shell", shell) as clients:
            real = dataclasses.replace(services, pool=RealNodes(clients))
            names = [client.name for client in clients]
            await spread_hub_model(real, names, Source(value=MODEL), said.append)
            found = [(await clients[n].ask(FindSnapshot(model=MODEL))).snapshot for n in (0, 2)]
            asked = len(site.files)
            await spread_hub_model(real, ["pc-2", "pc-0"], Source(value=MODEL), said.append)
    wanted = sorted(files)
    assert sorted(name for name, token in site.files if token == "two") == wanted
    assert len(site.files) == asked
    assert {token for _, token in site.files} == {"one", "two"}
    assert [[file.path for file in one.files] for one in found if one] == [wanted] * 2
    refused = (
        f"pc: {MODEL} is behind a licence on the hub that this node's account has not accepted."
    )
    assert said[:2] == [f"pc-0 downloads {MODEL} from the hub, for all nodes of the run", refused]
    assert f"pc-2 has {MODEL}: copying it to pc-0" in said


def test_where_nobody_can_download_it_the_error_says_what_each_said(
    services: Services, cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster["alpha"].hub[MODEL] = UserError("alpha: its disk is full.", "Free some space")
    cluster["beta"].hub[MODEL] = NodeUnreachable("beta was lost")
    with model_site(MODEL, FILES, ("mine",)) as site:
        monkeypatch.setenv("HF_ENDPOINT", site.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", "other")
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")

        def spread() -> None:
            asyncio.run(
                spread_hub_model(services, ["alpha", "beta"], Source(value=MODEL), said.append)
            )

        said: list[str] = []
        with pytest.raises(UserError) as caught:
            spread()
        assert caught.value.message == (
            f"{MODEL} is on none of these PCs, and none of them can download it. alpha: its disk "
            f"is full; beta was lost; this PC: {MODEL} is behind a licence on the hub that "
            "this PC's account has not accepted"
        )
        assert caught.value.hint.startswith("Free some space, or give the folder")
        assert "other" in site.refused
        monkeypatch.setenv("HF_TOKEN", "mine")
        spread()  # this PC can: it downloads and sends
    assert f"this PC has {MODEL}: copying it to alpha" in said
    assert set(cluster["alpha"].snapshots) == {MODEL}
    assert sorted(name for name, _ in site.files) == sorted(FILES)
