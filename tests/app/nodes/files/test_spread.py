"""Files spread over nodes: forwarded, verified, resumed by chunk, and routed round what is lost."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agents.contract.chunks import CHUNK_BYTES, ChunkedFile, hash_chunks
from agents.contract.requests.runs import CompareBundle
from agents.contract.run import FileEntry
from agents.contract.spread import ChunkHeader, Message, SpreadJob, SpreadReady
from agents.election.channel import Listener
from app.errors import UserError
from app.events import NodeTransfer
from app.nodes.client import NodeClient
from app.nodes.credential import make_credential
from app.nodes.files import chunk_readers, spread, transfer
from app.nodes.files.chunk_readers import Place
from app.nodes.files.feed import STALL_S, DirectFeed
from app.nodes.files.member import Member
from app.nodes.files.spread import spread_local
from app.nodes.files.spread_state import SpreadReport
from tests.app.nodes.files.test_transfer import HOME, content, make_files
from tests.draws import random_bytes
from tests.fakes.ssh import nodes, until


def make_model(folder: Path, num_chunks: int = 6) -> tuple[list[Place], list[ChunkedFile]]:
    """Write two files with `num_chunks` chunks in all, the last of each cut short."""
    folder.mkdir()
    places, files = [], []
    for name, size in (("a", CHUNK_BYTES + 1), ("b", (num_chunks - 2) * CHUNK_BYTES - 5)):
        (folder / name).write_bytes(random_bytes(size, f"{folder.name}/{name}"))
        places.append(Place(root=folder, path=name))
        with (folder / name).open("rb") as file:
            files.append(hash_chunks(file))
    return places, files


def stored(tmp_path: Path, number: int, file: ChunkedFile) -> bytes:
    folder = tmp_path / f"pc-{number}" / HOME / "store" / "files" / file.sha256[:2]
    return (folder / file.sha256).read_bytes()


def spreads(tmp_path: Path, number: int) -> list[int]:
    """Return the processes of a node that take part in a transfer."""
    found = []
    home = f"RACKLESS_AGENT_HOME={tmp_path}/pc-{number}"
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            environ = (entry / "environ").read_bytes().decode("utf-8", "replace")
            is_here = home in environ or f"HOME={tmp_path}/pc-{number}" in environ
            if entry.name.isdigit() and words[-2:-1] == [b"spread"] and is_here:
                found.append(int(entry.name))
    return found


class Gate:
    """Reader of chunks that stops after `num_free` until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_free: int) -> None:
        self.reached, self.opened, self.given = asyncio.Event(), asyncio.Event(), 0
        read = chunk_readers.LocalChunks.read

        async def gated(chunks: chunk_readers.LocalChunks, number: int) -> bytes:
            if self.given >= num_free:
                self.reached.set()
                await self.opened.wait()
            self.given += 1
            return await read(chunks, number)

        monkeypatch.setattr(chunk_readers.LocalChunks, "read", gated)


@contextlib.asynccontextmanager
async def gated_spread(
    monkeypatch: pytest.MonkeyPatch,
    model: tuple[list[Place], list[ChunkedFile]],
    targets: Sequence[NodeClient],
    num_free: int,
    progress: Callable[[Sequence[NodeTransfer]], None] | None = None,
) -> AsyncIterator[tuple[Gate, asyncio.Task[SpreadReport]]]:
    gate = Gate(monkeypatch, num_free)
    task = asyncio.create_task(spread_local(*model, targets, {}, progress))
    await asyncio.wait_for(gate.reached.wait(), 20)
    try:
        yield gate, task
    finally:
        gate.opened.set()
        monkeypatch.undo()


def ask_without_proof(address: str, port: int) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection((address, port), 2) as plain,
        context.wrap_socket(plain) as channel,
    ):
        channel.sendall(b'{"kind": "chunks", "wanted": "01"}\n')
        if not channel.recv(1):
            raise ConnectionError("closed")


