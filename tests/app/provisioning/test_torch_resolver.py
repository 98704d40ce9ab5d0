"""What a build of torch needs: found on an index, in one version each, with where it is needed."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from agents.shared.packages.package_index import IndexSettings, IndexUnreachable, PackageIndex
from app.provisioning.torch_resolver import Unresolvable, resolve_build
from tests.fakes.package_site import PackageSite, package_site
from tests.fakes.packages import make_wheel, sha256_of
from tests.fakes.torch_index import BUILD, put_torch

GIVEN = {"sympy": "1.14.0"}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[PackageSite]:
    with package_site(tmp_path / "site") as made:
        yield made


def resolve(site: PackageSite, *first: str, **given: str) -> dict[str, dict[str, Any]]:
    index = PackageIndex(IndexSettings(indexes=(*first, site.url)))
    preferred = {"cuda-pathfinder": "1.9.0", "cuda-bindings": "13.5.0"}
    found = resolve_build(f"torch=={BUILD}", index, GIVEN | given, preferred, lambda: None)
    return {one["name"]: one for one in found}


@pytest.mark.parametrize("with_metadata", [False, True])
def test_all_needs_are_found_in_the_newest_version_that_every_limit_allows(
    site: PackageSite, with_metadata: bool
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
    found = resolve(site)
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
    # Each page is asked for once, and no wheel is read where its metadata lies beside it.
    assert len(site.pages) == len(set(site.pages)) == 7
    assert bool(site.files) is not with_metadata


def test_a_marker_says_where_a_package_is_needed(site: PackageSite) -> None:
    put_torch(site.folder, ("x86_64", "aarch64"))
    markers = {name: one.get("marker", "") for name, one in resolve(site).items()}
    assert markers.pop("nvidia-nccl-cu12") == "platform_machine == 'x86_64'"
    assert markers.pop("tomli-later") == (
        "platform_machine == 'x86_64' and python_version == '3.11' or "
        "platform_machine == 'aarch64' and python_version == '3.11'"
    )
    assert set(markers.values()) == {""}
    # Pythons and machines that the build has no file for do not count.
    for file in {*site.folder.glob("torch-*aarch64*"), *site.folder.glob("torch-*cp314*")}:
        file.unlink()
    found = resolve(site)
    assert "marker" not in found["nvidia-nccl-cu12"]
    assert len(found["torch"]["wheels"]) == 3


def test_what_cannot_be_is_named_with_who_needs_it(site: PackageSite) -> None:
    with pytest.raises(Unresolvable, match=r"no index has torch==2\.13\.0\+cu126 ready-built"):
        resolve(site)
    put_torch(site.folder)
    with pytest.raises(Unresolvable, match=r"needs sympy>=1\.13\.3, and Rackless has 1\.12 of it"):
        resolve(site, sympy="1.12")
    for file in site.folder.glob("cuda_bindings-12*"):
        file.unlink()
    says = r"no index has cuda-bindings.*12\.9\.4 ready-built .* which torch==\S+ needs"
    with pytest.raises(Unresolvable, match=says):
        resolve(site)


def test_a_later_limit_changes_an_earlier_choice(site: PackageSite, tmp_path: Path) -> None:
    tag = "cp312-cp312-manylinux_2_28_x86_64"
    needs = ("alpha", "omega", "cuda-pathfinder")
    make_wheel(site.folder, "torch", BUILD, tag=tag, needs=needs)
    for version in ("1.0", "2.0"):
        make_wheel(site.folder, "alpha", version, needs=(f"omega=={version}",))
        make_wheel(site.folder, "omega", version)
    make_wheel(site.folder, "cuda_pathfinder", "1.9.5", needs=("omega<2",))
    with pytest.raises(Unresolvable, match="omega"):
        resolve(site)
    (site.folder / "alpha-2.0-py3-none-any.whl").unlink()
    assert resolve(site)["omega"]["version"] == "1.0"


def test_the_first_index_that_has_a_version_is_taken_and_one_that_is_silent_ends_it(
    site: PackageSite, tmp_path: Path
) -> None:
    put_torch(site.folder)
    with package_site(tmp_path / "mirror") as mirror:
        make_wheel(mirror.folder, "torch", "2.13.0", tag="cp312-cp312-manylinux_2_28_x86_64")
        make_wheel(mirror.folder, "cuda_pathfinder", "1.7.0")
        found = resolve(site, mirror.url)
        assert (found["torch"]["version"], found["cuda-pathfinder"]["version"]) == (BUILD, "1.7.0")
        address = mirror.url
    with pytest.raises(IndexUnreachable, match=r"127\.0\.0\.1"):
        resolve(site, address)


def test_a_folder_of_wheels_is_enough(site: PackageSite) -> None:
    put_torch(site.folder)
    index = PackageIndex(IndexSettings(indexes=(), links=(str(site.folder),)))
    found = resolve_build(f"torch=={BUILD}", index, GIVEN, {}, lambda: None)
    assert len(found) == 7
    assert site.num_requests == 0


def test_what_is_no_wheel_ends_it_with_its_name(site: PackageSite) -> None:
    put_torch(site.folder)
    broken = site.folder / "cuda_toolkit-12.6.3-py3-none-any.whl"
    broken.write_bytes(b"no zip file")
    with pytest.raises(IndexUnreachable, match=f"{broken.name} is no wheel"):
        resolve(site)
