"""Folders to, from and between nodes, with the real agent at the other end."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from agents.contract.requests.runs import CompareBundle
from agents.contract.run import FileEntry
from app.errors import NodeUnreachable, UserError
from app.nodes.client import NodeClient
from app.nodes.files import transfer
from app.nodes.files.remote_files import is_safe_path
from app.nodes.transport.loopback import power_cut
from tests.draws import random_bytes
from tests.fakes.agent import fake_archive
from tests.fakes.ssh import client_of, linked, loopback_node, nodes, until

HOME = ".local/share/rackless-agent"


def make_files(root: Path, **sizes: int) -> tuple[FileEntry, ...]:
    """Write files of random bytes; `__` in a name stands for `/`."""
    entries = []
    for name, size in sizes.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        data = random_bytes(size, f"{root.name}/{name}")
        path.write_bytes(data)
        relative = path.relative_to(root).as_posix()
        digest = hashlib.sha256(data).hexdigest()
        entries.append(FileEntry(path=relative, size_bytes=size, sha256=digest))
    return tuple(entries)


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


async def test_a_folder_is_pushed_once(tmp_path: Path) -> None:
    root = tmp_path / "model"
    files = make_files(root, config=100, sub__weights=5 << 20, empty=0)
    async with nodes(tmp_path, 1) as (pc,):
        told: list[tuple[int, int]] = []
        place = await transfer.push(pc, "models/m-1", root, files, lambda *n: told.append(n))
        assert Path(place) == tmp_path / "pc-0" / HOME / "models" / "m-1"
        assert content(Path(place)) == content(root)
        assert told[-1] == (sum(f.size_bytes for f in files),) * 2
        assert [done for done, _ in told] == sorted(done for done, _ in told)
        told.clear()
        assert await transfer.push(pc, "models/m-1", root, files, lambda *n: told.append(n))
        assert told == []


async def test_only_what_is_missing_travels(tmp_path: Path) -> None:
    root = tmp_path / "model"
    files = make_files(root, a=3000, b=4000)
    async with nodes(tmp_path, 1) as (pc,):
        (root / "b").rename(root / "gone")
        with pytest.raises(UserError, match="b cannot be read"):
            await transfer.push(pc, "models/m", root, files)
        (root / "gone").rename(root / "b")
        assert (
            await pc.ask(CompareBundle(destination="models/m", files=tuple(files)))
        ).missing == ("b",)
        told: list[tuple[int, int]] = []
        await transfer.push(pc, "models/m", root, files, lambda *n: told.append(n))
        assert told == [(4000, 4000)]


async def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "data"
    files = make_files(root, rows=3000)
    async with nodes(tmp_path, 1) as (pc,):
        (root / "rows").write_bytes(b"x" * 3000)
        with pytest.raises(UserError, match=r"pc-0: rows arrived damaged"):
            await transfer.push(pc, "data/d", root, files)
        (root / "rows").write_bytes(b"x" * 10)
        with pytest.raises(UserError, match="rows became shorter while it was sent"):
            await transfer.push(pc, "data/d", root, files)
        assert not (tmp_path / "pc-0" / HOME / "data" / "d").exists()


async def test_a_place_outside_of_the_agents_home_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "data"
    files = make_files(root, rows=10)
    async with nodes(tmp_path, 1) as (pc,):
        for destination in ("../x", "/etc/x", "secrets/x", "models"):
            with pytest.raises(UserError, match="not allowed"):
                await transfer.push(pc, destination, root, files)
            with pytest.raises(UserError, match="not allowed"):
                await transfer.fetch(pc, destination, tmp_path / "fetched")


async def test_a_file_in_the_way_of_a_folder_is_reported(tmp_path: Path) -> None:
    root = tmp_path / "data"
    files = make_files(root, rows=10)
    async with nodes(tmp_path, 1) as (pc,):
        (tmp_path / "pc-0" / HOME / "data").write_text("a file in the way")
        with pytest.raises(UserError):
            await transfer.push(pc, "data/d", root, files)


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk can only be mounted by root")
async def test_a_disk_that_fills_up_on_the_node(tmp_path: Path) -> None:
    root = tmp_path / "model"
    files = make_files(root, small=1000, weights=3 << 20)
    async with nodes(tmp_path, 1) as (pc,):
        place = tmp_path / "pc-0" / HOME / "models"
        place.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)]
        if (await asyncio.to_thread(subprocess.run, mount)).returncode != 0:
            pytest.skip("this container may not mount")
        try:
            with pytest.raises(UserError, match=r"pc-0: The disk .*full") as caught:
                await transfer.push(pc, "models/m", root, files)
            assert "Free some space" in caught.value.hint
            assert not [name for name in content(place) if "half" in name]
        finally:
            await asyncio.to_thread(subprocess.run, ["umount", "-l", str(place)])


async def test_a_folder_is_fetched_whole(tmp_path: Path) -> None:
    async with nodes(tmp_path, 1) as (pc,):
        there = tmp_path / "pc-0" / HOME / "runs" / "r" / "exports" / "merged"
        files = make_files(there, config=10, sub__weights=3 << 20, empty=0)
        told: list[tuple[int, int]] = []
        target = tmp_path / "out" / "merged"
        await transfer.fetch(pc, "runs/r/exports/merged", target, lambda *n: told.append(n))
        assert content(target) == content(there)
        assert told[-1] == (sum(f.size_bytes for f in files),) * 2
        assert os.listdir(target.parent) == ["merged"]
        with pytest.raises(UserError, match="exists already"):
            await transfer.fetch(pc, "runs/r/exports/merged", target)
        with pytest.raises(UserError, match="nothing to send"):
            await transfer.fetch(pc, "runs/other", tmp_path / "other")


async def test_a_target_that_cannot_be_written(tmp_path: Path) -> None:
    async with nodes(tmp_path, 1) as (pc,):
        make_files(tmp_path / "pc-0" / HOME / "runs" / "r", log=10)
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match="cannot be written: Not a directory"):
            await transfer.fetch(pc, "runs/r", tmp_path / "file" / "out")


SENDING = (
    "import json, os, sys\n"
    "FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(sys.argv[0])))\n"
    "if sys.argv[1] == 'send':\n"
    "    print(open(FOLDER + '/said').read(), end='')\n"
    "else:\n"
    "    print('RACKLESS ' + sys.argv[2])\n"
    "    hello = dict(version=1, archive_sha256=os.path.basename(sys.argv[0])[:-4], python='3',\n"
    "                 hostname='x', pid=1, boot_id='b', agent_home=FOLDER)\n"
    "    print(json.dumps(dict(type='event', kind='hello', data=hello)), flush=True)\n"
    "    sys.stdin.readline()\n"
)
"""An agent whose `send` says what `let_it_send` wrote."""


def let_it_send(
    folder: Path, entries: Sequence[dict[str, object]], data: str = "", noise: str = ""
) -> None:
    """Write what the node of `hostile` says when it is to send files."""
    (folder / "pc" / HOME / "said").write_text(f"{noise}{json.dumps({'files': entries})}\n{data}")


@contextlib.asynccontextmanager
async def hostile(folder: Path) -> AsyncIterator[NodeClient]:
    """A client of a node whose agent says what it wants."""
    async with (
        loopback_node(folder) as server,
        linked(server, folder / "master", fake_archive(SENDING)) as link,
    ):
        yield client_of(link)


async def test_a_node_cannot_write_outside_of_the_target(tmp_path: Path) -> None:
    async with hostile(tmp_path) as pc:
        for name in ("../evil", "/tmp/evil", "a/../../evil", "a\\b", "c:evil", ""):
            let_it_send(tmp_path, [{"path": name, "size_bytes": 4, "sha256": "0" * 64}], "evil")
            with pytest.raises(UserError, match="offers a file with the name"):
                await transfer.fetch(pc, "runs/r", tmp_path / "out" / "r")
            assert not (tmp_path / "out").exists(), name


async def test_what_arrives_damaged_is_not_kept(tmp_path: Path) -> None:
    rows: list[tuple[dict[str, object], str, str]] = [
        ({"path": "a", "size_bytes": 4, "sha256": "0" * 64}, "evil", "arrived damaged"),
        ({"path": "a", "size_bytes": 9, "sha256": "0" * 64}, "evil", "broke off in a"),
        ({"path": "a", "size_bytes": -1, "sha256": ""}, "", "offers a file"),
        ({"path": "a"}, "", "in the list of files"),
    ]
    out = tmp_path / "out"
    async with hostile(tmp_path) as pc:
        for entry, data, message in rows:
            let_it_send(tmp_path, [entry], data)
            with pytest.raises(UserError, match=message):
                await transfer.fetch(pc, "runs/r", out / "r")
            assert not out.exists() or os.listdir(out) == [], message


async def test_noise_of_login_scripts_before_the_files_is_skipped(tmp_path: Path) -> None:
    entry = {"path": "a", "size_bytes": 4, "sha256": hashlib.sha256(b"good").hexdigest()}
    async with hostile(tmp_path) as pc:
        let_it_send(tmp_path, [entry], "good", "Welcome!\n[1]\n")
        await transfer.fetch(pc, "runs/r", tmp_path / "r")
        assert content(tmp_path / "r") == {"a": b"good"}


async def test_a_checkpoint_is_copied_from_node_to_nodes(tmp_path: Path) -> None:
    async with nodes(tmp_path, 3) as (one, two, three):
        path = "runs/r/checkpoints/step-00000100"
        there = tmp_path / "pc-0" / HOME / path
        files = make_files(there, adapter=3 << 20, state=10)
        # The second node has one of the files from an earlier, broken-off copy.
        root = tmp_path / "part"
        for entry in files[:1]:
            (root / entry.path).parent.mkdir(parents=True, exist_ok=True)
            (root / entry.path).write_bytes((there / entry.path).read_bytes())
        with pytest.raises(UserError):
            await transfer.push(two, path, root, files)
        await transfer.copy(one, [two, three], path, {})
        for number in (1, 2):
            assert content(tmp_path / f"pc-{number}" / HOME / path) == content(there)
        await transfer.copy(one, [two, three], path, {})  # all there: nothing to do


async def test_a_target_that_fails_does_not_keep_others_from_being_served(tmp_path: Path) -> None:
    async with nodes(tmp_path, 3) as (one, two, three):
        make_files(tmp_path / "pc-0" / HOME / "runs" / "r", log=5 << 20)
        models = tmp_path / "pc-1" / HOME / "runs" / "r"
        models.write_text("a file in the way")
        with pytest.raises(UserError, match=r"pc-1: .* is not a folder"):
            await transfer.copy(one, [two, three], "runs/r", {})
        assert content(tmp_path / "pc-2" / HOME / "runs" / "r")


async def test_a_node_lost_in_the_middle_leaves_nothing_half_done(tmp_path: Path) -> None:
    async with nodes(tmp_path, 1) as (pc,):
        make_files(tmp_path / "pc-0" / HOME / "runs" / "r", log=64 << 20)
        cut: list[asyncio.Task[int]] = []

        def pull_the_plug(done: int, total: int) -> None:
            if not cut:
                home = tmp_path / "pc-0"
                cut.append(asyncio.create_task(asyncio.to_thread(power_cut, home)))

        with pytest.raises(NodeUnreachable):
            await transfer.fetch(pc, "runs/r", tmp_path / "out" / "r", pull_the_plug)
        assert os.listdir(tmp_path / "out") == []
        await cut[0]


@pytest.mark.parametrize("verb", ["push", "fetch"])
async def test_cancelling_leaves_nothing_half_done_and_can_be_repeated(
    tmp_path: Path, verb: str
) -> None:
    async with nodes(tmp_path, 1) as (pc,):
        begun = asyncio.Event()

        def note(done: int, total: int) -> None:
            begun.set()

        root = tmp_path / "model"
        files = make_files(root, weights=64 << 20)
        there = tmp_path / "pc-0" / HOME / "runs" / "r"
        target = tmp_path / "out" / "r"
        make_files(there, log=64 << 20)
        work = {
            "push": lambda told: transfer.push(pc, "models/m", root, files, told),
            "fetch": lambda told: transfer.fetch(pc, "runs/r", target, told),
        }[verb]
        task = asyncio.create_task(work(note))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if verb == "fetch":
            assert os.listdir(target.parent) == []
        models = tmp_path / "pc-0" / HOME / "models"
        await until(lambda: not [name for name in content(models) if "half" in name], 5)
        await work(None)
        assert content(target if verb == "fetch" else models / "m")


def test_names_that_are_safe_on_every_system() -> None:
    assert is_safe_path("checkpoints/step-1/state.json")
    assert not is_safe_path("a/./b")
    assert not is_safe_path("a\0b")
    assert not is_safe_path("nul?")
