"""Wheels that a PC takes, compared with what `packaging` says, and markers."""

from __future__ import annotations

import itertools
import sys

import pytest
from packaging.markers import Marker
from packaging.tags import compatible_tags, cpython_tags, parse_tag

from agents.contract.wheel_tags import (
    WheelTarget,
    marker_holds,
    rank_wheel,
    read_wheel_name,
    this_target,
)

PC = WheelTarget(python="3.12.3", machine="x86_64", glibc="2.35")


def test_the_same_wheels_are_taken_as_pip_takes() -> None:
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(35, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    platforms += ["linux_x86_64"]
    taken = {*cpython_tags((3, 12), ["cp312"], platforms)}
    taken |= {*compatible_tags((3, 12), "cp312", platforms)}
    pythons = ("cp312", "cp311", "cp313", "cp39", "py3", "py2", "py312", "py311", "py2.py3")
    abis = ("cp312", "cp311", "abi3", "none", "cp312t")
    places = ("any", "manylinux_2_17_x86_64.manylinux2014_x86_64", "manylinux_2_36_x86_64")
    places += ("manylinux_2_17_aarch64", "win_amd64", "macosx_11_0_arm64", "musllinux_1_2_x86_64")
    num_taken = 0
    for python, abi, place in itertools.product(pythons, abis, places):
        wheel = read_wheel_name(f"thing-1.0-{python}-{abi}-{place}.whl")
        assert wheel is not None
        expected = bool(parse_tag(f"{python}-{abi}-{place}") & taken)
        assert (rank_wheel(wheel, PC) is not None) is expected, wheel
        num_taken += expected
    assert num_taken >= 14


def test_the_most_special_wheel_is_the_best() -> None:
    tags = ("cp312-cp312-manylinux_2_34_x86_64", "cp312-cp312-manylinux_2_17_x86_64")
    tags += ("cp39-abi3-manylinux_2_34_x86_64", "py3-none-manylinux_2_34_x86_64", "py3-none-any")
    wheels = [read_wheel_name(f"a-1-{tag}.whl") for tag in tags]
    ranks = [rank_wheel(wheel, PC) for wheel in wheels if wheel]
    assert None not in ranks
    assert ranks == sorted(ranks, key=lambda rank: rank or ())


def test_another_c_library_takes_only_wheels_without_one() -> None:
    pc = WheelTarget(python="3.12.3", machine="x86_64", glibc="")
    pure, bound = (
        read_wheel_name(f"a-1-py3-none-{place}.whl") for place in ("any", "manylinux1_x86_64")
    )
    assert pure is not None
    assert bound is not None
    assert rank_wheel(pure, pc) is not None
    assert rank_wheel(bound, pc) is None


@pytest.mark.parametrize("name", ["a-1.tar.gz", "a-1-py3-none.whl", "a.whl", "a-1-2-3-b-c-d.whl"])
def test_what_is_no_wheel_is_none(name: str) -> None:
    assert read_wheel_name(name) is None


@pytest.mark.parametrize(
    "marker",
    [
        "python_version < '3.13'",
        "python_version >= '3.9' and python_version < '3.12'",
        "python_full_version == '3.12.3' or sys_platform == 'win32'",
        "platform_machine == 'x86_64' and (os_name == 'nt' or platform_system == 'Linux')",
        "platform_machine != 'aarch64' and implementation_name == 'cpython'",
        "'linux' in sys_platform",
        "sys_platform not in 'linux'",
    ],
)
def test_markers_hold_where_pip_says_so(marker: str) -> None:
    variables = {
        "python_version": "3.12",
        "python_full_version": "3.12.3",
        "implementation_name": "cpython",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "os_name": "posix",
    }
    assert marker_holds(marker, PC) is Marker(marker).evaluate(variables)


@pytest.mark.parametrize("marker", ["python_version", "extra == 'x'", "1 < 2", "__import__('os')"])
def test_what_is_no_marker_of_a_lock_is_refused(marker: str) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        marker_holds(marker, PC)


def test_this_pc_takes_wheels_of_its_own_python() -> None:
    target = this_target(".".join(map(str, sys.version_info[:3])))
    assert target.minor == sys.version_info[1]
    assert target.glibc.startswith("2.")
    assert target.key == f"cp3{target.minor}-glibc{target.glibc}-{target.machine}"
