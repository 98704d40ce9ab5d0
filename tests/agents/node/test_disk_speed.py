"""The rate of a disk is that of reads that reach it, and no file is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.node import disk_speed
from agents.node.disk_speed import measure_disk


def test_a_rate_is_plausible_or_unknown_and_no_file_is_left(tmp_path: Path) -> None:
    rate = measure_disk(tmp_path, 64 << 20)

    assert list(tmp_path.iterdir()) == []
    assert rate is None or 1e6 < rate < 20e9


def test_a_disk_that_is_nearly_full_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_speed, "_RESERVE_BYTES", 1 << 60)

    assert measure_disk(tmp_path, 64 << 20) is None


def test_reads_from_memory_are_no_rate_of_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_speed, "_MOST_BYTES_PER_S", 1.0)

    assert measure_disk(tmp_path, 64 << 20) is None


def test_a_folder_that_is_not_there_is_not_measured(tmp_path: Path) -> None:
    assert measure_disk(tmp_path / "gone", 64 << 20) is None
