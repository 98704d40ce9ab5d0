"""The script for Windows: parsed, dry runs against the plan, and a whole story on a played PC."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.provisioning.windows.facts import (
    Distro,
    FirewallRule,
    PortRange,
    StartTask,
    WindowsFacts,
    WindowsWanted,
)
from app.provisioning.windows.plan import plan_windows, rules_for
from app.provisioning.windows.script import write_script
from tests.powershell.fake_windows import FakeWindows

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGa0 ann@master"
WANTED = WindowsWanted(
    node="red",
    distro="Ubuntu-24.04",
    peers=("192.168.1.11", "192.168.1.10"),
    masters=("192.168.1.2",),
    public_key=KEY,
    memory_gib=24,
    has_ssh_agent=True,
)
SCRIPT = write_script(WANTED)
CONFIG = "# mine\r\n[wsl2]\r\nmemory=8GB # half\r\nkernel=C:\\\\k\\\r\nmore\r\n\r\n[user]\r\nx=1"

texts = st.text(alphabet='ab[]=#"\\\n\r wsl2', max_size=40) | st.lists(
    st.sampled_from(
        (
            "[wsl2]",
            "[WSL2] # x",
            "[experimental]",
            "[general]",
            "networkingMode=nat",
            " NetworkingMode = Mirrored # keep",
            'networkingMode="mirrored"',
            "memory=8GB",
            "swapFile=C:\\\\s\\",
            "instanceIdleTimeout=60000",
            "# [wsl2]",
            "",
            "nonsense",
        )
    ),
    max_size=9,
).map("\n".join)
seconds = st.none() | st.sampled_from((0, 60, 1800))
facts_of_pcs = st.builds(
    WindowsFacts,
    windows_build=st.sampled_from((19045, 22000, 22621, 22631, 26100)),
    wsl_version=st.none() | st.just("2.4.13.0"),
    wsl_path=st.just("C:\\Program Files\\WSL\\wsl.exe"),
    distros=st.lists(
        st.builds(
            Distro,
            name=st.sampled_from(("Ubuntu-24.04", "ubuntu-24.04", "docker-desktop", "Debian")),
            version=st.sampled_from((1, 2)),
        ),
        max_size=3,
        unique_by=lambda one: one.name.lower(),
    ).map(tuple),
    wslconfig=st.none() | texts,
    has_hyperv_firewall=st.booleans(),
    rules=st.none()
    | st.just(rules_for(WANTED))
    | st.lists(
        st.builds(
            FirewallRule,
            name=st.sampled_from(("Rackless-peers", "Rackless-ssh")),
            addresses=st.lists(st.sampled_from(("192.168.1.9", "192.168.1.10"))).map(tuple),
            ports=st.lists(st.sampled_from(("22", "2222"))).map(tuple),
        ),
        max_size=2,
    ).map(tuple),
    task=st.none()
    | st.builds(
        StartTask,
        start=st.sampled_from(("boot", "logon")),
        execute=st.just("C:\\Program Files\\WSL\\wsl.exe"),
        arguments=st.sampled_from(("-d Ubuntu-24.04 --exec /bin/sleep infinity", "-d Debian")),
        time_limit=st.sampled_from(("PT0S", "PT72H")),
    ),
    standby_s=seconds,
    hibernate_s=seconds,
    ssh_agent=st.none() | st.sampled_from(("Automatic, Running", "Disabled, Stopped")),
    excluded_ports=st.lists(
        st.sampled_from((PortRange(first=2200, last=2299), PortRange(first=50000, last=50059))),
        unique=True,
    ).map(tuple),
    dynamic_ports=st.none()
    | st.sampled_from((PortRange(first=49152, last=65535), PortRange(first=1024, last=15000))),
    sshd_lacks=st.none() | st.sampled_from(((), ("key",), ("openssh-server", "settings"))),
)


def dry_run(pc: FakeWindows, facts: WindowsFacts, script: str = SCRIPT) -> object:
    file = pc.folder / "facts.json"
    file.write_text(json.dumps(asdict(facts)))
    code, output = pc.run(script, DryRun=True, Facts=str(file))
    assert code == 0
    return json.loads(output[0])


@pytest.fixture(scope="module")
def any_pc(tmp_path_factory: pytest.TempPathFactory) -> FakeWindows:
    return FakeWindows(folder=tmp_path_factory.mktemp("pc"))


@pytest.fixture
def pc(tmp_path: Path) -> FakeWindows:
    return FakeWindows(folder=tmp_path)


@given(facts=facts_of_pcs)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_script_plans_what_the_plan_says(any_pc: FakeWindows, facts: WindowsFacts) -> None:
    planned = json.loads(json.dumps(asdict(plan_windows(facts, WANTED))))
    assert dry_run(any_pc, facts) == planned


def test_a_script_for_a_pc_without_neighbours_leaves_the_firewall(any_pc: FakeWindows) -> None:
    wanted = WindowsWanted(node="alone", distro="Ubuntu-24.04", start="logon")
    facts = WindowsFacts(
        windows_build=22631,
        wsl_version="2.4.13.0",
        wsl_path="wsl.exe",
        distros=(Distro(name="Ubuntu-24.04", version=2),),
        has_hyperv_firewall=True,
        sshd_lacks=(),
    )
    found = dry_run(any_pc, facts, write_script(wanted))
    assert found == json.loads(json.dumps(asdict(plan_windows(facts, wanted))))
    assert [one["id"] for one in found["changes"]] == ["wslconfig", "keep-running"]
    assert "Logging off" in found["changes"][1]["explanation"]
    assert "No address" in found["problems"][0]


def test_all_is_changed_once_and_undone_to_the_last_byte(pc: FakeWindows) -> None:
    pc.wslconfig.write_bytes(CONFIG.encode())
    pc.answers = ["y", "n"]
    assert pc.run(SCRIPT)[0] == 0, pc.said
    assert pc.asked == ["Make 6 of 6 changes? [y/N]", "Restart WSL now (wsl --shutdown)? [y/N]"]
    assert pc.shutdowns == 0
    config = pc.wslconfig.read_bytes().decode()
    assert "memory=24GB # half\r\n" in config
    assert "networkingMode=mirrored\r\n" in config
    assert sorted(pc.rules) == ["Rackless-peers", "Rackless-ssh"]
    assert pc.rules["Rackless-peers"]["LocalPorts"] == ["Any"]
    assert pc.rules["Rackless-ssh"]["LocalPorts"] == ["2222"]
    task = pc.tasks["Rackless-WSL"]
    assert (task.state, task.Settings.ExecutionTimeLimit) == ("Running", "PT0S")
    assert set(pc.power_s.values()) == {0}
    assert pc.agent == ["Automatic", "Running"]
    assert "Port 2222\n" in (pc.root / "etc/ssh/sshd_config.d/10-rackless.conf").read_text()
    assert (pc.root / "etc/wsl.conf").read_text().splitlines()[1].startswith("systemd=true")
    assert (pc.root / "home/ann/.ssh/authorized_keys").read_text().startswith(KEY[:40])

    before, pc.said = dict(vars(pc)), []
    assert pc.run(SCRIPT)[0] == 0
    assert pc.said[-1] == "Nothing to do."
    assert pc.asked == before["asked"]

    assert pc.run(SCRIPT, Undo=True)[0] == 0, pc.said
    assert pc.wslconfig.read_bytes() == CONFIG.encode()
    assert (pc.rules, pc.tasks) == ({}, {})
    assert pc.power_s == {"STANDBYIDLE": 1800, "HIBERNATEIDLE": 10800}
    assert pc.agent == ["Disabled", "Stopped"]
    assert not (pc.root / "etc/ssh/sshd_config.d/10-rackless.conf").exists()
    assert not (pc.root / "etc/wsl.conf").exists()
    assert (pc.root / "home/ann/.ssh/authorized_keys").read_text() == ""
    assert pc.run(SCRIPT, Undo=True)[0] == 0  # nothing is left to undo


def test_undo_goes_back_over_two_runs_to_what_was_there_first(pc: FakeWindows) -> None:
    assert pc.run(SCRIPT, Yes=True)[0] == 0
    later = write_script(replace(WANTED, memory_gib=16, peers=("192.168.1.99",)))
    assert pc.run(later, Yes=True)[0] == 0
    assert "memory=16GB" in pc.wslconfig.read_text()
    assert pc.rules["Rackless-peers"]["RemoteAddresses"] == ["192.168.1.99"]
    assert pc.run(later, Undo=True)[0] == 0
    assert not pc.wslconfig.exists()  # there was none
    assert pc.rules == {}


def test_a_file_that_its_owner_changed_later_is_left_and_named(pc: FakeWindows) -> None:
    assert pc.run(SCRIPT, Yes=True)[0] == 0
    pc.wslconfig.write_text("[wsl2]\nmemory=4GB\n")
    assert pc.run(SCRIPT, Undo=True)[0] == 0
    assert pc.wslconfig.read_text() == "[wsl2]\nmemory=4GB\n"
    assert any("was changed since, so it stays" in line for line in pc.said)


def test_without_an_administrator_the_rest_is_done_and_said(pc: FakeWindows) -> None:
    pc.is_admin = False
    assert pc.run(SCRIPT, Yes=True)[0] == 1
    assert (pc.rules, pc.tasks) == ({}, {})
    assert "mirrored" in pc.wslconfig.read_text()
    assert any("started as administrator" in line for line in pc.said)
    pc.is_admin = True
    assert pc.run(SCRIPT, Yes=True)[0] == 0
    pc.is_admin = False
    assert pc.run(SCRIPT, Undo=True)[0] == 1  # these changes need one to be undone, too
    assert pc.power_s["STANDBYIDLE"] == 1800
    assert pc.tasks
    pc.is_admin = True
    assert pc.run(SCRIPT, Undo=True)[0] == 0
    assert pc.tasks == {}


def test_a_no_changes_nothing_and_a_dry_run_asks_nothing(pc: FakeWindows) -> None:
    assert pc.run(SCRIPT)[0] == 1
    assert "Nothing was changed." in pc.said
    code, output = pc.run(SCRIPT, DryRun=True)
    assert code == 0
    changes = json.loads(output[0])["changes"]
    assert [one["id"] for one in changes] == [
        *("wslconfig", "sshd", "firewall", "keep-running", "sleep", "ssh-agent")
    ]
    assert changes[4]["before"] == "sleeps after 1800 s, hibernates after 10800 s"
    assert not pc.wslconfig.exists()
    assert len(pc.asked) == 1


def test_a_run_in_wsl_is_not_ended_without_a_question(pc: FakeWindows) -> None:
    pc.ranks = ("4711",)
    pc.answers = ["y"]
    assert pc.run(SCRIPT, Yes=True)[0] == 0
    assert any(line.startswith("WARNING: a run of Rackless trains") for line in pc.said)
    assert pc.asked == ["Restart WSL now (wsl --shutdown)? [y/N]"]
    assert pc.shutdowns == 1


def test_without_a_password_the_other_changes_are_made(pc: FakeWindows) -> None:
    pc.password = None
    assert pc.run(SCRIPT, Yes=True)[0] == 1
    assert pc.tasks == {}
    assert sorted(pc.rules) == ["Rackless-peers", "Rackless-ssh"]
    assert any("needs -AtLogon" in line for line in pc.said)
    assert pc.run(SCRIPT, Yes=True, AtLogon=True)[0] == 0
    trigger = pc.tasks["Rackless-WSL"].Triggers[0]
    assert trigger.CimClass.CimClassName == "MSFT_TaskLogonTrigger"
    assert pc.run(SCRIPT, Undo=True)[0] == 0
    assert pc.tasks == {}


def test_a_pc_without_the_distro_installs_it_and_nothing_else(pc: FakeWindows) -> None:
    pc.distros = {"docker-desktop": 2}
    assert pc.run(SCRIPT, Yes=True)[0] == 0
    assert pc.installed == ["Ubuntu-24.04"]
    assert not pc.wslconfig.exists()


@pytest.mark.parametrize(
    ("before", "encoding"),
    [
        ("\ufeff[wsl2]\r\nswap=0\r\n", "utf-8"),
        ("\ufeff[wsl2]\r\nswap=0\r\n", "utf-16-le"),
        ("# f\xfcr mich\n[wsl2]\n", "utf-8"),
        ("# f\xfcr mich\n[wsl2]\n", "latin-1"),
    ],
)
def test_a_file_keeps_its_encoding(pc: FakeWindows, before: str, encoding: str) -> None:
    data = before.encode(encoding)
    pc.wslconfig.write_bytes(data)
    assert pc.run(SCRIPT, Yes=True)[0] == 0
    after = pc.wslconfig.read_bytes().decode(encoding)
    assert after.startswith(before)
    assert after.count("networkingMode=mirrored") == 1
    assert pc.run(SCRIPT, Undo=True)[0] == 0
    assert pc.wslconfig.read_bytes() == data


def test_values_cannot_become_code() -> None:
    name = "x'; Remove-Item C:\\ #"
    text = write_script(replace(WANTED, node=name))
    assert text.count("Remove-Item C:") == 1
    assert "x''; Remove-Item" in text
    with pytest.raises(ValueError, match="distro"):
        replace(WANTED, distro="a b; calc")
    with pytest.raises(ValueError, match="no IP address"):
        replace(WANTED, peers=("Any",))
    with pytest.raises(ValueError, match="ssh_port is 5357"):
        replace(WANTED, ssh_port=5357)
    with pytest.raises(ValueError, match="public_key"):
        replace(WANTED, public_key="ssh-rsa AAA\nssh-rsa BBB")


def test_the_script_for_the_distro_arrives_whole() -> None:
    found = re.search(r"ServerScript = '([A-Za-z0-9+/=]+)'", SCRIPT)
    assert found is not None
    assert base64.b64decode(found[1]).startswith(b"#!/bin/sh\n")
