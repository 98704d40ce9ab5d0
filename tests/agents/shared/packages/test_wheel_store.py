"""Sets of wheels: fetched once, continued after a kill, shared between locks, and never wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agents.contract.environments import WheelTarget
from agents.shared.files.python_child import SAFE_FOLDER, python_environ
from agents.shared.packages.lock import read_lock_text
from agents.shared.packages.package_index import IndexSettings, PackageIndex
from agents.shared.packages.wheel_store import HALVES, WheelProblem, WheelSet, fetch
from tests.draws import random_bytes
from tests.fakes.package_site import PackageSite, package_site
from tests.fakes.packages import flip_a_bit, lock_line, lock_of, make_wheel

PC = WheelTarget(python="3.12.3", machine="x86_64", glibc="2.39")
ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def site(tmp_path: Path):
    with package_site(tmp_path / "site") as made:
        yield made


def wheel_set(tmp_path: Path, lock_text: str, target: WheelTarget = PC) -> WheelSet:
    return WheelSet(store=tmp_path / "wheels", lock=read_lock_text(lock_text), target=target)


def index_of(site: PackageSite) -> PackageIndex:
    return PackageIndex(IndexSettings(indexes=(site.url,)))


def test_a_set_is_fetched_once_in_the_files_that_fit(tmp_path: Path, site: PackageSite) -> None:
    best = make_wheel(site.folder, "aaa", tag="cp312-cp312-manylinux_2_28_x86_64")
    other = make_wheel(site.folder, "aaa", tag="cp311-cp311-manylinux_2_28_x86_64")
    pure = make_wheel(site.folder, "tiny_thing")
    make_wheel(site.folder, "tiny_thing", "1.6")
    hashes = [line.split()[1] for line in lock_of(best, other).splitlines()]
    text = f"aaa==1.5 {' '.join(hashes)}\n{lock_of(pure)}"
    text += f"{lock_line('never', '1')[:8]} ; sys_platform == 'win32' {hashes[0]}\n"
    wheels = wheel_set(tmp_path, text)
    assert not wheels.is_complete
    said: list[str] = []
    fetch(wheels, index_of(site), said.append)
    assert wheels.is_complete
    assert wheels.size_bytes == best.stat().st_size + pure.stat().st_size
    assert sorted(site.files) == sorted([best.name, pure.name])
    assert said[-1].startswith("fetching packages: 2 of 2, ")
    fetch(wheels, index_of(site), said.append)
    assert site.num_requests == 4
    # A PC with another Python has another set, and fetches only what differs.
    older = wheel_set(tmp_path, text, replace(PC, python="3.11.2"))
    fetch(older, index_of(site), said.append)
    assert older.folder != wheels.folder
    assert older.is_complete
    assert site.files[2:] == [other.name]
    assert (older.folder / pure.name).samefile(wheels.folder / pure.name)


def test_a_file_of_another_set_is_taken_only_with_the_locked_hash(
    tmp_path: Path, site: PackageSite
) -> None:
    wheel = make_wheel(site.folder)
    first = wheel_set(tmp_path, lock_of(wheel))
    fetch(first, index_of(site), lambda text: None)
    flip_a_bit(first.folder / wheel.name)
    second = wheel_set(tmp_path, lock_of(wheel, make_wheel(site.folder, "aaa")))
    fetch(second, index_of(site), lambda text: None)
    assert site.files.count(wheel.name) == 2
    assert second.find("tiny_thing") == second.folder / wheel.name
    assert first.find("tiny_thing") is None


def test_a_wrong_file_is_named_and_not_kept(tmp_path: Path, site: PackageSite) -> None:
    wheel = make_wheel(site.folder)
    text = lock_of(wheel)
    flip_a_bit(wheel)
    with pytest.raises(WheelProblem, match=r"tiny_thing==1\.5 from http.* got") as caught:
        fetch(wheel_set(tmp_path, text), index_of(site), lambda line: None)
    assert caught.value.kind == "wrong"
    assert not [file for file in (tmp_path / "wheels").rglob("*") if file.is_file()]


@pytest.mark.parametrize(
    ("lock", "kind"), [(lock_line("tiny_thing", "1.6"), "missing"), ("", "unreachable")]
)
def test_why_a_file_cannot_be_had(tmp_path: Path, site: PackageSite, lock: str, kind: str) -> None:
    text = lock or lock_of(make_wheel(site.folder))
    index = index_of(site)
    if not lock:
        site.folder = site.folder / "gone"
        index = PackageIndex(IndexSettings(indexes=("http://127.0.0.1:9/simple",)))
    with pytest.raises(WheelProblem) as caught:
        fetch(wheel_set(tmp_path, text), index, lambda line: None)
    assert caught.value.kind == kind
    assert caught.value.hint


def test_a_download_that_breaks_off_goes_on_where_it_was(tmp_path: Path, site: PackageSite) -> None:
    wheel = big_wheel(site.folder)
    wheels = wheel_set(tmp_path, lock_of(wheel))
    site.break_after = 1 << 20
    with pytest.raises(WheelProblem, match=r"ended early|broke") as caught:
        fetch(wheels, index_of(site), lambda text: None)
    assert caught.value.kind == "unreachable"
    site.break_after = None
    fetch(wheels, index_of(site), lambda text: None)
    assert wheels.is_complete
    assert site.sent_bytes == wheel.stat().st_size
    assert not list((wheels.store / HALVES).iterdir())


def test_a_fetch_that_is_killed_goes_on_where_it_was(tmp_path: Path, site: PackageSite) -> None:
    small, wheel = make_wheel(site.folder), big_wheel(site.folder)
    text = lock_of(small, wheel)
    site.pause_s = 0.02
    code = (
        "import sys; from pathlib import Path;"
        "from tests.agents.shared.packages.test_wheel_store import *;"
        "fetch(wheel_set(Path(sys.argv[1]), sys.argv[2]),"
        "PackageIndex(IndexSettings(indexes=(sys.argv[3],))), print)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), text, site.url],
        env=python_environ(os.environ, str(ROOT)),
        cwd=SAFE_FOLDER,
        stdout=subprocess.DEVNULL,
    )
    while site.sent_bytes < wheel.stat().st_size // 2:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    site.pause_s = 0.0
    (half,) = (tmp_path / "wheels" / HALVES).iterdir()
    there = half.stat().st_size
    assert there > 0
    before = site.sent_bytes
    wheels = wheel_set(tmp_path, text)
    fetch(wheels, index_of(site), lambda line: None)
    assert wheels.is_complete
    assert site.sent_bytes - before <= wheel.stat().st_size - there + (1 << 16)
    assert site.files.count(small.name) == 1


def test_a_fetch_that_is_stopped_keeps_what_it_has(tmp_path: Path, site: PackageSite) -> None:
    wheel = big_wheel(site.folder)
    wheels = wheel_set(tmp_path, lock_of(wheel))

    def has_begun() -> bool:  # what was sent may not have been read yet
        return any(half.stat().st_size for half in (wheels.store / HALVES).glob("*"))

    with pytest.raises(WheelProblem) as caught:
        fetch(wheels, index_of(site), lambda text: None, has_begun)
    assert caught.value.kind == "stopped"
    assert has_begun()


def big_wheel(folder: Path) -> Path:
    """Make a wheel of 4 MB, which pip and uv would not read."""
    wheel = make_wheel(folder, "big_thing")
    wheel.write_bytes(random_bytes(4 << 20))
    return wheel
