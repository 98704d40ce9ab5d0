"""The middle of an endless log goes, its beginning, its end and all offsets stay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agents.shared.files import logcap
from agents.shared.files.logcap import BLOCK_BYTES, cap_log, read_pieces, used_bytes

HEAD, NEWEST, SLACK = 64 << 10, 128 << 10, 32 << 10


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in (("HEAD", HEAD), ("NEWEST", NEWEST), ("SLACK", SLACK)):
        monkeypatch.setattr(logcap, f"{name}_BYTES", value)
    return tmp_path / "rank-0.log"


def lines(count: int, first: int = 0) -> bytes:
    return b"".join(b"line %08d\n" % number for number in range(first, first + count))


def test_a_log_of_the_usual_size_stays_whole(log: Path) -> None:
    data = lines((HEAD + NEWEST) // 14)
    log.write_bytes(data)
    assert not cap_log(log)
    assert log.read_bytes() == data


def test_beginning_and_newest_part_stay_and_the_gap_is_told(log: Path) -> None:
    data = lines(100_000)
    log.write_bytes(data)
    assert cap_log(log)
    kept = log.read_bytes()
    assert len(kept) == len(data)
    assert kept[:HEAD] == data[:HEAD]
    assert kept[-NEWEST:] == data[-NEWEST:]
    notice = kept[HEAD : HEAD + BLOCK_BYTES]
    assert b"[rackless] 1,2" in notice
    assert notice.endswith(b"\n")
    assert used_bytes(log.stat()) <= HEAD + NEWEST + SLACK
    assert not cap_log(log), "nothing more to cut"


def test_a_writer_goes_on_and_the_log_is_cut_again(log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        whole = b""
        for turn in range(30):
            news = lines(5_000, turn * 5_000)
            os.write(file, news)
            whole += news
            cap_log(log)
    finally:
        os.close(file)
    kept = log.read_bytes()
    assert len(kept) == len(whole)
    assert kept.startswith(whole[:HEAD])
    assert kept.endswith(whole[-NEWEST:])
    assert used_bytes(log.stat()) <= HEAD + NEWEST + SLACK + len(news)


def test_pieces_are_what_is_kept_with_its_offsets(log: Path) -> None:
    data = lines(100_000)
    log.write_bytes(data)
    cap_log(log)
    pieces = list(read_pieces(log))
    assert pieces[0][0] == 0
    for offset, piece in pieces:
        assert log.read_bytes()[offset : offset + len(piece)] == piece
    text = b"".join(piece for _, piece in pieces)
    assert b"\0" not in text
    assert text.count(b"were dropped here") == 1
    log.write_bytes(b"")
    assert list(read_pieces(log)) == []


def test_a_file_system_without_holes_is_told(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log.write_bytes(lines(100_000))
    monkeypatch.setattr(logcap.sys, "platform", "win32")
    with pytest.raises(OSError, match="no holes"):
        cap_log(log)
    assert log.read_bytes() == lines(100_000)
