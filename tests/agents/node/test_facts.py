"""What a node says it is, from texts of real systems and from this one."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from agents.node import facts
from agents.node.facts import (
    find_compiler,
    parse_connection,
    parse_cpu_name,
    parse_ip_addresses,
    parse_os_release,
    read_facts,
    read_interfaces,
    read_wsl_mode,
)
from agents.state import Home

IP_ADDR = """[{"ifindex":1,"ifname":"lo","addr_info":[
 {"family":"inet","local":"127.0.0.1","prefixlen":8,"scope":"host","label":"lo"},
 {"family":"inet6","local":"::1","prefixlen":128,"scope":"host"}]},
{},{"ifindex":2,"ifname":"enp3s0","mtu":1500,"addr_info":[
 {"family":"inet","local":"192.168.1.20","prefixlen":24,"scope":"global"},
 {"family":"inet6","local":"fe80::1","prefixlen":64,"scope":"link"}]},
{"ifindex":3,"ifname":"wlp2s0","addr_info":[]}]"""


def test_os_release() -> None:
    text = 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.1 LTS"\nVERSION_ID="24.04"\n'
    assert parse_os_release(text) == "Ubuntu 24.04.1 LTS"
    assert parse_os_release("") is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nmodel name\t: AMD Ryzen 9  7950X\n", "AMD Ryzen 9 7950X"),
        ("processor : 0\nHardware : BCM2835\n", "BCM2835"),
        ("processor : 0\n", None),
    ],
)
def test_cpu_name(text: str, name: str | None) -> None:
    assert parse_cpu_name(text) == name


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("192.168.1.10 51234 192.168.1.20 22", "192.168.1.20"),
        ("fe80::2%eth0 51234 fe80::1%eth0 22", "fe80::1"),
        ("", None),
        ("nonsense", None),
    ],
)
def test_own_address_is_the_one_the_master_came_by(text: str, address: str | None) -> None:
    assert parse_connection(text) == address


def test_ip_addresses() -> None:
    assert parse_ip_addresses(IP_ADDR) == [
        ("lo", "127.0.0.1"),
        ("lo", "::1"),
        ("enp3s0", "192.168.1.20"),
    ]


def test_interfaces_with_and_without_the_ip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with_ip = {(i.name, i.address) for i in read_interfaces() if ":" not in i.address}
    monkeypatch.setattr(facts, "_read_with_ip", list)
    found = read_interfaces()
    assert {(i.name, i.address) for i in found} == with_ip
    assert ("lo", "127.0.0.1") in with_ip
    assert found[-1].name == "lo"
    assert next(i for i in found if i.name == "lo").mtu == 65536


@pytest.mark.parametrize(
    ("release", "output", "mode"),
    [
        ("6.8.0-45-generic", "mirrored\n", None),
        ("5.15.153.1-microsoft-standard-WSL2", "mirrored\n", "mirrored"),
        ("5.15.153.1-Microsoft-standard", "NAT\n", "nat"),
        ("5.15.153.1-microsoft-standard-WSL2", None, "unknown"),
    ],
)
def test_wsl_mode(
    monkeypatch: pytest.MonkeyPatch, release: str, output: str | None, mode: str | None
) -> None:
    def run(command: list[str], **_: object) -> SimpleNamespace:
        assert command[1:] == ["--networking-mode"]
        if output is None:
            raise subprocess.CalledProcessError(1, command)
        return SimpleNamespace(stdout=output)

    monkeypatch.setattr(facts.platform, "release", lambda: release)
    monkeypatch.setattr(facts.subprocess, "run", run)
    assert read_wsl_mode() == mode


@pytest.mark.parametrize(
    ("there", "cc", "found"),
    [
        (("gcc", "clang"), None, "gcc"),
        (("clang",), None, "clang"),
        ((), None, None),
        (("gcc", "gcc-13"), "gcc-13 -O2", "gcc-13"),
        (("gcc",), "icc", None),
    ],
)
def test_the_compiler_is_the_one_that_training_takes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    there: tuple[str, ...],
    cc: str | None,
    found: str | None,
) -> None:
    for name in there:
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    if cc is None:
        monkeypatch.delenv("CC", raising=False)
    else:
        monkeypatch.setenv("CC", cc)
    assert find_compiler() == (found and str(tmp_path / found))


def test_this_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "RECORDER_TIMEOUT_S", 0.0)
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 5 10.0.0.2 22")
    found = read_facts(Home(tmp_path))
    assert found.hostname == socket.gethostname()
    assert found.address == "10.0.0.2"
    assert found.num_cores is not None
    assert found.num_cores >= 1
    assert found.memory_bytes is not None
    assert found.memory_bytes > 1 << 28
    assert found.memory_available_bytes is not None
    assert 0 < found.memory_available_bytes < found.memory_bytes
    assert found.disk_bytes is not None
    assert found.disk_free_bytes is not None
    assert found.disk_free_bytes <= found.disk_bytes
