"""A data file to calibrate with says enough, in whatever script it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import UserError
from app.library.calibration import MIN_WORDS, check_calibration, find_calibration
from app.runs.services import Services
from tests.fakes.cluster import FakeCluster, make_services


@pytest.fixture
def services(tmp_path: Path) -> Services:
    return make_services(tmp_path / "home", FakeCluster())


def test_a_script_without_spaces_has_words_all_the_same(services: Services, tmp_path: Path) -> None:
    file = tmp_path / "poems.txt"
    file.write_text("\u6625\u7720\u4e0d\u89c9\u6653\u3002" * MIN_WORDS, encoding="utf-8")
    assert find_calibration(file, services.hashes).files
    file.write_text("\u6625\u7720\u4e0d\u3002", encoding="utf-8")
    with pytest.raises(UserError, match=r"poems\.txt has 3 words; at least 64 are needed"):
        find_calibration(file, services.hashes)
    file.write_text("a" * 1000, encoding="utf-8")
    with pytest.raises(UserError, match=r"poems\.txt has 1 words"):
        find_calibration(file, services.hashes)


def test_a_file_of_nobody_is_told(services: Services) -> None:
    for look in (find_calibration, check_calibration):
        with pytest.raises(UserError, match="does not exist"):
            look(Path("~nobody-of-that-name/poems.txt"), services.hashes)
