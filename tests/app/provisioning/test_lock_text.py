"""What is cut out of a resolver's finding before it becomes a lock."""

from __future__ import annotations

import pytest

from app.provisioning.lock_text import NoWheel, hashes_of, marker_for


def file(name: str, digit: str) -> dict[str, object]:
    return {"url": f"https://index.example/a/{name}", "hashes": {"sha256": digit * 64}}


def test_only_wheels_for_supported_systems_are_locked() -> None:
    package = {
        "name": "x",
        "version": "1",
        "sdist": file("x-1.tar.gz", "0"),
        "wheels": [
            file("x-1-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", "1"),
            file("x-1-cp39-abi3-manylinux_2_28_aarch64.whl", "2"),
            file("x-1-cp314-cp314t-manylinux_2_28_x86_64.whl", "3"),
            file("x-1-cp312-cp312-musllinux_1_2_x86_64.whl", "4"),
            file("x-1-cp312-cp312-macosx_11_0_arm64.whl", "5"),
            file("x-1-cp312-cp312-win_amd64.whl", "6"),
            file("x-1-pp311-pypy311_pp73-manylinux_2_28_x86_64.whl", "7"),
            file("x-1-cp310-cp310-manylinux_2_28_x86_64.whl", "8"),
        ],
    }
    assert hashes_of(package, windows=False) == (["1" * 64, "2" * 64], False)
    assert "6" * 64 in hashes_of(package, windows=True)[0]


def test_a_source_package_is_locked_only_where_there_is_no_wheel() -> None:
    package = {"name": "x", "version": "1", "sdist": file("x-1.tar.gz", "0")}
    assert hashes_of(package, windows=False) == (["0" * 64], True)
    package["wheels"] = [file("x-1-cp312-cp312-macosx_11_0_arm64.whl", "5")]
    with pytest.raises(NoWheel, match="x 1 has no wheel for our systems"):
        hashes_of(package, windows=False)


@pytest.mark.parametrize(
    ("marker", "kept"),
    [
        (None, ""),
        ("sys_platform != 'emscripten'", ""),
        ("platform_machine == 'x86_64' or platform_machine == 'aarch64'", ""),
        ("sys_platform == 'win32'", None),
        ("python_full_version < '3.11'", None),
        ("python_full_version < '3.12'", "python_full_version < '3.12'"),
    ],
)
def test_markers_that_decide_nothing_are_left_out(marker: str | None, kept: str | None) -> None:
    assert marker_for(marker, windows=False) == kept
