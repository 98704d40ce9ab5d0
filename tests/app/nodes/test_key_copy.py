"""Our key is copied with a password asked once: written once, verified, and taken back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from app.errors import HostKeyUnknown, LoginRefused, UserError
from app.nodes import key_copy
from app.nodes.key_copy import copy_key, take_back_key
from app.nodes.transport.connection import connect
from tests.fakes.password_pc import PASSWORD, files_with, pc_with
from tests.fakes.ssh import environment, make_key


@pytest.fixture(autouse=True)
def user(tmp_path: Path) -> Iterator[Path]:
    """The home of the person at the master, without any key."""
    (tmp_path / "user").mkdir()
    with environment(HOME=str(tmp_path / "user"), SSH_AUTH_SOCK=""):
        yield tmp_path / "user"


@pytest.mark.parametrize("ways", ["password", "questions"])
async def test_a_key_is_made_copied_verified_and_taken_back(
    tmp_path: Path, user: Path, ways: str, caplog: pytest.LogCaptureFixture
) -> None:
    master, allowed = tmp_path / "master", tmp_path / "pc" / ".ssh" / "authorized_keys"
    (tmp_path / "pc" / "bin").mkdir(parents=True)
    marked = tmp_path / "pc" / "bin" / "restorecon"
    marked.write_text('#!/bin/sh\necho "$@" > "$HOME/labelled"\n')
    marked.chmod(0o755)
    caplog.set_level("DEBUG")
    async with pc_with(tmp_path, ways) as (address, shown):
        with pytest.raises(HostKeyUnknown):
            await copy_key(address, PASSWORD, home=master)
        copied = await copy_key(address, PASSWORD, home=master, accept_host_key=shown)
        assert (copied.key, copied.is_new) == (str(user / ".ssh" / "id_ed25519"), True)
        assert (copied.was_there, copied.account) == (False, str(address))
        await (await connect(copied.address, home=master)).close()
        assert (
            allowed.read_text().split()[:2]
            == ((user / ".ssh" / "id_ed25519.pub").read_text().split()[:2])
        )
        modes = [path.stat().st_mode & 0o777 for path in (allowed.parent, allowed)]
        assert modes == [0o700, 0o600]
        assert (user / ".ssh" / "id_ed25519").stat().st_mode & 0o777 == 0o600
        assert ".ssh/authorized_keys" in (tmp_path / "pc" / "labelled").read_text()
        with pytest.raises(UserError, match="accepts our key already"):
            await copy_key(address, PASSWORD, home=master)
        allowed.write_text("ssh-rsa AAAA other\n" + allowed.read_text() + "ssh-rsa BBBB last\n")
        assert await take_back_key(copied.address, home=master)
        assert allowed.read_text() == "ssh-rsa AAAA other\nssh-rsa BBBB last\n"
        with pytest.raises(UserError, match="has added no key"):
            await take_back_key(copied.address, home=master)
    assert PASSWORD not in caplog.text
    assert not files_with(tmp_path, PASSWORD)


async def test_a_line_that_is_there_stays_one_and_is_not_taken_back(
    tmp_path: Path, user: Path
) -> None:
    key = make_key(user / ".ssh", "id_ed25519")
    line = key.with_name("id_ed25519.pub").read_text()
    allowed = tmp_path / "pc" / ".ssh" / "authorized_keys"
    allowed.parent.mkdir(parents=True)
    # A key that the host has, but does not take: a comment keeps no other from being added.
    allowed.write_text(f"# {line}no end of line")
    master = tmp_path / "master"
    async with pc_with(tmp_path, "password deaf", most=2) as (address, shown):
        with pytest.raises(LoginRefused, match=r"refuses the key .* it was removed again"):
            await copy_key(address, PASSWORD, home=master, accept_host_key=shown)
        assert allowed.read_text() == f"# {line}no end of line\n"
        allowed.write_text(f'from="10.0.0.1" {line}')
        with pytest.raises(LoginRefused, match="refuses the key"):
            await copy_key(address, PASSWORD, home=master)
        assert allowed.read_text() == f'from="10.0.0.1" {line}'


@pytest.mark.parametrize(
    ("ways", "password", "said"),
    [
        ("password questions", "wrong", "does not accept this password for anna"),
        ("questions two", PASSWORD, "wants more than a password"),
        ("", PASSWORD, "lets nobody in by password"),
    ],
)
async def test_a_password_is_tried_once_and_the_refusal_says_why(
    tmp_path: Path, ways: str, password: str, said: str
) -> None:
    async with pc_with(tmp_path, ways) as (address, shown):
        with pytest.raises(LoginRefused, match=said) as caught:
            await copy_key(address, password, home=tmp_path / "m", accept_host_key=shown)
        assert password not in f"{caught.value} {caught.value.hint}"
        assert not (tmp_path / "m").exists()


async def test_a_locked_key_is_left_alone_and_rackless_makes_its_own(
    tmp_path: Path, user: Path
) -> None:
    locked = make_key(user / ".ssh", "id_ed25519", passphrase="secret")
    before = locked.read_bytes()
    async with pc_with(tmp_path) as (address, shown):
        copied = await copy_key(address, PASSWORD, home=tmp_path / "m", accept_host_key=shown)
        assert copied.address.key == tmp_path / "m" / key_copy.OWN_KEY_NAME
        await (await connect(copied.address, home=tmp_path / "m")).close()
        # The next PC gets the same one.
        (tmp_path / "pc" / ".ssh" / "authorized_keys").unlink()
    async with pc_with(tmp_path) as (address, shown):
        again = await copy_key(address, PASSWORD, home=tmp_path / "m", accept_host_key=shown)
    assert (again.address.key, again.is_new) == (copied.address.key, False)
    assert locked.read_bytes() == before


async def test_a_home_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "pc").mkdir()
    (tmp_path / "pc" / ".ssh").write_text("a file")
    async with pc_with(tmp_path) as (address, shown):
        with pytest.raises(UserError, match=r"cannot be changed: .*exists"):
            await copy_key(address, PASSWORD, home=tmp_path / "m", accept_host_key=shown)


async def test_a_key_with_another_name_for_the_same_place_is_not_the_nodes(tmp_path: Path) -> None:
    async with pc_with(tmp_path) as (address, shown):
        copied = await copy_key(address, PASSWORD, home=tmp_path / "m", accept_host_key=shown)
        stranger = replace(copied.address, user="zoe")
        with pytest.raises(UserError, match="has added no key to zoe@"):
            await take_back_key(stranger, home=tmp_path / "m")
