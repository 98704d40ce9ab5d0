"""Packages come to nodes: fetched once, copied on, and built into environments by uv or pip."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.contract.environments import KeptItem
from agents.contract.node import EnvironmentReport
from agents.contract.requests.environment import ListKept, PruneKept
from agents.shared.packages.wheel_store import PARTIAL, STORE
from app.errors import UserError
from app.nodes.client import NodeClient
from app.provisioning.environment import EnvironmentLock, parse_lock, setup_environment
from app.provisioning.wheels import NoWheels, WheelPlaces
from tests.fakes.package_site import PackageSite, package_site, put_pip, use_site
from tests.fakes.packages import flip_a_bit, lock_of, make_wheel
from tests.fakes.ssh import nodes


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageSite]:
    """Return an index that nodes use once `use_site` says so, and this PC never."""
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PIP_INDEX_URL", closed_index())
    with package_site(tmp_path / "site") as made:
        yield made


def closed_index() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}/simple"


def stand_in(site: PackageSite) -> EnvironmentLock:
    """Return a lock of two packages and pip, which the site has."""
    wheels = [make_wheel(site.folder, "tiny_thing"), make_wheel(site.folder, "aaa", "2.0")]
    return parse_lock(lock_of(*wheels, put_pip(site.folder)))


async def set_up(
    client: NodeClient, tmp_path: Path, lock: EnvironmentLock, *peers: NodeClient
) -> tuple[EnvironmentReport, list[str]]:
    said: list[str] = []
    report = await setup_environment(
        client,
        WheelPlaces(store=tmp_path / "master-wheels", locks=tmp_path / "locks", peers=peers),
        progress=said.append,
        lock=lock,
        candidates=(),
    )
    assert report.fits
    return report, said


async def test_the_second_node_fetches_nothing_and_a_third_without_internet_gets_all(
    tmp_path: Path, site: PackageSite, uv_wheel: Path
) -> None:
    shutil.copy(uv_wheel, site.folder)
    lock = stand_in(site)
    async with nodes(tmp_path, 3) as (first, second, cut):
        use_site(tmp_path / "pc-0", site.url)
        use_site(tmp_path / "pc-1", site.url)
        use_site(tmp_path / "pc-2", closed_index())
        report, said = await set_up(first, tmp_path, lock)
        assert report.built_with == "uv 0.13.9"
        assert any(line.startswith("fetching packages: 3 of 3") for line in said)
        assert sorted(site.files) == sorted(file.name for file in site.folder.iterdir())
        served = site.num_requests
        for client in (second, cut):
            report, said = await set_up(client, tmp_path, lock, first)
            assert report.built_with == "uv 0.13.9"
            assert "pc-0 has the packages: copying them from there" in said
            again, said = await set_up(client, tmp_path, lock, first)
            assert (again, said) == (report, [])
        assert site.num_requests == served
        assert not (tmp_path / "master-wheels").exists()
        # What was copied has no second name that would keep the disk full.
        (uv,) = (one for one in (await cut.ask(ListKept())).items if uv_only(one, uv_wheel))
        assert (await cut.ask(PruneKept(names=(uv.name,)))).freed_bytes == uv.size_bytes


def uv_only(item: KeptItem, uv_wheel: Path) -> bool:
    return item.kind == "wheels" and item.size_bytes >= uv_wheel.stat().st_size


async def test_another_node_fetches_for_one_without_internet_and_pip_builds_without_uv(
    tmp_path: Path, site: PackageSite
) -> None:
    lock = stand_in(site)
    async with nodes(tmp_path, 2) as (cut, other):
        use_site(tmp_path / "pc-0", closed_index())
        use_site(tmp_path / "pc-1", site.url)
        report, said = await set_up(cut, tmp_path, lock, other)
        assert report.built_with == "pip"
        assert any("pip builds the environment" in line for line in said)
        assert any(line.startswith("pc-1: fetching packages: 3 of 3") for line in said)
        kept = await cut.ask(ListKept())
        assert {one.kind for one in kept.items if one.needed_by} == {"environment", "wheels"}


async def test_this_pc_fetches_where_no_node_can(
    tmp_path: Path, site: PackageSite, uv_wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(uv_wheel, site.folder)
    lock = stand_in(site)
    monkeypatch.setenv("PIP_INDEX_URL", site.url)
    async with nodes(tmp_path, 2) as (first, second):
        for name in ("pc-0", "pc-1"):
            use_site(tmp_path / name, closed_index())
        report, _ = await set_up(first, tmp_path, lock)
        assert report.built_with == "uv 0.13.9"
        served = site.num_requests
        # From this PC's store; the other node is not asked.
        await set_up(second, tmp_path, lock)
        assert site.num_requests == served


async def test_what_nobody_has_or_is_wrong_is_said_with_the_nodes_name(
    tmp_path: Path, site: PackageSite
) -> None:
    lock = stand_in(site)
    async with nodes(tmp_path, 1) as (client,):
        use_site(tmp_path / "pc-0", closed_index())
        with pytest.raises(NoWheels, match=r"for pc-0 cannot be had: pc-0 cannot reach .*this PC"):
            await set_up(client, tmp_path, lock)
        use_site(tmp_path / "pc-0", site.url)
        flip_a_bit(site.folder / "aaa-2.0-py3-none-any.whl")
        with pytest.raises(UserError, match=r"pc-0 is offered aaa==2\.0 from .* Expected sha256"):
            await set_up(client, tmp_path, lock)
        home = tmp_path / "pc-0" / ".local" / "share" / "rackless-agent"
        assert not list((home / STORE).rglob("aaa*"))
        (site.folder / "aaa-2.0-py3-none-any.whl").unlink()
        with pytest.raises(NoWheels, match=r"pc-0 finds no package aaa==2\.0 for this Python"):
            await set_up(client, tmp_path, lock)


async def test_a_broken_off_transfer_goes_on_and_unneeded_things_are_deleted(
    tmp_path: Path, site: PackageSite
) -> None:
    lock = stand_in(site)
    async with nodes(tmp_path, 1) as (client,):
        use_site(tmp_path / "pc-0", site.url)
        site.break_after = 1 << 19  # of pip's 2 MB; a broken connection is tried once more
        # The first failure stops the other downloads, so it waits until they are whole.
        site.may_break = lambda: num_whole(tmp_path) == 2
        with pytest.raises(NoWheels):
            await set_up(client, tmp_path, lock)
        kept = {one.kind: one for one in (await client.ask(ListKept())).items}
        assert kept["downloads"].needed_by == ""
        site.break_after = None
        site.files.clear()
        report, _ = await set_up(client, tmp_path, lock)
        assert len(site.files) == 1  # the rest of pip; the others were whole
        other = parse_lock(
            lock_of(make_wheel(site.folder, "aaa", "2.1"), *site.folder.glob("pip*"))
        )
        newer, _ = await set_up(client, tmp_path, other)
        assert newer.python != report.python
        items = (await client.ask(ListKept())).items
        unneeded = [one.name for one in items if not one.needed_by]
        assert {one.kind for one in items if one.name in unneeded} >= {"environment", "wheels"}
        with pytest.raises(UserError, match="is not deleted: training needs it by now"):
            await client.ask(PruneKept(names=tuple(one.name for one in items if one.needed_by)))
        freed = (await client.ask(PruneKept(names=(*unneeded, "wheels-gone")))).freed_bytes
        assert freed >= sum(one.size_bytes for one in items if one.name in unneeded)
        left = (await client.ask(ListKept())).items
        assert {one.name for one in left} == {one.name for one in items} - set(unneeded)
    assert left_pythons(tmp_path) == [newer.python]


def num_whole(tmp_path: Path) -> int:
    """Return how many wheels of a set that is not whole yet are whole."""
    return len(list(tmp_path.glob(f"pc-0/.local/*/*/{STORE}/{PARTIAL}*/*.whl")))


def left_pythons(tmp_path: Path) -> list[str]:
    return [str(path) for path in tmp_path.glob("pc-0/.local/*/*/environments/*/bin/python")]
