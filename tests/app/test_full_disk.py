"""What the master writes to a full disk leaves no half-written file there."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agents.contract.run import FileEntry
from app.doctor.part import ReportPart
from app.doctor.report import save_report
from app.errors import UserError
from app.nodes.files.local_files import FileWriter
from app.nodes.transport.loopback import load_host_key
from app.paths import replace_text
from app.settings import Settings
from tests.agents.small_disk import fill, small_disk
from tests.draws import random_bytes

LONG = "x" * 100_000


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        (disk / "settings.json").write_text("{}")
        fill(disk)
        yield disk


def write_text(disk: Path) -> None:
    replace_text(disk / "text.json", LONG)


def set_setting(disk: Path) -> None:
    settings = Settings(disk / "settings.json")
    for number in range(1000):  # until they need a block that the disk does not have
        settings.set_of_node(f"node-{number:0100}", "when_hot", "wait")


def receive(disk: Path) -> None:
    data = LONG.encode()
    entry = FileEntry(path="part", size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    async def write() -> None:
        async with FileWriter(disk, entry, "alpha") as file:
            await file.write(data)

    asyncio.run(write())


def write_report(disk: Path) -> None:
    # Random, since a zip would pack it into less than a block.
    parts = [ReportPart(name="log.txt", what="a log", text=random_bytes(100_000).hex())]
    save_report(parts, disk / "report.zip")


def make_host_key(disk: Path) -> None:
    load_host_key(disk / "host_key")


@pytest.mark.parametrize("write", [write_text, set_setting, receive, write_report, make_host_key])
def test_nothing_half_written_stays(full: Path, write: Callable[[Path], None]) -> None:
    before = sorted(full.iterdir())
    with pytest.raises((OSError, UserError)):
        write(full)
    assert sorted(full.iterdir()) == before
