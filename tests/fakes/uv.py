"""The uv that Rackless locks, for tests: fetched from the package index of this PC."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from agents.contract.environments import this_target
from agents.shared.packages.lock import read_lock_text
from agents.shared.packages.package_index import PackageIndex, read_index_settings
from agents.shared.packages.wheel_store import WheelProblem, WheelSet, fetch, unpack_program

ROOT = Path(__file__).resolve().parents[2]


def fetch_uv(store: Path) -> Path:
    """Return the wheel; skip the test where no index is reached."""
    lock = read_lock_text((ROOT / "resources" / "environments" / "uv.lock").read_text())
    version = ".".join(map(str, sys.version_info[:3]))
    wheels = WheelSet(store=store, lock=lock, target=this_target(version))
    # A test may have set pip up otherwise.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    try:
        fetch(wheels, PackageIndex(read_index_settings(environ, Path.home())), lambda text: None)
    except WheelProblem as problem:
        pytest.skip(f"uv cannot be fetched: {problem}")
    return wheels.present()["uv"]


def unpack_uv(wheel: Path) -> str:
    """Return the path of the program in a wheel."""
    return str(unpack_program(wheel, "uv", wheel.parent.parent / "unpacked"))