def listener_of(pid: int) -> tuple[str, int]:
    """Return where a process listens."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and words[9] in inodes:
            number, _, port = words[1].partition(":")
            return socket.inet_ntoa(bytes.fromhex(number)[::-1]), int(port, 16)
    raise AssertionError("it does not listen")


def entries_of(places: Sequence[Place], files: Sequence[ChunkedFile]) -> list[FileEntry]:
    return [
        FileEntry(path=place.path, size_bytes=file.size_bytes, sha256=file.sha256)
        for place, file in zip(places, files, strict=True)
    ]


def has_all(tmp_path: Path, number: int, files: Sequence[ChunkedFile]) -> bool:
    with contextlib.suppress(OSError):
        return all(len(stored(tmp_path, number, file)) == file.size_bytes for file in files)
    return False


async def test_what_leaves_this_pc_once_reaches_all_nodes_and_no_stranger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "model")
    told: list[Sequence[NodeTransfer]] = []
    async with nodes(tmp_path, 3) as clients:
        async with gated_spread(monkeypatch, model, clients, 3, told.append) as (gate, task):
            address, port = listener_of(spreads(tmp_path, 0)[0])
            assert address.startswith("127.")
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.to_thread(ask_without_proof, address, port)
            gate.opened.set()
            report = await task
        assert (report.problems, report.notes) == ({}, [])
        size = sum(file.size_bytes for file in model[1])
        assert report.received_bytes == {f"pc-{n}": size for n in range(3)}
        for number in range(3):
            for place, file in zip(*model, strict=True):
                assert stored(tmp_path, number, file) == (place.root / place.path).read_bytes()
        assert {one.held_bytes for one in told[-1]} == {size}
        # Nothing of it outlives the transfer.
        await until(lambda: not any(spreads(tmp_path, n) for n in range(3)), 5)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.to_thread(socket.create_connection, (address, port), 2)
        again = await spread_local(*model, clients, {})
        assert set(again.received_bytes.values()) == {0}


async def test_a_killed_transfer_goes_on_within_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "model")
    size = sum(file.size_bytes for file in model[1])
    held: dict[str, int] = {}

    def note(progress: Sequence[NodeTransfer]) -> None:
        held.update({one.node: one.held_bytes for one in progress})

    async with nodes(tmp_path, 2) as clients:
        async with gated_spread(monkeypatch, model, clients, 4, note) as (_, task):
            await until(lambda: min(held.values(), default=0) > 2 * CHUNK_BYTES)
            for number in range(2):
                for pid in spreads(tmp_path, number):
                    os.kill(pid, signal.SIGKILL)
            assert set((await task).problems) == {"pc-0", "pc-1"}
        report = await spread_local(*model, clients, {})
        assert not report.problems
        for number, (node, received) in enumerate(report.received_bytes.items()):
            assert received + held[node] <= size + CHUNK_BYTES
            for file in model[1]:
                assert hash_chunks(io.BytesIO(stored(tmp_path, number, file))) == file


async def test_a_node_that_is_lost_or_stands_still_is_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "model", 8)
    async with nodes(tmp_path, 4) as clients:
        async with gated_spread(monkeypatch, model, clients, 3) as (gate, task):
            (lost,), (still,) = spreads(tmp_path, 1), spreads(tmp_path, 2)
            os.kill(lost, signal.SIGKILL)
            os.kill(still, signal.SIGSTOP)
            gate.opened.set()
            await until(lambda: has_all(tmp_path, 3, model[1]), 12)
            assert not has_all(tmp_path, 2, model[1])
            os.kill(still, signal.SIGCONT)
            report = await task
        assert set(report.problems) == {"pc-1"}
        assert set(report.seconds) == {"pc-0", "pc-2", "pc-3"}
        assert report.notes == []  # the next ones turned to each other


async def test_nodes_that_cannot_reach_each_other_get_all_from_this_pc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = spread._Spread._begin

    async def begin_behind_a_firewall(
        self: Any, member: Member, members: Mapping[str, Member], job: SpreadJob
    ) -> SpreadReady:
        ready = await begin(self, member, members, job)
        member.port = 9  # nobody listens where a node is sent
        return ready

    monkeypatch.setattr(spread._Spread, "_begin", begin_behind_a_firewall)
    root, other = tmp_path / "model", tmp_path / "other"
    model, later = make_model(root), make_model(other)
    async with nodes(tmp_path, 2) as clients:
        report = await spread_local(*model, clients, {})
        assert not report.problems
        assert len(report.seconds) == 2
        (note,) = report.notes
        assert note.startswith("pc-1 gets the files from this PC, since it could not fetch them")
        # Of a node that has files, this PC reads what it hands on.
        await transfer.push(clients[0], "artifacts/a", other, entries_of(*later))
        (note,) = await transfer.copy(clients[0], clients[1:], "artifacts/a", {})
        assert "from pc-0" in note
        assert content(tmp_path / "pc-1" / HOME / "artifacts" / "a") == content(other)
        # A file that has changed is noticed before a byte of it is stored or named.
        third = make_model(tmp_path / "third")
        (tmp_path / "third" / "a").write_bytes(b"x" * (CHUNK_BYTES + 1))
        report = await spread_local(*third, clients, {})
        assert "arrived damaged" in str(report.problems["pc-0"])
        assert "arrived damaged" in str(report.problems["pc-1"])
        with pytest.raises(UserError, match="a has changed since it was hashed"):
            await transfer.push(clients[0], "models/m", tmp_path / "third", entries_of(*third))
        (tmp_path / "third" / "a").unlink()
        with pytest.raises(UserError, match="a cannot be read"):
            await spread_local(*third, clients, {})


async def test_what_breaks_at_the_port_of_a_node_goes_on_through_ssh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "model")
    size = sum(file.size_bytes for file in model[1])
    at_port: list[int] = []
    through_ssh: list[int] = []
    send, say = DirectFeed.send, Member.say

    async def break_after_three(self: DirectFeed, number: int, data: bytes) -> None:
        await send(self, number, data)
        at_port.append(number)
        if len(at_port) == 3:
            self.close()

    async def note(self: Member, message: Message, data: bytes = b"") -> None:
        if isinstance(message, ChunkHeader):
            through_ssh.append(message.chunk)
        await say(self, message, data)

    monkeypatch.setattr(DirectFeed, "send", break_after_three)
    monkeypatch.setattr(Member, "say", note)
    async with nodes(tmp_path, 1) as clients:
        report = await spread_local(*model, clients, {})
        assert not report.problems
        assert at_port == [0, 1, 2]
        assert through_ssh[-3:] == [3, 4, 5]
        # What was on its way when it broke is sent again, and nothing else.
        assert report.received_bytes["pc-0"] <= size + CHUNK_BYTES
        assert has_all(tmp_path, 0, model[1])


async def test_a_port_that_shows_another_key_gets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the key is left on this PC's disk, either, nor was it there in the clear."""
    written: list[str] = []
    write = Path.write_text

    def spy(path: Path, text: str, **options: Any) -> int:
        written.append(text)
        return write(path, text, **options)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "write_text", spy)
    asked: list[dict[str, Any]] = []
    stranger = Listener("127.0.0.1", 0, make_credential(), lambda request, _: asked.append(request))
    with pytest.raises(ssl.SSLError):
        await DirectFeed.open("127.0.0.1", stranger.port, make_credential())
    stranger.close()
    with pytest.raises(ConnectionRefusedError):
        await DirectFeed.open("127.0.0.1", stranger.port, make_credential())
    assert asked == []
    assert await asyncio.to_thread(os.listdir, tmp_path) == []
    assert all("BEGIN ENCRYPTED PRIVATE KEY" in text for text in written)
    assert len(written) == 2


