"""Names and addresses as people write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import UsageError
from app.nodes.node import (
    LocalAddress,
    Node,
    NodeAddress,
    SshAddress,
    WslAddress,
    address_from_json,
    address_to_json,
    parse_ssh_target,
)


@pytest.mark.parametrize(
    ("text", "user", "host", "port"),
    [
        ("anna@pc-2", "anna", "pc-2", None),
        ("anna@PC-2.Local:2222", "anna", "PC-2.Local", 2222),
        ("anna@192.168.1.20", "anna", "192.168.1.20", None),
        ("anna@[fe80::7]:2222", "anna", "fe80::7", 2222),
        ("anna@[fe80::7%eth0]", "anna", "fe80::7%eth0", None),
        ("anna@fe80::7", "anna", "fe80::7", None),
        ("anna@corp.com@10.0.0.1", "anna@corp.com", "10.0.0.1", None),
        ("CORP\\anna@10.0.0.1:65535", "CORP\\anna", "10.0.0.1", 65535),
        ("  anna@pc  ", "anna", "pc", None),
        ("gamer", None, "gamer", None),
    ],
)
def test_an_address_is_read(text: str, user: str | None, host: str, port: int | None) -> None:
    address = parse_ssh_target(text)
    assert (address.user, address.host, address.port) == (user, host, port)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("@pc-2", "no PC"),
        ("anna@", "no PC"),
        ("anna@pc 2", "host name"),
        ("anna@-oProxyCommand=x", "host name"),
        ("anna@pc:", "port ''"),
        ("anna@pc:ssh", "port 'ssh'"),
        ("anna@pc:0", "port '0'"),
        ("anna@pc:65536", "port '65536'"),
        ("anna@pc:99999999999999999999", "port"),
        ("anna@[fe80::7", "brackets"),
        ("anna@[fe80::7]2222", "brackets"),
        ("anna@[pc]:22", "brackets"),
        ("anna@a:b:c", "not a host"),
        ("an na@pc", "user name"),
        ("", "no PC"),
    ],
)
def test_a_wrong_address_says_what_is_wrong_and_shows_the_form(text: str, named: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_ssh_target(text)
    assert named in caught.value.message
    assert "USER@HOST:PORT" in caught.value.hint


def test_an_ipv6_address_is_shown_in_brackets() -> None:
    assert str(SshAddress(user="anna", host="fe80::7", port=2222)) == "anna@[fe80::7]:2222"


@pytest.mark.parametrize(
    "address",
    [
        SshAddress(host="pc", port=2222, user="anna", key=Path("/home/anna/.ssh/k")),
        SshAddress(host="fe80::7", user="anna"),
        SshAddress(
            host="10.0.0.5",
            user="anna",
            identity_files=(Path("/home/anna/.ssh/lab"),),
            only_identity_files=True,
            agent="none",
            jumps=(SshAddress(host="gate", user="bob", proxy_command="nc gate 22"),),
            alias="lab",
        ),
        LocalAddress(),
        WslAddress(distro="Ubuntu-24.04"),
    ],
)
def test_an_address_comes_back_from_storage(address: NodeAddress) -> None:
    assert address_from_json(address_to_json(address)) == address


@pytest.mark.parametrize("stored", [{}, {"transport": "fax"}, {"transport": "ssh", "host": "x"}])
def test_a_stored_address_that_is_damaged_is_refused(stored: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="stored address"):
        address_from_json(stored)


@pytest.mark.parametrize("name", ["pc-2", "a", "GPU_1.lab", "x" * 63])
def test_a_name_is_accepted(name: str) -> None:
    assert Node(name=name, address=LocalAddress()).name == name


@pytest.mark.parametrize(
    "name", ["", "-x", ".x", "a b", "a/b", "x" * 64, "all", "ALL", "nul", "com1.x", "a.", "\u00e4"]
)
def test_a_name_that_cannot_be_a_folder_everywhere_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        Node(name=name, address=LocalAddress())


@pytest.mark.parametrize("distro", ["", "  ", "-x"])
def test_a_distro_must_have_a_name(distro: str) -> None:
    with pytest.raises(UsageError, match="WSL"):
        WslAddress(distro=distro)
