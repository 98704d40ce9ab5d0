"""The streams of the command line where there are none."""

import sys

import pytest

from app.cli.main import run


def test_a_program_without_streams_runs_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pythonw.exe starts it: a note of the watch service must not end that service."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert run(["nodes", "list"]) == 0
    assert run(["nodes", "show", "nobody"]) == 1  # its error has nowhere to go
