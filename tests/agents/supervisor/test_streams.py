"""Every byte of a log comes once and in order, and a log that was cut or deleted is said to be."""

from __future__ import annotations

import base64
import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from agents.contract.messages import STREAM_CHUNK_BYTES
from agents.contract.run import StreamChunk
from agents.errors import ExpectedError
from agents.shared.files import logcap
from agents.state import Home, identify, write_json
from agents.supervisor import streams
from agents.supervisor.attempt import AttemptFolder, read_journal
from agents.supervisor.journal import AttemptJournal
from agents.supervisor.streams import follow, list_streams, read_chunk


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptFolder:
    """An attempt that looks alive: this very process is its supervisor."""
    made = AttemptFolder(Home(tmp_path), "run-1", 1)
    made.folder.mkdir(parents=True)
    write_json(made.file("intent.json"), {})
    identity = identify(1) or identify(threading.get_native_id())
    assert identity is not None
    write_json(made.file("started.json"), identity.to_json())
    return made


def small_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HEAD", 64 << 10), ("NEWEST", 128 << 10), ("SLACK", 32 << 10)):
        monkeypatch.setattr(logcap, f"{name}_BYTES", value)


class Follower:
    """Follows on a thread and keeps what came, by stream."""

    def __init__(self, attempt: AttemptFolder, offsets: dict[str, int] | None = None) -> None:
        self.data: dict[str, bytes] = {}
        self.chunks: list[StreamChunk] = []
        self.error: ExpectedError | None = None
        self.ended = threading.Event()
        self._attempt, self._offsets = attempt, offsets or {}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            follow(self._attempt, self._offsets, self._take, self.ended)
        except ExpectedError as error:
            self.error = error

    def _take(self, chunk: StreamChunk) -> None:
        have = self._offsets.get(chunk.stream, 0) + len(self.data.get(chunk.stream, b""))
        assert chunk.offset == have
        data = base64.b64decode(chunk.data_base64)
        assert 0 < len(data) <= STREAM_CHUNK_BYTES
        self.data[chunk.stream] = self.data.get(chunk.stream, b"") + data
        self.chunks.append(chunk)

    def wait(self, stream: str, num_bytes: int) -> None:
        deadline = time.monotonic() + 5
        while len(self.data.get(stream, b"")) < num_bytes:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def join(self) -> None:
        self._thread.join(5)
        assert not self._thread.is_alive()


def end(attempt: AttemptFolder) -> None:
    write_json(attempt.file("exit.json"), {"state": "done"})


