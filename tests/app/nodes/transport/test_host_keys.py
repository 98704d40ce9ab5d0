"""Which host keys are confirmed, and how the file of them survives."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import asyncssh
import pytest

from app.errors import UserError
from app.nodes.node import SshAddress
from app.nodes.transport.host_keys import HostKeys, fingerprint_of

KEY = asyncssh.generate_private_key("ssh-ed25519").convert_to_public()
OTHER = asyncssh.generate_private_key("ecdsa-sha2-nistp256").convert_to_public()


def at(port: int = 22, host: str = "pc") -> SshAddress:
    return SshAddress(host=host, port=port, user="anna")


def test_a_key_is_known_for_its_host_and_port_alone(tmp_path: Path) -> None:
    keys = HostKeys(tmp_path)
    assert keys.find(at()) is None
    keys.confirm(at(), KEY)
    keys.confirm(at(2222), OTHER)
    assert keys.find(at()) == KEY
    assert keys.find(at(2222)) == OTHER
    assert keys.find(at(222)) is None
    assert keys.find(at(host="p")) is None


def test_confirming_again_replaces_and_forgetting_removes(tmp_path: Path) -> None:
    keys = HostKeys(tmp_path)
    keys.confirm(at(), KEY)
    keys.confirm(at(2222), KEY)
    keys.confirm(at(), OTHER)
    assert keys.find(at()) == OTHER
    keys.forget(at())
    assert keys.find(at()) is None
    assert keys.find(at(2222)) == KEY
    keys.forget(at())


def test_the_file_is_private_and_ssh_keygen_can_read_it(tmp_path: Path) -> None:
    HostKeys(tmp_path).confirm(at(2222), KEY)
    path = tmp_path / "known_hosts"
    assert path.stat().st_mode & 0o077 == 0
    shown = subprocess.run(
        ["ssh-keygen", "-lf", str(path)], capture_output=True, text=True, check=True
    )
    assert fingerprint_of(KEY) in shown.stdout
    assert "[pc]:2222" in shown.stdout
    assert sorted(os.listdir(tmp_path)) == ["known_hosts", "known_hosts.lock"]


def test_masters_at_the_same_time_lose_no_line(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda port: HostKeys(tmp_path).confirm(at(port), KEY), range(1, 41)))
    assert all(HostKeys(tmp_path).find(at(port)) == KEY for port in range(1, 41))


def test_a_damaged_line_is_named_and_never_taken_for_unknown(tmp_path: Path) -> None:
    (tmp_path / "known_hosts").write_text("[other]:22 ssh-ed25519 AAAA\n[pc]:22 ssh-ed25519 x\n")
    with pytest.raises(UserError, match=r"Line 2 of .*known_hosts is damaged"):
        HostKeys(tmp_path).find(at())


def test_a_file_that_cannot_be_written_is_told_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where the folder should be")
    with pytest.raises(UserError, match=r"cannot be (stored|read).*known_hosts"):
        HostKeys(tmp_path / "home").confirm(at(), KEY)
