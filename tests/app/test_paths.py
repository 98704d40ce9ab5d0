"""Files that are replaced while another program has them open."""

import os
import sys
from pathlib import Path

import pytest

from app import paths
from app.paths import replace_text


class BusyFile:
    """Refuses a rename as Windows does while another program has the file open."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self._replace = os.replace

    def __call__(self, source: Path, target: Path) -> None:
        if self.refusals:
            self.refusals -= 1
            raise PermissionError(13, "Access is denied", str(source), 32, str(target))
        self._replace(source, target)


@pytest.mark.parametrize(("platform", "waits"), [("win32", True), ("linux", False)])
def test_a_file_that_is_open_elsewhere_is_replaced_a_moment_later_on_windows(
    platform: str, waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "nodes.json"
    replace_text(file, "old")
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(paths.os, "replace", BusyFile(2))
    if not waits:
        with pytest.raises(PermissionError):
            replace_text(file, "new")
        return
    replace_text(file, "new")
    assert file.read_text() == "new"


def test_a_file_that_stays_open_elsewhere_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(paths, "BUSY_FILE_S", 0.05)
    monkeypatch.setattr(paths.os, "replace", BusyFile(10**6))
    with pytest.raises(PermissionError):
        replace_text(tmp_path / "nodes.json", "new")
