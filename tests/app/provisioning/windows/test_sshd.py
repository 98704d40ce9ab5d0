"""The shell script that runs an SSH server in a distro, in a root folder of its own."""

from __future__ import annotations

import base64
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.powershell.fake_windows import FakeWindows

SCRIPT = Path(__file__).resolve().parents[4] / "resources" / "windows" / "sshd.sh"
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
KEY = "ssh-ed25519 AAAAC3Nza ann@master"


def run(pc: FakeWindows, what: str) -> list[str]:
    key = base64.b64encode(KEY.encode()).decode()
    done = subprocess.run(
        ["sh", str(SCRIPT), what, "2222", key],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": pc._path(), "ROOT_DIR": str(pc.root)},
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("wsl_conf", "has_systemd"),
    [
        (None, False),
        ("[boot]\nsystemd=true\n", True),
        ("[boot]\nsystemd = TRUE # mine\ncommand=x\n", True),
        ("# mine\n[boot]\nsystemd=false\n[user]\ndefault=ann\n", False),
        ("[user]\ndefault=ann\n[network]\nsystemd=true\n", False),
        ("[automount]\r\nenabled=true\r\n[boot]\r\nsystemd=false\r\n", False),
    ],
)
def test_what_is_lacking_is_provided_once_and_taken_back(
    tmp_path: Path, wsl_conf: str | None, has_systemd: bool
) -> None:
    pc = FakeWindows(folder=tmp_path)
    conf, keys = pc.root / "etc/wsl.conf", pc.root / "home/ann/.ssh/authorized_keys"
    keys.parent.mkdir()
    keys.write_text("ssh-rsa AAAA other")  # without a line end
    if wsl_conf is not None:
        conf.write_bytes(wsl_conf.encode())
    lacked = run(pc, "state")
    assert lacked[-1] == "end"
    assert set(lacked) >= {"openssh-server", "settings", "key"}
    assert ("systemd" in lacked) == (not has_systemd)
    run(pc, "apply")
    assert run(pc, "state") == ["end"]
    assert keys.read_text().splitlines()[0] == "ssh-rsa AAAA other"
    once = conf.read_bytes()
    run(pc, "apply")
    assert conf.read_bytes() == once
    run(pc, "undo")
    assert keys.read_text() == "ssh-rsa AAAA other\n"
    assert not (pc.root / "etc/ssh/sshd_config.d/10-rackless.conf").exists()
    assert (conf.read_bytes().decode() if conf.exists() else None) == wsl_conf


@pytest.mark.skipif(SSHD is None, reason="needs openssh-server")
def test_a_real_sshd_takes_them_before_what_the_distro_says(tmp_path: Path) -> None:
    pc = FakeWindows(folder=tmp_path)
    run(pc, "apply")
    config, key = tmp_path / "sshd_config", tmp_path / "host_key"
    config.write_text(
        f"Include {pc.root}/etc/ssh/sshd_config.d/*.conf\nHostKey {key}\n"
        "PasswordAuthentication yes\nKbdInteractiveAuthentication yes\nPermitRootLogin yes\n"
    )
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    shown = subprocess.run(
        [str(SSHD), "-T", "-f", str(config)], capture_output=True, text=True, check=True
    )
    lines = shown.stdout.lower().splitlines()
    for wanted in (
        "port 2222",
        "passwordauthentication no",
        "kbdinteractiveauthentication no",
        "permitrootlogin no",
    ):
        assert wanted in lines


def test_the_settings_let_in_keys_alone(tmp_path: Path) -> None:
    pc = FakeWindows(folder=tmp_path)
    run(pc, "apply")
    settings = (pc.root / "etc/ssh/sshd_config.d/10-rackless.conf").read_text().splitlines()
    assert settings[1:] == [
        "Port 2222",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PermitRootLogin no",
    ]
