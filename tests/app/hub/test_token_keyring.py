"""The hub's token in the keyring of the operating system, with backends of our own."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants, hf_api

from app.hub import token_keyring
from app.hub.hub_token import describe_place, find_token, forget_token, keep_token, read_token
from tests.fakes.hub import TOKEN, open_hub


class Backend:
    """A keyring in memory."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, str], str] = {}

    def get_password(self, service: str, account: str) -> str | None:
        return self.held.get((service, account))

    def set_password(self, service: str, account: str, password: str) -> None:
        self.held[service, account] = password

    def delete_password(self, service: str, account: str) -> None:
        del self.held[service, account]


class Locked(Backend):
    """Waits for a password that nobody types."""

    def get_password(self, service: str, account: str) -> str | None:
        time.sleep(30)
        return None

    set_password = get_password  # type: ignore[assignment]


class Failing(Backend):
    def set_password(self, service: str, account: str, password: str) -> None:
        raise RuntimeError("org.freedesktop.DBus.Error.ServiceUnknown")


def use(monkeypatch: pytest.MonkeyPatch, backend: Any, module: str) -> Any:
    """Make `keyring` offer a backend from a module."""
    backend.__class__ = type("Keyring", (type(backend),), {"__module__": module})
    fake: Any = ModuleType("keyring")
    fake.get_keyring = lambda: SimpleNamespace(backends=[backend])
    monkeypatch.setitem(sys.modules, "keyring", fake)
    return backend


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RACKLESS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "stored_tokens"))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    with open_hub() as opened:
        monkeypatch.setattr(hf_api.api, "endpoint", opened.address)
        yield


def test_a_token_is_kept_in_the_keyring_and_in_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = use(monkeypatch, Backend(), "keyring.backends.SecretService")
    assert keep_token(TOKEN) == "anna"
    assert list(backend.held.values()) == [TOKEN]
    assert (find_token(), read_token()) == ("keyring", TOKEN)
    assert describe_place() == "in this PC's keyring (GNOME Keyring or another Secret Service)"
    texts = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert TOKEN not in "".join(texts)
    home = tmp_path / "home"
    assert token_keyring.environ_with_token(home)["HF_TOKEN"] == TOKEN
    forget_token()
    assert (backend.held, find_token()) == ({}, "none")


@pytest.mark.parametrize(
    "module", ["keyring.backends.fail", "keyring.backends.null", "keyrings.alt.file"]
)
def test_what_is_no_keyring_of_the_system_gets_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    backend = use(monkeypatch, Backend(), module)
    keep_token(TOKEN)
    assert backend.held == {}
    assert find_token() == "kept"
    assert describe_place() == f"in {tmp_path / 'token'}, mode 0600"


def test_a_file_that_others_can_read_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o644)
    assert "which other users of this PC can read" in describe_place()


@pytest.mark.parametrize("backend", [Locked(), Failing()])
def test_a_keyring_that_does_not_answer_costs_little_and_the_file_is_used(
    monkeypatch: pytest.MonkeyPatch, backend: Backend
) -> None:
    use(monkeypatch, backend, "keyring.backends.SecretService")
    monkeypatch.setattr(token_keyring, "READ_S", 0.2)
    monkeypatch.setattr(token_keyring, "UNLOCK_S", 0.2)
    start = time.monotonic()
    keep_token(TOKEN)
    assert find_token() == "kept"
    assert time.monotonic() - start < 5


def test_without_the_package_the_file_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keyring", None)
    keep_token(TOKEN)
    assert find_token() == "kept"
