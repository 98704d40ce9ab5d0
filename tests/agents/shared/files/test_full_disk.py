"""A disk without inodes is told from one without space, and nothing half-written stays on it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from agents.errors import ExpectedError, explain_os_error
from agents.shared.files.full_disk import (
    advise_room,
    describe_full,
    lacks_inodes,
    name_disk_error,
    removing_half,
)
from agents.state import write_json
from tests.agents.small_disk import fill, small_disk


@pytest.fixture
def no_inodes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.statvfs

    def without(path: str) -> os.statvfs_result:
        values = list(before(path))
        values[5:8] = [1000, 0, 0]  # f_files, f_ffree, f_favail
        values[4] = 1000  # f_bavail
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", without)


def test_no_inodes_are_not_called_a_lack_of_space(tmp_path: Path, no_inodes: None) -> None:
    error = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "new" / "file"))
    told = explain_os_error(error, "writing a file")
    assert told.message == (
        "The disk takes no more files, since its inodes are used up: writing a file."
    )
    for text in (told.hint, advise_room(error)):
        assert text.startswith("Delete files")
        assert "space" not in text
    assert "inodes" in name_disk_error(error)


def test_a_full_disk_is_not_called_a_lack_of_inodes(tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "file"))
    assert not lacks_inodes(tmp_path / "no" / "such" / "folder")
    assert describe_full(tmp_path) == ("The disk is full", "Free some space there")
    assert name_disk_error(error) == "No space left on device"
    assert explain_os_error(error, "writing").message == "The disk is full: writing."


def test_a_half_written_file_is_removed(tmp_path: Path) -> None:
    half = tmp_path / "half"
    with pytest.raises(ZeroDivisionError), removing_half(half) as path:
        print(path.write_text("a part") / 0)
    assert not half.exists()
    with removing_half(half) as path:
        path.write_text("all")
        path.rename(tmp_path / "whole")
    assert [file.name for file in tmp_path.iterdir()] == ["whole"]


def test_a_json_file_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        filler = fill(disk)
        with pytest.raises(ExpectedError, match="The disk is full"):
            write_json(disk / "value.json", {"long": "x" * 100_000})
        assert list(disk.iterdir()) == [filler]
