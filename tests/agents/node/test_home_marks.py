"""Two nodes with one folder find each other's marks, by any path to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.errors import ExpectedError
from agents.node.home_marks import find_marks, mark_home, read_home_id
from agents.state import Home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    path = tmp_path / "home"
    path.mkdir()
    return Home(path)


def test_a_mark_is_found_through_a_link_to_the_folder(home: Home, tmp_path: Path) -> None:
    link, other = tmp_path / "link", tmp_path / "other"
    link.symlink_to(home.path)
    other.mkdir()
    mark_home(home, "m1", removes=False)
    assert find_marks(Home(link), ("m0", "m1")) == ("m1",)
    assert find_marks(Home(other), ("m0", "m1")) == ()
    mark_home(Home(link), "m1", removes=True)
    mark_home(Home(link), "m1", removes=True)
    assert find_marks(home, ("m0", "m1")) == ()
    assert list(home.path.iterdir()) == []


def test_the_id_of_a_folder_stays(home: Home, tmp_path: Path) -> None:
    first = read_home_id(home)
    assert first is not None
    assert read_home_id(home) == first
    other = tmp_path / "other"
    other.mkdir()
    assert read_home_id(Home(other)) not in (first, None)
    assert [path.name for path in home.path.iterdir()] == ["home-id"]


def test_a_damaged_id_is_not_known(home: Home) -> None:
    (home.path / "home-id").write_text("")
    assert read_home_id(home) is None
    assert read_home_id(Home(home.path / "missing")) is None


@pytest.mark.parametrize("mark", ["../m", "a/b", "", "x" * 200])
def test_a_mark_stays_in_the_home(home: Home, mark: str) -> None:
    with pytest.raises(ExpectedError):
        mark_home(home, mark, removes=False)
    with pytest.raises(ExpectedError):
        find_marks(home, (mark,))
