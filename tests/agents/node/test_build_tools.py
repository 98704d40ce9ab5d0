"""A Python and a uv to build with: found, unpacked, brought, or said to be missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.children import Children
from agents.contract.environments import WheelQuery
from agents.errors import ExpectedError
from agents.node import build_tools
from agents.node.build_tools import bring_python, find_tools, unpack_uv
from agents.node.wheels import wheel_set
from agents.shared.packages.wheel_store import STORE, WheelSet
from agents.state import Home
from tests.fakes.packages import flip_a_bit, lock_of, make_wheel


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """Return a home on a PC that has no uv; its user's own folder is beside it."""
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "home").mkdir()
    return Home(tmp_path / "home")


@pytest.fixture
def children() -> Iterator[Children]:
    made = Children()
    yield made
    made.end_all()


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_uv_counts_only_where_it_is_new_enough(
    home: Home, children: Children, tmp_path: Path
) -> None:
    assert find_tools(home, children).uv is None
    script(tmp_path / "bin" / "uv", "echo uv 0.4.30")
    assert find_tools(home, children).uv is None
    own = script(tmp_path / "user" / ".local" / "bin" / "uv", "echo 'uv 0.11.2 (abc 2026-01-01)'")
    tools = find_tools(home, children)
    assert (tools.uv, tools.uv_version) == (str(own), "0.11.2")
    assert tools.python == sys.executable
    brought = script(home.path / "tools" / "uv-1" / "uv", "echo uv 0.13.9")
    assert find_tools(home, children).uv == str(brought)


def test_uv_is_unpacked_from_the_locked_wheel_alone(
    home: Home, children: Children, uv_wheel: Path
) -> None:
    target = find_tools(home, children).target
    query = WheelQuery(lock_text=lock_of(uv_wheel), target=target)
    with pytest.raises(ExpectedError, match="not on this node"):
        unpack_uv(home, query, children)
    folder = wheel_set(home, query).folder
    folder.mkdir(parents=True)
    (folder / uv_wheel.name).write_bytes(uv_wheel.read_bytes())
    tools = unpack_uv(home, query, children)
    assert tools.uv_version == uv_wheel.name.split("-")[1]
    other = make_wheel(home.path, "uv")
    query = WheelQuery(lock_text=lock_of(other), target=target)
    changed = WheelSet(
        store=home.path / STORE, lock=wheel_set(home, query).lock, target=target
    ).folder
    changed.mkdir()
    flip_a_bit(other)
    other.rename(changed / other.name)
    with pytest.raises(ExpectedError, match="not the locked one"):
        unpack_uv(home, query, children)


def test_another_python_is_used_or_brought_where_the_agents_own_is_too_old(
    home: Home, children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_tools, "SUPPORTED_PYTHONS", ((3, 60), (3, 61)))
    monkeypatch.setattr(build_tools, "BROUGHT_PYTHON", "3.61")
    assert find_tools(home, children).python is None
    with pytest.raises(ExpectedError, match="there is no uv here that could bring one"):
        bring_python(home, children, lambda line: None)
    version = "--version) echo uv 0.13.9;;"
    refusing = f"case $1 in {version} *) echo error: no route to host; exit 2;; esac"
    script(tmp_path / "bin" / "uv", refusing)
    with pytest.raises(ExpectedError, match="could not download one: error: no route") as caught:
        bring_python(home, children, lambda line: None)
    assert "apt-get install" in caught.value.hint
    python = f"{home.path}/pythons/cpython-3.61/bin/python3.61"
    bringing = (
        f"case $1 in {version} *) /bin/mkdir -p {Path(python).parent};"
        f"printf '#!/bin/sh\\necho RACKLESS cpython 3 61 2\\n' > {python};"
        f"/bin/chmod +x {python};; esac"
    )
    script(tmp_path / "bin" / "uv", bringing)
    tools = bring_python(home, children, lambda line: None)
    assert tools.python == python
    assert tools.target.python == "3.61.2"
    installed = script(tmp_path / "bin" / "python3.60", "echo RACKLESS cpython 3 60 1")
    assert find_tools(home, children).python == str(installed)
    script(installed, "echo RACKLESS pypy 3 60 1")
    assert find_tools(home, children).python == python
