"""The hub's token on this PC, against a hub of our own."""

import pytest
from huggingface_hub import constants, hf_api

from app.errors import UserError
from app.hub.hub_token import find_token, forget_token, keep_token
from tests.fakes.hub import TOKEN, open_hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "stored_tokens"))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    with open_hub() as opened:
        monkeypatch.setattr(hf_api.api, "endpoint", opened.address)
        yield opened


def test_a_token_is_checked_kept_and_forgotten(hub, tmp_path):
    assert find_token() == "none"
    assert keep_token(f" {TOKEN}\n") == "anna"
    assert find_token() == "kept"
    assert (tmp_path / "token").read_text() == TOKEN
    assert (tmp_path / "token").stat().st_mode & 0o077 == 0
    forget_token()
    assert find_token() == "none"
    assert TOKEN not in "".join(f.read_text() for f in tmp_path.iterdir() if f.is_file())


def test_other_tokens_of_the_hubs_tools_stay(hub, tmp_path):
    (tmp_path / "stored_tokens").write_text("[work]\nhf_token = hf_other\n")
    keep_token(TOKEN)
    forget_token()
    assert "hf_other" in (tmp_path / "stored_tokens").read_text()


def test_one_that_the_hub_does_not_know_is_not_kept(hub, tmp_path):
    with pytest.raises(UserError, match="does not know"):
        keep_token("hf_" + "y" * 34)
    assert not (tmp_path / "token").exists()


def test_one_that_looks_like_none_is_not_sent(hub):
    for text in ("", "secret", "hf_a b c d e f g"):
        with pytest.raises(UserError, match="no token"):
            keep_token(text)


def test_a_hub_that_cannot_be_reached_is_told_without_the_token(hub, monkeypatch):
    monkeypatch.setattr(hf_api.api, "endpoint", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="could not check") as refused:
        keep_token(TOKEN)
    assert TOKEN not in str(refused.value)


def test_one_of_the_environment_is_not_ours_to_forget(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert find_token() == "environment"
    with pytest.raises(UserError, match="No token is kept"):
        forget_token()
    monkeypatch.delenv("HF_TOKEN")
    keep_token(TOKEN)
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    assert find_token() == "environment"
    forget_token()
