"""Wheels that a PC takes, also another one, and markers."""

from __future__ import annotations

import sys

import pytest
from packaging.markers import Marker
from packaging.tags import sys_tags

from agents.contract.environments import WheelTarget, this_target
from agents.shared.packages.wheel_fit import (
    marker_holds,
    rank_wheel,
    read_wheel_name,
    supported_tags,
)

PC = WheelTarget(python="3.12.3", machine="x86_64", glibc="2.35")


def rank(tag: str, target: WheelTarget = PC) -> int | None:
    wheel = read_wheel_name(f"a-1-{tag}.whl")
    assert wheel is not None
    return rank_wheel(wheel[2], target)


def test_this_pc_takes_the_wheels_that_pip_takes() -> None:
    target = this_target(".".join(map(str, sys.version_info[:3])))
    assert target.minor == sys.version_info[1]
    assert target.glibc.startswith("2.")
    assert target.key == f"cp3{target.minor}-glibc{target.glibc}-{target.machine}"
    assert set(supported_tags(target)) == set(sys_tags())


def test_the_most_special_wheel_is_the_best() -> None:
    tags = ("cp312-cp312-manylinux_2_34_x86_64", "cp312-cp312-manylinux_2_17_x86_64")
    tags += ("cp39-abi3-manylinux_2_34_x86_64", "py3-none-manylinux_2_34_x86_64", "py3-none-any")
    ranks = [rank(tag) for tag in tags]
    assert None not in ranks
    assert ranks == sorted(ranks, key=lambda one: one or 0)


@pytest.mark.parametrize(
    "tag",
    [
        "cp312-cp312-manylinux_2_36_x86_64",
        "cp312-cp312-manylinux_2_17_aarch64",
        "cp312-cp312-win_amd64",
        "cp312-cp312-musllinux_1_2_x86_64",
        "cp312-cp312t-manylinux_2_17_x86_64",
        "cp313-abi3-manylinux_2_17_x86_64",
        "cp311-none-any",
        "py2-none-any",
    ],
)
def test_wheels_of_other_pcs_are_not_taken(tag: str) -> None:
    assert rank(tag) is None


def test_windows_takes_its_own_wheels() -> None:
    pc = WheelTarget(python="3.12.3", machine="AMD64", glibc="")
    assert rank("cp312-cp312-win_amd64", pc) == 0
    assert rank("py3-none-any", pc) is not None
    assert rank("cp312-cp312-manylinux_2_17_x86_64", pc) is None
    assert marker_holds("sys_platform == 'win32' and os_name == 'nt'", pc)


@pytest.mark.parametrize("glibc", ["", "2.x", "2.999999999"])
def test_another_c_library_takes_only_wheels_without_one(glibc: str) -> None:
    pc = WheelTarget(python="3.12.3", machine="x86_64", glibc=glibc)
    assert rank("py3-none-any", pc) is not None
    assert rank("py3-none-manylinux1_x86_64", pc) is None


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
