"""`rackless nodes windows-script` saves a script with the values of this cluster."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from app.cli.main import run
from app.errors import UserError
from app.nodes.node import LocalAddress, Node, SshAddress, WslAddress
from app.provisioning.windows.offer import ScriptOptions, offer_script

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGa0"
NODES = {
    "blue": Node(name="blue", address=SshAddress(host="192.0.2.20", port=22, user="ann")),
    "green": Node(name="green", address=SshAddress(host="192.0.2.21", port=2022, user="ann")),
    "black": Node(name="black", address=WslAddress(distro="Debian")),
    "gone": Node(name="gone", address=SshAddress(host="no-such-host.invalid", port=22, user="a")),
}


def values(text: str) -> dict[str, object]:
    found = re.search(r"ConvertFrom-Json -InputObject '(\{.*\})'", text)
    assert found is not None
    return json.loads(found[1].replace("''", "'"))


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / ".ssh").mkdir()
    file = tmp_path / ".ssh" / "id_ed25519.pub"
    file.write_text(f"{KEY} Ann's key \u00e9\n", encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    return file


def test_a_script_has_the_addresses_of_the_other_nodes_and_the_key(key: Path) -> None:
    script = offer_script(NODES, "green", ScriptOptions())
    found = values(script.text)
    assert found["peers"] == ["192.0.2.20"]
    assert (found["ssh_port"], found["public_key"]) == (2022, KEY)
    assert found["distro"] == "Ubuntu-24.04"
    assert found["has_ssh_agent"] is False
    assert script.notes == ("no-such-host.invalid has no address now; its node cannot get in",)
    assert script.file_name == "rackless-windows-green.ps1"


def test_a_distro_of_this_pc_brings_its_name_and_the_ssh_agent(key: Path) -> None:
    found = values(offer_script(NODES, "black", ScriptOptions()).text)
    assert (found["distro"], found["has_ssh_agent"]) == ("Debian", True)
    assert found["peers"] == ["192.0.2.20", "192.0.2.21"]


def test_a_master_that_trains_too_is_a_peer(key: Path) -> None:
    nodes = {**NODES, "here": Node(name="here", address=LocalAddress())}
    found = values(offer_script(nodes, "green", ScriptOptions()).text)
    assert set(found["masters"]) <= set(found["peers"])


def test_a_wrong_option_is_named(key: Path) -> None:
    with pytest.raises(UserError, match="ssh_port is 22"):
        offer_script({}, "new", ScriptOptions(ssh_port=22))
    key.write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nx\n")
    with pytest.raises(UserError, match="no public key"):
        offer_script({}, "new", ScriptOptions(public_key=key))


def test_the_command_saves_it_for_a_pc_that_is_no_node_yet(
    key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RACKLESS_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert run(["nodes", "windows-script", "red", "--memory", "24", "--at-logon", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    data = Path(told["file"]).read_bytes()
    assert told["steps"][0] == "install"
    assert data.count(b"\r\n") == data.count(b"\n") > 400
    assert values(data.decode("ascii"))["start"] == "logon"
    assert run(["nodes", "windows-script", "red", "--out", str(tmp_path)]) == 1
    assert "cannot be written" in capsys.readouterr().err
