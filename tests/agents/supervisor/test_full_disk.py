"""A full disk is told once, and that it has room again."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from agents.supervisor.full_disk import FULL_BYTES, FULL_FILES, INTERVAL_S, FullDiskWatch

MANY = 1 << 20


@pytest.mark.parametrize(
    ("files", "states", "expected"),
    [
        (MANY, [(9 * FULL_BYTES, MANY), (0, MANY), (0, MANY)], [None, "bytes", None]),
        (MANY, [(FULL_BYTES - 1, MANY), (FULL_BYTES + 1, MANY)], ["bytes", None]),
        (MANY, [(0, MANY), (2 * FULL_BYTES, MANY), (0, 0)], ["bytes", "", "bytes"]),
        (MANY, [(9 * FULL_BYTES, FULL_FILES - 1), (9 * FULL_BYTES, MANY)], ["files", ""]),
        (0, [(9 * FULL_BYTES, 0)], [None]),
    ],
)
def test_changes_are_told_once(tmp_path, monkeypatch, files, states, expected):
    state = [0, 0]

    def read(folder):
        return SimpleNamespace(
            f_bavail=state[0] // 512, f_frsize=512, f_files=files, f_favail=state[1]
        )

    monkeypatch.setattr(os, "statvfs", read)
    watch, found = FullDiskWatch(tmp_path), []
    for number, state[:] in enumerate(states):
        found.append(watch.look(number * INTERVAL_S))
    # In whole blocks, one byte less than the limit is a block less.
    assert found == expected
    assert watch.look((len(states) - 1) * INTERVAL_S + 0.1) is None


def test_a_folder_that_is_gone_is_no_full_disk(tmp_path):
    assert FullDiskWatch(tmp_path / "none").look(0.0) is None
    assert FullDiskWatch(tmp_path).look(0.0) is None
