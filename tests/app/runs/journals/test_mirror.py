"""Mirrors only grow, byte for byte, whoever writes and whenever one of them is killed."""

from __future__ import annotations

import asyncio
import hashlib
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agents.contract.requests.streams import ReadStream
from agents.shared.files import logcap
from app.errors import AgentBug, UserError
from app.runs.journals.logs import LogFile
from app.runs.journals.mirror import Mirror, MirrorGap
from app.runs.journals.streams import follow_part, store_chunk, sync_part
from tests.draws import seed
from tests.fakes.cluster import FakeNode

SOURCE = random.Random(seed(7)).randbytes(300_000)
WRITER = """
import random, sys
from pathlib import Path
from app.runs.journals.mirror import Mirror
folder, source, seed = Path(sys.argv[1]), Path(sys.argv[2]).read_bytes(), int(sys.argv[3])
mirror, dice = Mirror(folder), random.Random(seed)
while (size := mirror.sizes().get("rank-0.log", 0)) < len(source):
    start = max(0, size - dice.randrange(3000))
    mirror.append("rank-0.log", start, source[start : start + dice.randrange(1, 6000)])
"""


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    return Mirror(tmp_path / "mirror")


def test_append_writes_only_what_is_new(mirror: Mirror) -> None:
    assert mirror.sizes() == {}
    assert mirror.append("rank-0.log", 0, b"hello") == 5
    assert mirror.append("rank-0.log", 2, b"llo world") == 6
    assert mirror.append("rank-0.log", 0, b"hello") == 0
    assert (mirror.folder / "rank-0.log").read_bytes() == b"hello world"
    assert mirror.sizes() == {"rank-0.log": 11}


def test_gap_is_refused_and_tells_where_to_go_on(mirror: Mirror) -> None:
    mirror.append("rank-0.log", 0, b"abc")
    with pytest.raises(MirrorGap) as gap:
        mirror.append("rank-0.log", 4, b"e")
    assert gap.value.size == 3
    assert mirror.sizes() == {"rank-0.log": 3}


@pytest.mark.parametrize("name", ["../x", "a/b", ".lock", "", "x" * 200, "a\0b", "a\nb"])
def test_stream_names_cannot_leave_the_folder(mirror: Mirror, name: str) -> None:
    with pytest.raises(UserError, match="not allowed"):
        mirror.append(name, 0, b"x")


def test_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        Mirror(tmp_path / "file" / "alpha").append("rank-0.log", 0, b"x")


def test_two_processes_mirror_one_stream_without_doubling_a_byte(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(SOURCE)
    arguments = [sys.executable, "-c", WRITER, str(tmp_path / "mirror"), str(source)]
    writers = [subprocess.Popen([*arguments, str(number)]) for number in (1, 2)]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    assert digest(tmp_path / "mirror" / "rank-0.log") == hashlib.sha256(SOURCE).hexdigest()


def test_killed_writers_never_harm_the_mirror(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(SOURCE * 8)
    arguments = [sys.executable, "-c", WRITER, str(tmp_path / "mirror"), str(source)]
    for number in range(6):
        writer = subprocess.Popen([*arguments, str(number)])
        time.sleep(0.08 + 0.02 * number)
        writer.kill()
        writer.wait()
    subprocess.run([*arguments, "99"], check=True, timeout=60)
    assert digest(tmp_path / "mirror" / "rank-0.log") == hashlib.sha256(SOURCE * 8).hexdigest()


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_sync_fetches_what_is_missing(mirror: Mirror) -> None:
    node = FakeNode("alpha")
    node.write("r", 1, "rank-0.log", SOURCE)
    node.write("r", 1, "rank-0.jsonl", b"{}\n")
    mirror.append("rank-0.log", 0, SOURCE[:1000])
    asyncio.run(sync_part(node, mirror, "r", 1))
    assert (mirror.folder / "rank-0.log").read_bytes() == SOURCE
    assert mirror.sizes() == {"rank-0.log": len(SOURCE), "rank-0.jsonl": 3}


def test_what_a_node_dropped_is_a_hole_here_and_offsets_stay(mirror: Mirror) -> None:
    mirror.append("rank-0.log", 0, b"head")
    with pytest.raises(MirrorGap):
        mirror.append("rank-0.log", 1 << 20, b"newest", dropped_bytes=(1 << 20) - 5)
    assert mirror.append("rank-0.log", 1 << 20, b"newest", dropped_bytes=(1 << 20) - 4) == 6
    assert mirror.append("rank-0.log", 1 << 20, b"newest!") == 1
    data = (mirror.folder / "rank-0.log").read_bytes()
    assert data == b"head" + bytes((1 << 20) - 4) + b"newest!"


def test_an_endless_log_does_not_fill_this_disk_either(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("HEAD", 64 << 10), ("NEWEST", 128 << 10), ("SLACK", 32 << 10)):
        monkeypatch.setattr(logcap, f"{name}_BYTES", value)
    for number in range(40):
        mirror.append("rank-0.log", number * 50_000, bytes([65 + number]) * 50_000)
        mirror.append("rank-0.jsonl", number * 50_000, bytes(50_000))
    path = mirror.folder / "rank-0.log"
    assert path.stat().st_size == mirror.sizes()["rank-0.jsonl"] == 2_000_000
    assert logcap.used_bytes(path.stat()) <= 256 << 10
    file = LogFile(rank=0, node="alpha", attempt=1, path=path)
    kept = b"".join(piece for _, piece in file.pieces())
    assert kept.startswith(b"A" * 50_000)
    assert kept.endswith(bytes([65 + 39]) * 50_000)
    assert len(kept) < 256 << 10


def test_follow_goes_on_after_another_process_has_appended(mirror: Mirror) -> None:
    node = FakeNode("alpha")
    seen: list[tuple[str, int, bytes]] = []

    async def scenario() -> None:
        task = asyncio.create_task(
            follow_part(node, mirror, "r", 1, lambda *news: seen.append(news))
        )
        for number in range(40):
            node.write("r", 1, "rank-0.log", b"%06d\n" % number)
            if number % 7 == 3:
                data = node.streams["r", 1]["rank-0.log"]
                mirror.append(
                    "rank-0.log",
                    mirror.sizes().get("rank-0.log", 0),
                    data[mirror.sizes().get("rank-0.log", 0) :],
                )
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.3)
        task.cancel()

    asyncio.run(scenario())
    expected = b"".join(b"%06d\n" % number for number in range(40))
    assert (mirror.folder / "rank-0.log").read_bytes() == expected
    for stream, offset, data in seen:
        assert stream == "rank-0.log"
        assert expected[offset : offset + len(data)] == data


def test_chunk_that_is_no_base64_is_a_bug_of_the_agent(mirror: Mirror) -> None:
    node = FakeNode("alpha")
    node.write("r", 1, "rank-0.log", b"x")
    request = ReadStream(run_id="r", attempt=1, stream="rank-0.log", max_bytes=10)
    chunk = asyncio.run(node.ask(request))
    object.__setattr__(chunk, "data_base64", "*")
    with pytest.raises(AgentBug):
        store_chunk(mirror, chunk)