async def test_a_transfer_that_is_cancelled_leaves_a_node_that_takes_nothing_at_once(
    tmp_path: Path,
) -> None:
    credential = make_credential()
    over = threading.Event()

    def stand_still(request: dict[str, Any], stream: Any) -> None:
        stream.write(b"{}\n")
        stream.flush()
        over.wait(20)

    still = Listener("127.0.0.1", 0, credential, stand_still)
    feed = await DirectFeed.open("127.0.0.1", still.port, credential)
    sending = asyncio.create_task(feed.send(0, bytes(32 << 20)))
    await asyncio.sleep(0.2)  # more than the buffers of the system hold: it waits by now
    sending.cancel()
    began_s = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert time.monotonic() - began_s < STALL_S / 2
    feed.close()
    over.set()
    still.close()


async def test_what_several_nodes_lack_is_shared_and_the_rest_is_pushed(tmp_path: Path) -> None:
    root = tmp_path / "model"
    files = make_files(root, config=10, first=9 << 20, last=5 << 20)
    async with nodes(tmp_path, 2) as clients:
        told: list[Sequence[NodeTransfer]] = []
        wishes = [
            # Two stages of a divided model: the second file is for one node alone.
            transfer.Wish(
                client=client,
                destination="models/m",
                root=root,
                files=files[: 3 if number == 0 else 2],
            )
            for number, client in enumerate(clients)
        ]
        assert await transfer.share(wishes, {}, told.append) == ()
        assert told[-1][0].total_bytes == (9 << 20) + 10
        states = [
            await wish.client.ask(CompareBundle(destination="models/m", files=tuple(wish.files)))
            for wish in wishes
        ]
        assert [state.missing for state in states] == [("last",), ()]
        for wish in wishes:
            assert await transfer.push(wish.client, "models/m", root, wish.files)
        assert content(tmp_path / "pc-1" / HOME / "models" / "m") == {
            entry.path: (root / entry.path).read_bytes() for entry in files[:2]
        }
