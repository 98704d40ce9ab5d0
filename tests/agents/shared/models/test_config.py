"""A model's config is found in its folder and in the hub's cache, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.shared.models.config import find_config


def test_config_of_a_hub_id_that_was_fetched_before(tmp_path: Path) -> None:
    cached = tmp_path / "models--org--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc\n")
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "snapshots" / "abc" / "config.json").write_text('{"hidden_size": 32}')
    environ = {"HF_HUB_CACHE": str(tmp_path)}
    assert find_config("org/tiny", environ) == {"hidden_size": 32}
    assert find_config("org/other", environ) is None
    assert find_config("../org/tiny", environ) is None


def test_config_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    assert find_config(str(tmp_path), {}) is None
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="is not a JSON object"):
        find_config(str(tmp_path), {})
