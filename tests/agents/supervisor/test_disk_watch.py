"""A full disk is told once, and that it has room again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from agents.supervisor.disk_watch import FULL_BYTES, FULL_FILES, INTERVAL_S, DiskWatch

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
def test_changes_are_told_once(tmp_path, files, states, expected):
    coming = iter(states)

    def read(folder):
        free_bytes, free_files = next(coming)
        return SimpleNamespace(
            f_bavail=free_bytes // 512, f_frsize=512, f_files=files, f_favail=free_files
        )

    watch = DiskWatch(tmp_path, read)
    found = [watch.look(number * INTERVAL_S) for number in range(len(states))]
    # In whole blocks, one byte less than the limit is a block less.
    assert found == expected
    assert watch.look((len(states) - 1) * INTERVAL_S + 0.1) is None


def test_a_folder_that_is_gone_is_no_full_disk(tmp_path):
    assert DiskWatch(tmp_path / "none").look(0.0) is None
    assert DiskWatch(tmp_path).look(0.0) is None
