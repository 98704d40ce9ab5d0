"""The hub's token on a node: kept where the hub's tools look for it, never over another's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from agents.contract.hub import digest_of, token_path
from agents.contract.requests.hub import TokenWish
from agents.errors import ExpectedError
from agents.node.hub_token import find_token, forget_token, keep_token
from agents.serve.handlers import hub

OURS, THEIRS = "hf_" + "o" * 34, "hf_" + "t" * 34


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path)}


def test_it_lies_where_the_hubs_own_tools_look(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert keep_token(environ, OURS) == "same"
    path = token_path(environ)
    assert path == Path(environ["HOME"], ".cache", "huggingface", "token")
    assert path.stat().st_mode & 0o077 == 0
    from huggingface_hub import constants, get_token

    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(path))
    assert get_token() == OURS


def test_one_is_found_kept_and_forgotten(environ: dict[str, str]) -> None:
    digest = digest_of(OURS)
    assert find_token(environ, digest) == "none"
    assert keep_token(environ, OURS) == keep_token(environ, OURS) == "same"
    assert find_token(environ, digest) == "same"
    assert forget_token(environ, digest) == forget_token(environ, digest) == "none"
    assert list(token_path(environ).parent.iterdir()) == []


def test_one_of_the_nodes_own_stays(environ: dict[str, str]) -> None:
    keep_token(environ, THEIRS)
    assert keep_token(environ, OURS) == "other"
    assert forget_token(environ, digest_of(OURS)) == "other"
    assert token_path(environ).read_text() == THEIRS
    token_path(environ).unlink()
    assert keep_token({**environ, "HF_TOKEN": THEIRS}, OURS) == "other"
    assert not token_path(environ).exists()


def test_where_it_cannot_be_kept_is_said_without_it(environ: dict[str, str]) -> None:
    Path(environ["HOME"], ".cache").write_text("a file")
    with pytest.raises(ExpectedError) as caught:
        keep_token(environ, OURS)
    assert ".cache" in caught.value.message
    assert OURS not in caught.value.message


def test_a_request_does_each_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))

    digest = digest_of(OURS)
    wishes = (
        TokenWish(deed="find", digest=digest),
        TokenWish(deed="keep", token=OURS),
        TokenWish(deed="find", digest=digest),
        TokenWish(deed="forget", digest=digest),
    )
    answers = [hub.update_token(cast(Any, None), wish).place for wish in wishes]
    assert answers == ["none", "same", "same", "none"]
    assert OURS not in repr(TokenWish(deed="keep", token=OURS))