def test_what_was_cut_out_of_a_log_is_passed_over_and_counted(
    attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_cap(monkeypatch)
    path = attempt.file("rank-0.log")
    path.write_bytes(bytes([65 + n % 26 for n in range(1 << 20)]))
    assert logcap.cap_log(path)
    offset, kept = 0, {}
    while (chunk := read_chunk(attempt, "rank-0.log", offset, 1 << 16)).data_base64:
        assert chunk.offset - chunk.dropped_bytes == offset
        kept[chunk.offset] = base64.b64decode(chunk.data_base64)
        offset = chunk.offset + len(kept[chunk.offset])
    assert offset == chunk.size_bytes == 1 << 20
    text = b"".join(kept.values())
    assert 0 not in text
    assert b"bytes of this log were dropped here" in text
    assert len(text) < 256 << 10


def test_only_streams_are_listed(attempt: AttemptFolder) -> None:
    attempt.file("rank-0.log").write_bytes(b"12345")
    attempt.file("supervisor.jsonl").write_bytes(b"{}\n")
    attempt.file("rank-0.heartbeat").write_bytes(b"{}")
    attempt.file("rank-1.log").symlink_to("/etc/passwd")
    assert list_streams(attempt) == {"rank-0.log": 5, "supervisor.jsonl": 3}


@pytest.mark.parametrize(
    "stream", ["intent.json", "../x", "rank-0.log/../intent.json", "", "rank-x.log"]
)
def test_nothing_else_can_be_read(attempt: AttemptFolder, stream: str) -> None:
    with pytest.raises(ExpectedError, match="is not a stream"):
        read_chunk(attempt, stream, 0, 100)


def test_symlink_is_not_read(attempt: AttemptFolder) -> None:
    attempt.file("rank-1.log").symlink_to("/etc/passwd")
    with pytest.raises(ExpectedError, match="cannot be read"):
        read_chunk(attempt, "rank-1.log", 0, 100)


def test_chunk_is_bounded_and_tells_the_whole_size(attempt: AttemptFolder) -> None:
    data = bytes(range(256)) * 2000
    attempt.file("rank-0.log").write_bytes(data)
    chunk = read_chunk(attempt, "rank-0.log", 256, 1 << 30)
    assert base64.b64decode(chunk.data_base64) == data[256 : 256 + STREAM_CHUNK_BYTES]
    assert chunk.size_bytes == len(data)
    assert read_chunk(attempt, "rank-0.log", len(data), 10).data_base64 == ""
    with pytest.raises(ExpectedError, match="it was truncated"):
        read_chunk(attempt, "rank-0.log", len(data) + 1, 10)


def test_follow_sends_what_is_there_what_comes_and_new_streams(attempt: AttemptFolder) -> None:
    attempt.file("rank-0.log").write_bytes(b"early ")
    follower = Follower(attempt)
    follower.wait("rank-0.log", 6)
    with open(attempt.file("rank-0.log"), "ab") as file:
        file.write(b"late")
    attempt.file("rank-1.log").write_bytes(b"new")
    follower.wait("rank-0.log", 10)
    follower.wait("rank-1.log", 3)
    end(attempt)
    follower.join()
    assert follower.data == {"rank-0.log": b"early late", "rank-1.log": b"new"}
    assert follower.error is None


def test_follow_goes_on_from_offsets(attempt: AttemptFolder) -> None:
    attempt.file("rank-0.log").write_bytes(b"0123456789")
    end(attempt)
    follower = Follower(attempt, {"rank-0.log": 7})
    follower.join()
    assert follower.data == {"rank-0.log": b"789"}


def test_follow_of_an_ended_attempt_sends_all_and_ends(attempt: AttemptFolder) -> None:
    data = b"x" * (3 * STREAM_CHUNK_BYTES + 17)
    attempt.file("rank-0.log").write_bytes(data)
    end(attempt)
    follower = Follower(attempt)
    follower.join()
    assert follower.data == {"rank-0.log": data}
    assert len(follower.chunks) == 4


def test_follow_keeps_its_pace(attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_BYTES_PER_S", 4 * STREAM_CHUNK_BYTES)
    attempt.file("rank-0.log").write_bytes(b"x" * (3 * STREAM_CHUNK_BYTES))
    end(attempt)
    began_s = time.monotonic()
    Follower(attempt).join()
    assert time.monotonic() - began_s >= 0.45


def test_unfollow_ends_at_once(attempt: AttemptFolder) -> None:
    follower = Follower(attempt)
    follower.ended.set()
    follower.join()
    assert follower.error is None


def test_cut_stream_is_an_error(attempt: AttemptFolder) -> None:
    attempt.file("rank-0.log").write_bytes(b"0123456789")
    follower = Follower(attempt)
    follower.wait("rank-0.log", 10)
    attempt.file("rank-0.log").write_bytes(b"0")
    end(attempt)  # the other streams come first
    follower.join()
    assert follower.error is not None
    assert "has 1 bytes, fewer than the 10 already read" in follower.error.message


def test_vanished_folder_is_an_error(attempt: AttemptFolder) -> None:
    attempt.file("rank-0.log").write_bytes(b"0123456789")
    follower = Follower(attempt)
    follower.wait("rank-0.log", 10)
    shutil.rmtree(attempt.folder)
    follower.join()
    assert follower.error is not None
    assert "The folder of attempt 1 of run run-1 is not there" in follower.error.message


def cut(path: Path, num_bytes: int) -> None:
    """Cut the end of a file, as a PC that loses its power does."""
    os.truncate(path, path.stat().st_size - num_bytes)


def test_a_stream_that_was_cut_holds_up_no_other(attempt: AttemptFolder) -> None:
    """All streams of a node stood still, so that the end of its rank was never told."""
    attempt.file("rank-0.jsonl").write_bytes(b'{"kind":"step"}\n')
    size = attempt.file("rank-0.jsonl").stat().st_size
    cut(attempt.file("rank-0.jsonl"), 5)
    follower = Follower(attempt, {"rank-0.jsonl": size})
    attempt.file("supervisor.jsonl").write_bytes(b'{"kind":"rank_exited"}\n')
    follower.wait("supervisor.jsonl", 23)
    end(attempt)
    follower.join()
    assert follower.data == {"supervisor.jsonl": b'{"kind":"rank_exited"}\n'}
    assert "it was truncated" in str(follower.error)


@pytest.mark.parametrize("num_bytes", [1, 20, 2000])
def test_a_line_after_a_cut_one_arrives_whole(attempt: AttemptFolder, num_bytes: int) -> None:
    path = attempt.file("supervisor.jsonl")
    for _ in range(60):
        AttemptJournal(path).write("rank_started", rank=0)
    mirror = path.read_bytes()
    cut(path, num_bytes)
    AttemptJournal(path).write("rank_exited", rank=0)
    AttemptJournal(path).write("ended", state="failed")
    assert [line["kind"] for line in read_journal(path)][-2:] == ["rank_exited", "ended"]
    follower = Follower(attempt, {"supervisor.jsonl": len(mirror)})
    follower.wait("supervisor.jsonl", path.stat().st_size - len(mirror))
    end(attempt)
    follower.join()
    lines = (mirror + follower.data["supervisor.jsonl"]).split()
    assert [json.loads(line)["kind"] for line in lines if b"rank_started" not in line] == [
        "rank_exited",
        "ended",
    ]
