"""Where an export may come to, as it is seen before anything is made."""

from pathlib import Path

import pytest

from app.artifacts.exports.place import claim_place, expect_free, free_place
from app.errors import UserError


@pytest.mark.parametrize(
    ("below", "words"),
    [
        ("full", "is not empty"),
        ("full/a", "is a file"),
        ("full/a/out", "a is a file"),
        ("x" * 300, "File name too long"),
        ("~nobody-of-that-name/out", "there is no such user"),
    ],
)
def test_what_is_in_use_is_told_and_nothing_is_made(tmp_path, below, words):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("x")
    out = tmp_path / below if not below.startswith("~") else tmp_path.__class__(below)
    with pytest.raises(UserError, match=words):
        expect_free(out)
    with pytest.raises(UserError, match=words):
        free_place(out)
    assert [one.name for one in tmp_path.iterdir()] == ["full"]


def test_a_new_folder_below_new_folders_is_free_and_not_made(tmp_path):
    assert expect_free(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    (tmp_path / "empty").mkdir()
    expect_free(tmp_path / "empty")
    assert [one.name for one in tmp_path.iterdir()] == ["empty"]


def test_a_drive_that_is_away_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda self: False)  # nor is the root, as on Windows
    with pytest.raises(UserError, match="cannot be written: / is not there"):
        expect_free(tmp_path / "out")


def test_the_place_of_an_export_is_known_by_every_spelling(services, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    with (
        claim_place(services, free_place(tmp_path / "disk" / "out")),
        pytest.raises(UserError, match="another export is writing to"),
        claim_place(services, free_place(tmp_path / "link" / "out")),
    ):
        pass
