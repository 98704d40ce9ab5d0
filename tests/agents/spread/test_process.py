"""One node's part of a transfer, as whoever holds the other ends of its connections sees it."""

from __future__ import annotations

import io
import json
import os
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import pytest

from agents.contract.chunks import CHUNK_BYTES, ChunkedFile, from_bitmap, hash_chunks
from agents.contract.spread import (
    CHUNK_FRAME,
    OFFER,
    ChunkHeader,
    FetchFrom,
    GiveChunk,
    Message,
    SourceLost,
    SpreadFailed,
    SpreadHello,
    SpreadJob,
    SpreadProgress,
    SpreadReady,
    read_line,
    to_line,
)
from agents.election.channel import Listener, Peer
from agents.node.file_store import FileStore
from agents.rendezvous.credential import make_client_context
from agents.spread.process import spread
from agents.state import Home
from app.nodes.credential import make_credential
from tests.draws import random_bytes

DATA = random_bytes(2 * CHUNK_BYTES + 7)
FILE = hash_chunks(io.BytesIO(DATA))
ADDRESS = "127.0.0.1"
T = TypeVar("T")


class Master:
    """The master's ends of the pipes."""

    def __init__(self, home: Home) -> None:
        read, write = os.pipe()
        self._to_node: BinaryIO = os.fdopen(write, "wb")
        answers, said = os.pipe()
        self.out: BinaryIO = os.fdopen(answers, "rb")
        source, out = os.fdopen(read, "rb"), os.fdopen(said, "wb")
        self._thread = threading.Thread(target=spread, args=(home, source, out), daemon=True)
        self._thread.start()

    def say(self, message: Message, data: bytes = b"") -> None:
        self._to_node.write(to_line(message) + data)
        self._to_node.flush()

    def hear(self, kind: type[T]) -> T:
        """Return the next message of a kind."""
        while True:
            message = read_line(self.out.readline())
            if isinstance(message, kind):
                return message

    def close(self) -> None:
        self._to_node.close()
        self._thread.join(10)
        assert not self._thread.is_alive()


@pytest.fixture
def home(tmp_path: Path) -> Home:
    (tmp_path / "home").mkdir()
    return Home(tmp_path / "home")


@pytest.fixture
def master(home: Home) -> Iterator[Master]:
    made = Master(home)
    made.hear(SpreadHello)
    yield made
    made.close()


def begin(master: Master, **job: Any) -> SpreadReady:
    master.say(SpreadJob(**job))
    return master.hear(SpreadReady)


def test_who_lies_about_a_chunk_is_left_and_nothing_of_it_is_kept(
    home: Home, master: Master
) -> None:
    credential = make_credential()

    def lie(request: dict[str, Any], stream: BinaryIO) -> None:
        stream.write(b"{}\n" + struct.pack("!II", 0, CHUNK_BYTES) + bytes(CHUNK_BYTES))

    liar = Listener(ADDRESS, 0, credential, lie)
    ready = begin(master, files=(FILE,), credential=credential, toward=ADDRESS)
    assert (ready.held, bool(ready.port)) == ("", True)
    master.say(FetchFrom(address=ADDRESS, port=liar.port))
    lost = master.hear(SourceLost)
    assert (lost.port, lost.reason, lost.held) == (liar.port, "chunk 0 arrived damaged", "")
    # It goes on with the next one; whoever asks it meanwhile gets what is verified alone.
    honest = Master(Home(home.path.parent / "other"))
    (home.path.parent / "other" / "models" / "m").mkdir(parents=True)
    (home.path.parent / "other" / "models" / "m" / "w").write_bytes(DATA)
    honest.hear(SpreadHello)
    given = begin(honest, root="models/m", credential=credential, toward=ADDRESS)
    assert given.files == (FILE,)
    master.say(FetchFrom(address=ADDRESS, port=given.port))
    told = master.hear(SpreadProgress)
    with Peer("x", ADDRESS, ready.port, credential).receive("chunks", 5.0, wanted="04") as stream:
        while (frame := stream.read(8)) == bytes(8):
            pass  # it waits for the chunk, too
        assert frame == struct.pack("!II", 2, 7)
        assert stream.read(7) == DATA[-7:]
    while not told.stored:  # the first one may have been the last
        told = master.hear(SpreadProgress)
    found = FileStore(home.path).find(FILE.sha256, FILE.size_bytes)
    assert found is not None
    assert found.read_bytes() == DATA
    honest.close()
    liar.close()


