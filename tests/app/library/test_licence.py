"""The licence of a base is what its own card says, in its folder or in the hub's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.library.licence import find_licence, read_licence


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: apache-2.0\n---\n", "apache-2.0"),
        ("---\r\ntags: [a]\r\nlicense: 'llama3.1'\r\n---\r\n# A", "llama3.1"),
        ("---\nlicense: mit # as said\nlanguage: en\n---", "mit"),
        ("---\nlicense: [mit, gpl]\n---", None),
        ("---\nlicense: mit\nx: y", None),
        ("---\ntags: []\n---\nlicense: mit\n---\n", None),
        ("license: mit", None),
        ("", None),
    ],
)
def test_what_a_card_says(card: str, licence: str | None, tmp_path: Path) -> None:
    assert read_licence(card.replace("\r\n", "\n")) == licence
    (tmp_path / "README.md").write_bytes(card.encode("utf-8-sig"))
    assert find_licence(str(tmp_path)) == licence


def test_a_model_of_the_hub_has_its_card_in_the_cache(tmp_path: Path) -> None:
    environ = {"HF_HUB_CACHE": str(tmp_path)}
    assert find_licence("org/base", environ) is None
    cached = tmp_path / "models--org--base"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "snapshots" / "abc" / "README.md").write_text("---\nlicense: gemma\n---\n")
    assert find_licence("org/base", environ) == "gemma"
    assert find_licence("/on/the/nodes", environ) is None
