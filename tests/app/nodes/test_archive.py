"""The archive that is pushed: what is in it, and that it is the same everywhere."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from app.nodes.archive import build_archive


def test_the_same_sources_give_the_same_bytes(monkeypatch) -> None:
    first = build_archive()
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert build_archive() == first
    assert first.sha256 == hashlib.sha256(first.data).hexdigest()


def test_the_archive_holds_the_agent_and_nothing_else() -> None:
    names = zipfile.ZipFile(io.BytesIO(build_archive().data)).namelist()
    known = {"__main__.py", "pynvml.py", "agents/__init__.py", "agents/serve/server.py"}
    assert known | {"packaging/tags.py", "packaging/licenses/__init__.py"} <= set(names)
    assert names == sorted(names)
    assert all(name.endswith(".py") for name in names)
    assert {name.partition("/")[0] for name in names} == {
        "__main__.py",
        "pynvml.py",
        "agents",
        "packaging",
    }


def test_the_archive_runs_with_nothing_but_python(tmp_path: Path) -> None:
    path = tmp_path / "agent.zip"
    path.write_bytes(build_archive().data)
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(path), "no-such-command"],
        capture_output=True,
        text=True,
        check=False,
        env={"RACKLESS_AGENT_HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 2
    assert "usage: serve NONCE" in done.stderr


def test_windows_newlines_make_no_other_archive(monkeypatch) -> None:
    first = build_archive()
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: read(self).replace(b"\n", b"\r\n"))
    assert build_archive() == first
