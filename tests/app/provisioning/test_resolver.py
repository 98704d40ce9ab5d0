"""What a build of torch needs: found on an index, in one version each, with where it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from agents.shared.packages.package_index import IndexSettings
from app.provisioning.lock_text import marker_for
from app.provisioning.resolver import Unreachable, Unresolvable, resolve_build
from tests.fakes.package_site import PackageSite, package_site
from tests.fakes.packages import make_wheel, sha256_of
from tests.fakes.torch_index import BUILD, put_torch

GIVEN = {"sympy": "1.14.0"}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[PackageSite]:
    with package_site(tmp_path / "site") as made:
        yield made


Resolve = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture
def resolve(site: PackageSite, uv: str) -> Resolve:
    def work(*first: str, **given: str) -> dict[str, dict[str, Any]]:
        settings = IndexSettings(indexes=(*first, site.url))
        return resolved(uv, settings, GIVEN | given)

    return work


def resolved(uv: str, settings: IndexSettings, given: dict[str, str]) -> dict[str, dict[str, Any]]:
    preferred = {"cuda-pathfinder": "1.9.0", "cuda-bindings": "13.5.0"}
    found = resolve_build(uv, f"torch=={BUILD}", settings, given, preferred, lambda: False)
    return {one["name"]: one for one in found}


@pytest.mark.parametrize("with_metadata", [False, True])
def test_all_needs_are_found_in_the_newest_version_that_every_limit_allows(
    site: PackageSite, resolve: Resolve, with_metadata: bool
) -> None:
    put_torch(site.folder)
    site.with_metadata = with_metadata
    site.yanked = {"cuda_bindings-12.9.9-py3-none-any.whl"}
    now = datetime.now(UTC)
    # Younger than a week, but torch names this very version.
    site.uploaded["nvidia_nccl_cu12-2.29.3-py3-none-manylinux_2_18_x86_64.whl"] = now.isoformat()
    for version, days in (("12.9.8", 6), ("12.9.7", 8)):
        wheel = make_wheel(site.folder, "cuda_bindings", version, needs=("cuda-pathfinder~=1.1",))
        site.uploaded[wheel.name] = (now - timedelta(days=days)).isoformat()
    found = resolve()
    assert {name: one["version"] for name, one in found.items()} == {
        "torch": BUILD,
        "cuda-bindings": "12.9.7",  # the newest below 13 that is neither yanked nor of this week
        "cuda-pathfinder": "1.9.0",  # as in the lock for current drivers
        "cuda-toolkit": "12.6.3",
        "nvidia-cublas-cu12": "12.6.4.1",
        "nvidia-nccl-cu12": "2.29.3",
        "tomli-later": "2.0",
    }
    hashes = [one["hashes"]["sha256"] for one in found["torch"]["wheels"]]
    assert sorted(hashes) == sorted(map(sha256_of, site.folder.glob("torch-*")))
    assert len(found["nvidia-cublas-cu12"]["wheels"]) == 2  # none for Windows
    # No wheel is read where its metadata lies beside it.
    assert bool(site.files) is not with_metadata


def test_a_marker_says_where_a_package_is_needed(site: PackageSite, resolve: Resolve) -> None:
    put_torch(site.folder, ("x86_64", "aarch64"))
    found = resolve()
    markers = {name: marker_for(one.get("marker"), windows=False) for name, one in found.items()}
    only_there = "platform_machine == 'x86_64' and sys_platform == 'linux'"
    assert markers.pop("nvidia-nccl-cu12") == only_there
    assert markers.pop("tomli-later") == "python_full_version < '3.12'"
    assert set(markers.values()) == {""}
    assert len(site.pages) == len(set(site.pages)) == 8, "each page is asked for once"
    # Pythons and machines that the build has no file for do not count.
    for file in {*site.folder.glob("torch-*aarch64*"), *site.folder.glob("torch-*cp314*")}:
        file.unlink()
    assert len(resolve()["torch"]["wheels"]) == 3


def test_what_cannot_be_is_named_with_who_needs_it(site: PackageSite, resolve: Resolve) -> None:
    with pytest.raises(Unresolvable, match=r"torch was not found .* torch==2\.13\.0\+cu126"):
        resolve()
    put_torch(site.folder)
    with pytest.raises(Unresolvable, match=r"torch depend on sympy>=1\.13\.3 and sympy==1\.12"):
        resolve(sympy="1.12")
    for file in site.folder.glob("cuda_bindings-12*"):
        file.unlink()
    says = r"all versions of torch depend on cuda-bindings.*12\.9\.4"
    with pytest.raises(Unresolvable, match=says):
        resolve()


def test_a_later_limit_changes_an_earlier_choice(
    site: PackageSite, resolve: Resolve, tmp_path: Path
) -> None:
    tag = "cp312-cp312-manylinux_2_28_x86_64"
    needs = ("alpha", "omega", "cuda-pathfinder")
    make_wheel(site.folder, "torch", BUILD, tag=tag, needs=needs)
    for version in ("1.0", "2.0"):
        make_wheel(site.folder, "alpha", version, needs=(f"omega=={version}",))
        make_wheel(site.folder, "omega", version)
    make_wheel(site.folder, "cuda_pathfinder", "1.9.5", needs=("omega<2",))
    assert resolve()["omega"]["version"] == "1.0"


def test_the_first_index_that_has_a_version_is_taken_and_one_that_is_silent_ends_it(
    site: PackageSite, resolve: Resolve, tmp_path: Path
) -> None:
    put_torch(site.folder)
    with package_site(tmp_path / "mirror") as mirror:
        make_wheel(mirror.folder, "torch", "2.13.0", tag="cp312-cp312-manylinux_2_28_x86_64")
        make_wheel(mirror.folder, "tomli_later", "1.5")
        found = resolve(mirror.url)
        assert (found["torch"]["version"], found["tomli-later"]["version"]) == (BUILD, "1.5")
        address = mirror.url
    with pytest.raises(Unreachable, match=r"^127\.0\.0\.1"):
        resolve(address)


def test_a_folder_of_wheels_is_enough(site: PackageSite, uv: str) -> None:
    put_torch(site.folder)
    settings = IndexSettings(indexes=(), links=(str(site.folder),))
    assert len(resolved(uv, settings, GIVEN)) == 7
    assert site.num_requests == 0


def test_what_is_no_wheel_ends_it_with_its_name(site: PackageSite, resolve: Resolve) -> None:
    put_torch(site.folder)
    broken = site.folder / "cuda_toolkit-12.6.3-py3-none-any.whl"
    broken.write_bytes(b"no zip file")
    with pytest.raises(Unresolvable, match=r"cuda-toolkit==12\.6\.3 has an invalid"):
        resolve()