def offer(ready: SpreadReady, credential: str) -> ssl.SSLSocket:
    """Return a connection over which the node takes chunks."""
    plain = socket.create_connection((ready.address, ready.port), 5)
    channel = make_client_context(credential).wrap_socket(plain)
    channel.sendall(json.dumps({"kind": OFFER}).encode() + b"\n")
    assert channel.recv(16) == b"{}\n"
    return channel


def test_what_the_master_brings_to_the_port_is_verified_and_its_end_reported(
    master: Master,
) -> None:
    credential = make_credential()
    ready = begin(master, files=(FILE,), credential=credential, toward=ADDRESS)
    last = CHUNK_FRAME.pack(2, 7) + DATA[-7:]
    for rest, reason in ((bytes(100), "chunk 0 arrived damaged"), (b"", "the other side has")):
        with offer(ready, credential) as channel:
            channel.sendall(last + CHUNK_FRAME.pack(0, CHUNK_BYTES) + bytes(len(rest) and 4 << 20))
            channel.sendall(rest)
        lost = master.hear(SourceLost)
        assert (lost.address, lost.port, lost.had_begun, lost.held) == ("", 0, True, "04")
        assert lost.reason.startswith(reason)
    with offer(ready, credential) as channel:
        for number in range(2):
            piece = DATA[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
            channel.sendall(CHUNK_FRAME.pack(number, CHUNK_BYTES) + piece)
        assert channel.recv(1) == b""  # it lacks nothing more
    while not master.hear(SpreadProgress).stored:
        pass


def test_what_was_cut_off_is_hashed_again_and_the_rest_comes_from_the_master(
    home: Home, master: Master
) -> None:
    partial = FileStore(home.path).partial(FILE.sha256)
    damaged = bytes(5) + DATA[5:CHUNK_BYTES]
    partial.write_bytes(damaged + DATA[CHUNK_BYTES : 2 * CHUNK_BYTES] + b"half")
    ready = begin(master, files=(FILE,))
    assert (from_bitmap(ready.held), ready.port) == ({1}, 0)
    for number, piece in ((0, DATA[:CHUNK_BYTES]), (2, DATA[2 * CHUNK_BYTES :])):
        master.say(ChunkHeader(chunk=number, size_bytes=len(piece)), piece)
    while not (now := master.hear(SpreadProgress)).stored:
        pass
    assert (now.held_bytes, now.received_bytes) == (len(DATA), CHUNK_BYTES + 7)
    master.say(GiveChunk(chunk=2))
    assert master.hear(ChunkHeader).size_bytes == 7
    assert master.out.read(7) == DATA[-7:]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (SpreadJob(files=(FILE, FILE)), "a file is listed twice"),
        (SpreadJob(files=(ChunkedFile(size_bytes=9, sha256=FILE.sha256, chunks=""),)), "number of"),
        (SpreadJob(root="models/../.."), "is not allowed"),
        (SpreadJob(root="environments/x"), "The destination 'environments/x' is not allowed"),
        (SpreadJob(root="models/none"), "There is nothing to send"),
        (GiveChunk(chunk=0), "a transfer must begin with its job"),
    ],
)
def test_a_job_that_cannot_be_done_is_refused_in_words(
    master: Master, message: Message, reason: str
) -> None:
    master.say(message)
    assert reason in master.hear(SpreadFailed).message


def test_a_chunk_that_does_not_exist_ends_the_transfer(master: Master) -> None:
    begin(master, files=(FILE,))
    master.say(ChunkHeader(chunk=3, size_bytes=7), b"outside")
    assert "chunk 3 with 7 bytes is not part" in master.hear(SpreadFailed).message
