"""What a node reads of itself: from this PC, and from texts and folders of others."""

from __future__ import annotations

import json
import os
import resource
import socket
import time
from pathlib import Path

import pytest

from agents.contract.messages import from_wire, to_wire
from agents.contract.requests.examination import Examination
from agents.node.examination import reading
from agents.node.examination.driver import count_cards, find_library_version
from agents.node.examination.examine import examine
from agents.node.examination.network import find_kind, find_routes, parse_route, read_rdma
from agents.node.examination.system import (
    find_file_system,
    read_limit,
    read_may_sleep,
    resolve_hostname,
    try_execute,
    try_write,
)
from agents.node.examination.wsl import decode_config, judge_firewall

MOUNTS = """\
22 1 8:1 / / rw - ext4 /dev/sda1 rw
23 22 8:2 / /home rw,noexec - nfs4 nas:/home rw
24 22 8:3 / /mnt/my\\040disk rw - xfs /dev/sdb rw
25 22 0:9 / /mnt/c rw - 9p drvfs rw
"""


def test_this_pc_says_what_it_is(tmp_path: Path) -> None:
    found = examine(tmp_path)
    assert found.system.home_writable
    assert found.system.home_executable
    assert found.system.temporary_writable
    assert found.system.temporary_free_bytes
    assert found.system.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert "lo" in {device.name for device in found.network.devices or ()}
    assert list(tmp_path.iterdir()) == []
    assert from_wire(Examination, json.loads(json.dumps(to_wire(found)))) == found


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("/root", "ext4"), ("/home/u", "nfs4"), ("/mnt/my disk/x", "xfs"), ("/mnt/c/Users", "9p")],
)
def test_file_system_of_a_folder(folder: str, kind: str) -> None:
    assert find_file_system(Path(folder), MOUNTS) == kind


def test_folder_that_cannot_be_used(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert try_write(gone) is False
    assert try_execute(gone) is None


def test_addresses_of_the_own_name_are_told_with_ipv4_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = ["fe80::1%eth0", "10.0.0.9", "10.0.0.9", "10.0.0.10"]
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (one, 0)) for one in found]
    )
    assert resolve_hostname() == ("10.0.0.10", "10.0.0.9", "fe80::1")


def test_limits_of_this_login(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_limit(resource.RLIMIT_NOFILE) == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, 1))
    assert read_limit(resource.RLIMIT_AS) == 2**63 - 1


def test_program_that_does_not_answer_or_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    began_s = time.monotonic()
    assert reading.ask(["slow"], 0.2) is None
    assert reading.ask(["no-such-program"]) is None
    assert time.monotonic() - began_s < 5


def test_route_as_ip_prints_it() -> None:
    text = (
        '[{"dst":"10.0.0.2","gateway":"10.0.0.1","dev":"eth0","prefsrc":"10.0.0.9",'
        '"metrics":[{"mtu":1280}]}]'
    )
    route = parse_route("10.0.0.2", text)
    assert (route.device, route.gateway, route.source) == ("eth0", "10.0.0.1", "10.0.0.9")
    assert route.mtu == 1280
    for bad in ("", "[]", "{}", "[3]"):
        assert parse_route("10.0.0.2", bad).device is None
    near, wrong = find_routes(["127.0.0.1", "-4"]).routes
    assert (near.device, wrong.device) == ("lo", None)


def test_kinds_of_devices() -> None:
    assert find_kind("eth0", ["phy80211", "device"]) == "wifi"
    assert find_kind("home", [], "wireguard") == "vpn"
    assert find_kind("office", ["tun_flags"]) == "vpn"
    assert find_kind("lan", ["bridge"]) == "bridge"
    assert find_kind("docker0", ["bridge"]) == "bridge"
    assert find_kind("eth0", [], "", is_linked=True) == "virtual"
    assert find_kind("ifb0", []) is None


def test_cards_and_libraries_of_nvidia(tmp_path: Path) -> None:
    for name, vendor, kind in (
        ("01:00.0", "0x10de", "0x030000"),
        ("01:00.1", "0x10de", "0x040300"),
        ("02:00.0", "0x1002", "0x030000"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    assert count_cards(str(tmp_path)) == 1
    assert count_cards(str(tmp_path / "none")) is None
    (tmp_path / "libnvidia-ml.so.580.65.06").touch()
    (tmp_path / "libnvidia-ml.so.1").touch()
    assert find_library_version((str(tmp_path),)) == "580.65.06"
    assert find_library_version(()) is None


def test_rdma_ports(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("100 Gb/sec (4X EDR)\n")
    (found,) = read_rdma(str(tmp_path)) or ()
    assert (found.name, found.state, found.rate) == ("mlx5_0/1", "ACTIVE", "100 Gb/sec (4X EDR)")
    assert read_rdma(str(tmp_path / "none")) == ()


def test_sleep(tmp_path: Path) -> None:
    assert read_may_sleep(tmp_path) is None
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    units = tmp_path / "etc/systemd/system"
    units.mkdir(parents=True)
    assert read_may_sleep(tmp_path) is False
    (units / "display-manager.service").symlink_to("/lib/systemd/system/gdm.service")
    assert read_may_sleep(tmp_path) is True
    for name in ("sleep.target", "suspend.target"):
        (units / name).symlink_to("/dev/null")
    assert read_may_sleep(tmp_path) is False


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_config_of_windows_in_each_encoding(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / ".wslconfig"
    path.write_bytes("[wsl2]\r\nmemory=8GB\r\n".encode(encoding))
    assert decode_config(str(path)) == ("[wsl2]", "memory=8GB")
    assert decode_config(str(tmp_path / "none")) is None


def test_firewall_of_hyper_v() -> None:
    assert judge_firewall({}) is None
    assert judge_firewall({"default": "Block", "rules": 0}) is False
    assert judge_firewall({"default": "Block", "rules": 2}) is True
    assert judge_firewall({"default": "Allow", "rules": 0}) is True
