"""What is installed or started is what was checked: packages, their builds, and the agent."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agents.children import Children
from agents.contract.environments import WheelQuery, this_target
from agents.contract.requests.environment import EnvironmentBuild, PackagesBuild
from agents.errors import ExpectedError
from agents.node import environment, packages, wheels
from agents.state import Home
from app.errors import NodeNotReady
from app.nodes.archive import build_archive
from app.nodes.bootstrap import StartedAgent, start_agent
from app.nodes.transport.local import LocalConnection
from tests.fakes.package_site import put_pip
from tests.fakes.packages import flip_a_bit, lock_of, make_sdist, make_wheel, sha256_of
from tests.hostile.planted import plant, ran

ROOT = Path(__file__).resolve().parents[2]
SHA256 = "ab" * 32
TARGET = this_target(".".join(map(str, sys.version_info[:3])))
Attack = Callable[..., None]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    (tmp_path / "home").mkdir()
    return Home(tmp_path / "home")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder in which pip looks for packages, and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def children() -> Iterator[Children]:
    made = Children()
    yield made
    made.end_all()


def put(home: Home, lock_text: str, **versions: str) -> str | None:
    """Have packages put beside the environment of a node; return their folder."""
    job = PackagesBuild(
        python=sys.executable, lock_sha256=SHA256, lock_text=lock_text, requirements=versions
    )
    return packages.build(home, job, Children(), lambda line: None).path


def refusal(home: Home, lock_text: str, **versions: str) -> str:
    """Return why packages are refused; nothing of them may be left."""
    with pytest.raises(ExpectedError) as caught:
        put(home, lock_text, **versions)
    left = [path.name for path in home.environments.glob("packages-*") if path.is_dir()]
    assert left == []
    return f"{caught.value.message} {caught.value.hint}"


# ---------------------------------------------------------------- packages


def test_an_environment_refuses_a_wheel_with_one_wrong_bit_by_name_and_keeps_nothing(
    home: Home, index: Path, children: Children, attack: Attack
) -> None:
    good, bad = make_wheel(index, "aaa_good"), make_wheel(index, "tiny_thing")
    text = lock_of(good, bad)
    expected = sha256_of(bad)
    flip_a_bit(bad)
    query = WheelQuery(lock_text=text, target=TARGET)
    report = wheels.fetch_wheels(home, query, children, lambda line: None)
    said = report.message
    attack(
        given="a wheel with one bit changed in the index of a node",
        tried="set up the training environment from the lock",
        happened=said,
    )
    assert "tiny_thing==1.5" in said
    assert expected in said
    assert sha256_of(bad) in said
    assert report.trouble == "wrong"
    assert report.hint
    assert not report.is_complete
    assert bad.name not in [path.name for path in home.path.rglob("*.whl")]


@pytest.mark.parametrize("tool", ["uv", "pip"])
def test_a_wheel_that_is_changed_on_a_node_is_refused_again_when_it_is_installed(
    home: Home, index: Path, children: Children, tool: str, request, monkeypatch, attack: Attack
) -> None:
    uv = request.getfixturevalue("uv") if tool == "uv" else None
    monkeypatch.setattr(environment, "find_uv", lambda home, children: (uv, "1"))
    text = lock_of(make_wheel(index, "tiny_thing"), put_pip(index))
    query = WheelQuery(lock_text=text, target=TARGET)
    report = wheels.fetch_wheels(home, query, children, lambda line: None)
    kept = home.path / report.path / "tiny_thing-1.5-py3-none-any.whl"
    expected = sha256_of(kept)
    flip_a_bit(kept)
    wrong = sha256_of(kept)
    order = EnvironmentBuild(
        lock_sha256=SHA256,
        lock_text=text,
        requirements={"tiny_thing": "1.5"},
        target=TARGET,
        python=sys.executable,
    )
    with pytest.raises(ExpectedError) as caught:
        environment.build(home, order, children, lambda line: None)
    said = caught.value.message
    attack(
        given=f"a wheel of the store of a node with one bit changed, and {tool}",
        tried="set up the training environment from it",
        happened=said,
    )
    assert "tiny" in said
    assert expected in said
    assert wrong in said
    assert caught.value.hint
    assert not [path for path in home.environments.iterdir() if path.is_dir()]
    assert not kept.exists()
    assert not home.environment_file.exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("UV_NO_VERIFY_HASHES", "1"),
        ("UV_REQUIRE_HASHES", "0"),
        ("UV_FIND_LINKS", "{index}"),
        ("UV_INDEX_URL", "file://{index}"),
        ("UV_OVERRIDE", "{index}/more.txt"),
        ("UV_CONSTRAINT", "{index}/more.txt"),
        ("UV_NO_BINARY", "1"),
        ("UV_CONFIG_FILE", "{index}/uv.toml"),
    ],
)
def test_no_setting_of_a_nodes_uv_loosens_a_lock(
    home: Home, index: Path, children: Children, uv: str, name: str, value: str, monkeypatch, attack
) -> None:
    (index / "more.txt").write_text("stowaway==9\n")
    (index / "uv.toml").write_text("[pip]\nno-deps = false\nverify-hashes = false\n")
    wheel = make_wheel(index, needs=("stowaway",))
    make_wheel(index, "stowaway", "9")
    monkeypatch.setenv(name, value.format(index=index))
    monkeypatch.setattr(environment, "find_uv", lambda home, children: (uv, "1"))
    query = WheelQuery(lock_text=lock_of(wheel), target=TARGET)
    wheels.fetch_wheels(home, query, children, lambda line: None)
    order = EnvironmentBuild(
        lock_sha256=SHA256,
        lock_text=query.lock_text,
        requirements={"tiny_thing": "1.5"},
        target=TARGET,
        python=sys.executable,
    )
    environment.build(home, order, children, lambda line: None)
    happened = sorted(path.name for path in home.environments.rglob("*.dist-info"))
    attack(given=f"{name}={value} on a node", tried="set it up by uv", happened=str(happened))
    assert happened == ["tiny_thing-1.5.dist-info"]


def test_packages_of_an_export_refuse_a_wheel_with_one_wrong_bit_by_name(
    home: Home, index: Path, attack: Attack
) -> None:
    wheel = make_wheel(index)
    text = lock_of(wheel)
    assert put(home, text, tiny_thing="1.5")
    shutil.rmtree(home.environments)
    flip_a_bit(wheel)
    said = refusal(home, text, tiny_thing="1.5")
    attack(given="a wheel with one bit changed", tried="bring an export's packages", happened=said)
    assert "tiny_thing==1.5" in said
    assert sha256_of(wheel) in said


def test_another_file_of_the_locked_version_is_refused(
    home: Home, index: Path, attack: Attack
) -> None:
    wheel = make_wheel(index)
    text = lock_of(wheel)
    wheel.unlink()
    other = make_wheel(index, tag="py3-none-manylinux_2_17_x86_64")
    said = refusal(home, text, tiny_thing="1.5")
    attack(given="another wheel of the version", tried="bring it", happened=said)
    assert "tiny_thing==1.5" in said
    assert sha256_of(other) in said


@pytest.mark.parametrize("claimed", ["the locked", "its own", "no"])
def test_an_index_that_serves_another_file_is_caught_whatever_hash_it_claims(
    home: Home, tmp_path: Path, claimed: str, monkeypatch: pytest.MonkeyPatch, attack: Attack
) -> None:
    site = tmp_path / "site"
    (site / "simple" / "tiny-thing").mkdir(parents=True)
    wheel = make_wheel(site)
    text, locked = lock_of(wheel), sha256_of(wheel)
    flip_a_bit(wheel)
    claim = {"the locked": f"#sha256={locked}", "its own": f"#sha256={sha256_of(wheel)}", "no": ""}
    page = f'<a href="/{wheel.name}{claim[claimed]}">{wheel.name}</a>'
    (site / "simple" / "tiny-thing" / "index.html").write_text(page)
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
        monkeypatch.setenv("PIP_FIND_LINKS", "")
        said = refusal(home, text, tiny_thing="1.5")
        server.shutdown()
    attack(given=f"an index with another file and {claimed} hash", tried="install", happened=said)
    assert "tiny_thing==1.5" in said or "tiny-thing==1.5" in said
    assert sha256_of(wheel) in said


@pytest.mark.parametrize(
    "setting",
    [
        "no-binary = :all:",
        "no-binary = tiny_thing",
        "no-deps = false",
        "require-hashes = false",
        "only-binary = :none:",
        "pre = true",
        "trusted-host = index.example",
        "requirement = {folder}/more.txt",
        "constraint = {folder}/more.txt",
    ],
)
def test_no_setting_of_a_nodes_pip_loosens_a_lock(
    home: Home, index: Path, tmp_path: Path, setting: str, monkeypatch, attack: Attack
) -> None:
    canary = tmp_path / "ran"
    make_sdist(index, setup=f"open({str(canary)!r}, 'w').close()")
    wheel = make_wheel(index, needs=("stowaway",))
    make_wheel(index, "stowaway", "9")
    (tmp_path / "more.txt").write_text("stowaway==9\n")
    config = tmp_path / "pip.conf"
    config.write_text(f"[install]\n{setting.format(folder=tmp_path)}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    try:
        path = put(home, lock_of(wheel), tiny_thing="1.5")
        happened = sorted(entry.name for entry in (home.path / str(path)).glob("*.dist-info"))
        assert happened == ["tiny_thing-1.5.dist-info"]
    except ExpectedError as refused:
        happened = [refused.message]
    attack(given=f"a node's pip.conf with `{setting}`", tried="install", happened=str(happened))
    assert not canary.exists()


@pytest.mark.parametrize(
    "line",
    [
        "tiny_thing==1.5",
        "tiny_thing",
        "tiny_thing>=1 --hash=sha256:{good}",
        "tiny_thing==1.* --hash=sha256:{good}",
        "tiny_thing @ file://{wheel} --hash=sha256:{good}",
        "{wheel}",
        "--editable {index}",
        "--index-url https://index.example/simple",
        "--find-links {index}\ntiny_thing==1.5",
        "--trusted-host index.example",
        "--requirement {index}/more.txt",
        "--only-binary :none:",
        "--no-binary :all:",
        "tiny_thing==1.5 --hash=md5:" + "0" * 32,
        "tiny_thing==1.5 --hash=sha256:{good} --config-settings=a=b",
        "tiny_thing==1.5 --hash=sha256:{good}\ntiny_thing==1.6 --hash=sha256:{good}",
        "tiny_thing==1.5 --hash=sha256:{good} \\",
    ],
)
def test_a_lock_that_leaves_pip_any_choice_installs_nothing(
    home: Home, index: Path, line: str, attack: Attack
) -> None:
    wheel = make_wheel(index)
    make_wheel(index, version="1.6")
    (index / "more.txt").write_text("tiny_thing==1.5\n")
    text = line.format(wheel=wheel, good=sha256_of(wheel), index=index)
    if line.endswith("\\"):  # a continued line at the end of the file is whole all the same
        assert put(home, text, tiny_thing="1.5")
        return
    said = refusal(home, text, tiny_thing="1.5")
    attack(given=f"a lock with the line `{line}`", tried="install from it", happened=said)
    assert "of the lock" in said


def test_a_source_package_runs_nothing_where_only_wheels_are_locked(
    home: Home, index: Path, tmp_path: Path, attack: Attack
) -> None:
    canary = tmp_path / "ran"
    source = make_sdist(index, setup=f"open({str(canary)!r}, 'w').close()")
    said = refusal(home, lock_of(source), tiny_thing="1.5")
    attack(
        given="a source package whose hash is locked, among wheels",
        tried="install it; its setup.py writes a file",
        happened=said,
    )
    assert not canary.exists()
    assert "tiny_thing==1.5" in said
    assert put(home, f"--no-binary tiny_thing\n{lock_of(source)}", tiny_thing="1.5")
    assert canary.exists(), "the setup.py is one that runs where the lock lets it"


def test_what_a_package_asks_for_but_the_lock_does_not_name_is_not_installed(
    home: Home, index: Path, attack: Attack
) -> None:
    wheel = make_wheel(index, needs=("stowaway",))
    make_wheel(index, "stowaway", "9")
    path = put(home, lock_of(wheel), tiny_thing="1.5")
    assert path is not None
    names = sorted(entry.name for entry in (home.path / path).glob("*.dist-info"))
    attack(
        given="a package that asks for one more",
        tried="install from a lock without that one",
        happened=f"installed: {', '.join(names)}",
    )
    assert names == ["tiny_thing-1.5.dist-info"]


@pytest.mark.parametrize(
    "reach",
    [
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}/', timeout=5)",
        "import socket; socket.create_connection(('127.0.0.1', {port}), timeout=5)",
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import socket; "
        'socket.create_connection(("127.0.0.1", {port}), timeout=5)\'], check=True)',
        "import subprocess; subprocess.run(['git', 'clone', 'http://127.0.0.1:{port}/x.git', "
        "'/tmp/never-cloned'], check=True)",
    ],
)
def test_a_build_from_source_reaches_no_network(
    home: Home, index: Path, reach: str, attack: Attack
) -> None:
    if "git" in reach and shutil.which("git") is None:
        pytest.skip("git is not here")
    came: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        thread = threading.Thread(target=answer_one, args=(server, came), daemon=True)
        thread.start()
        source = make_sdist(index, setup=reach.format(port=server.getsockname()[1]))
        said = refusal(home, f"--no-binary tiny_thing\n{lock_of(source)}", tiny_thing="1.5")
        attack(
            given="a locked source package that downloads more while it is built",
            tried=reach[:60],
            happened=f"{said}; connections: {len(came)}",
        )
        assert came == []


def answer_one(server: socket.socket, came: list[str]) -> None:
    with contextlib.suppress(OSError):
        connection, peer = server.accept()
        came.append(str(peer))
        connection.close()


@pytest.mark.parametrize(
    "lock", sorted((ROOT / "resources" / "environments").glob("*.lock")), ids=lambda p: p.stem
)
def test_every_lock_of_a_node_names_a_hash_for_each_package(lock: Path) -> None:
    entries = re.split(r"\n(?=\S)", lock.read_text().replace("\\\n", ""))
    pins = [entry for entry in entries if not entry.startswith(("#", "--no-binary"))]
    assert pins
    bare = [pin for pin in pins if not re.search(r"==\S+ .*--hash=sha256:[0-9a-f]{64}\b", pin)]
    assert bare == []
    assert "://" not in lock.read_text()


@pytest.mark.slow
def test_the_set_up_of_this_pc_refuses_a_wheel_with_one_wrong_bit_by_name(
    tmp_path: Path, index: Path, attack: Attack
) -> None:
    wheel = make_wheel(index)
    text = lock_of(wheel)
    flip_a_bit(wheel)
    project = tmp_path / "project"
    (project / "resources" / "environments").mkdir(parents=True)
    (project / "installers").mkdir()
    shutil.copy(ROOT / "installers" / "setup.sh", project / "installers")
    (project / "pyproject.toml").write_text("[project]\nname = 'rackless'\nversion = '0'\n")
    (project / "installers" / "constraints.txt").write_text(text)  # where older set-ups look
    for name in ("app", "test"):
        (project / "installers" / f"{name}.lock").write_text(text)
    for name in ("train", "torch-cpu", "torch-cu130"):
        (project / "resources" / "environments" / f"{name}.lock").write_text(text)
    # Started from a folder of a stranger, with modules named as those of Python.
    plant(tmp_path / "trap", tmp_path / "canary", "pip", "ensurepip", "setuptools", "subprocess")
    done = subprocess.run(
        ["sh", str(project / "installers" / "setup.sh"), "demo", "--headless"],
        env={
            **os.environ,
            "RACKLESS_VENV": str(tmp_path / "venv"),
            "PYTHONPATH": str(tmp_path / "trap"),
        },
        cwd=tmp_path / "trap",
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran(tmp_path / "canary") == ""
    attack(
        given="a wheel with one bit changed in the package index of this PC",
        tried="sh installers/setup.sh demo",
        happened=done.stderr[done.stderr.find("Set-up stopped") :],
    )
    assert done.returncode == 1
    assert "tiny_thing==1.5 is not the file that is locked" in done.stderr
    assert sha256_of(wheel) in done.stderr
    assert not list((tmp_path / "venv").glob("lib/*/site-packages/tiny_thing*"))


def test_a_lock_without_hashes_begins_no_environment(
    home: Home, index: Path, children: Children, attack: Attack
) -> None:
    make_wheel(index)
    order = EnvironmentBuild(
        lock_sha256=SHA256,
        lock_text="tiny_thing==1.5\n",
        requirements={"tiny_thing": "1.5"},
        target=TARGET,
        python=sys.executable,
    )
    with pytest.raises(ExpectedError, match=r"tiny_thing==1\.5 has no --hash") as caught:
        environment.build(home, order, children, lambda line: None)
    attack(
        given="a lock that gives a version alone",
        tried="set up the training environment from it",
        happened=caught.value.message,
    )
    assert not home.environments.exists()


# ---------------------------------------------------------------- the agent


def start(folder: Path) -> StartedAgent:
    """Start the agent with `folder` as its home, and end it again."""

    async def run() -> StartedAgent:
        connection = LocalConnection({**os.environ, "RACKLESS_AGENT_HOME": str(folder)})
        agent = await start_agent(connection, build_archive(), "this PC")
        await agent.process.close()
        return agent

    return asyncio.run(run())


def test_an_agent_that_was_altered_on_the_node_is_replaced_before_it_runs(
    tmp_path: Path, attack: Attack
) -> None:
    folder = tmp_path / "agent"
    start(folder)
    (stored,) = (folder / "agents").glob("*.zip")
    genuine, canary = stored.read_bytes(), tmp_path / "ran"
    evil = tmp_path / "evil.zip"
    with zipfile.ZipFile(evil, "w") as archive:
        archive.writestr("__main__.py", f"open({str(canary)!r}, 'w').close()")
    shutil.copy(evil, stored)
    start(folder)
    attack(
        given="another program under the name of the agent's archive",
        tried="connect to that node",
        happened="the agent was sent again and started; the other program did not run",
    )
    assert not canary.exists()
    assert stored.read_bytes() == genuine


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722, 0o1777])
@pytest.mark.parametrize("which", [".", "agents"])
def test_an_agents_folder_that_others_can_write_to_is_refused(
    tmp_path: Path, which: str, mode: int, attack: Attack
) -> None:
    folder = tmp_path / "agent"
    start(folder)
    opened = folder / which
    opened.chmod(mode)
    with pytest.raises(NodeNotReady) as caught:
        start(folder)
    said = f"{caught.value.message} {caught.value.hint}"
    attack(
        given=f"the agent's folder on a node with mode {mode:o}",
        tried="connect: another user may replace the agent after its check",
        happened=said,
    )
    assert str(folder) in said
    assert "can be written by other users" in said
    opened.chmod(0o700)
    start(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_an_agents_folder_of_another_user_is_refused(tmp_path: Path, attack: Attack) -> None:
    folder = tmp_path / "agent"
    (folder / "agents").mkdir(parents=True, mode=0o755)
    os.chown(folder, 65534, 65534)
    with pytest.raises(NodeNotReady, match="belongs to another user") as caught:
        start(folder)
    attack(
        given="an agent's folder that another user made first",
        tried="connect to that node",
        happened=caught.value.message,
    )
    assert not list(folder.rglob("*.zip"))


def test_an_agents_folder_that_others_can_swap_is_refused(tmp_path: Path, attack: Attack) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(NodeNotReady, match="other users can replace it") as caught:
        start(shared / "agent")
    attack(
        given="an agent's folder inside one that everybody may write to",
        tried="connect to that node",
        happened=caught.value.message,
    )
    shared.chmod(0o1777)
    start(shared / "agent")


def test_the_agents_folders_are_closed_to_others(tmp_path: Path) -> None:
    folder = tmp_path / "agent"
    before = os.umask(0)
    try:
        start(folder)
        folder.chmod(0o755)
        start(folder)
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "agents")] == [0o700, 0o700]
    assert {path.stat().st_mode & 0o077 for path in (folder / "agents").glob("*.zip")} == {0}
