"""Every PowerShell script parses, is plain, and calls only what the list of commands has."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.provisioning.windows.facts import WindowsWanted
from app.provisioning.windows.script import write_script
from tests.powershell.syntax import calls, functions, parse, programs, walk

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {
    *("$Wsl", "$wsl", "powercfg.exe", "netsh.exe"),
    *("$Path", "$path", "$python", "py.exe", "winget.exe"),
}
# Grammar of PowerShell 7 that 5.1 does not have.
_NEWER = ("??", "?.", "&&", "||", "ternary_expression")


def node_script() -> str:
    return write_script(WindowsWanted(node="red", distro="Ubuntu-24.04", peers=("10.0.0.2",)))


def scripts() -> dict[str, str]:
    installer = (ROOT / "installers" / "setup.ps1").read_bytes().decode("ascii")
    return {"the script of a node": node_script(), "installers/setup.ps1": installer}


def allowed() -> dict[str, set[str]]:
    lines = (Path(__file__).parent / "commands.txt").read_text(encoding="ascii").splitlines()
    words = [line.split() for line in lines if line and not line.startswith("#")]
    return {name: set(parameters) for name, *parameters in words}


@pytest.mark.parametrize("name", scripts())
def test_a_script_parses_and_calls_what_is_documented(name: str) -> None:
    root = parse(scripts()[name])
    assert not root.has_error
    known = allowed() | {one: set(given) for one, given in functions(root).items()}
    for command, parameters in calls(root):
        assert command in known, command
        unknown = {one.removesuffix(":") for one in parameters} - known[command]
        assert not unknown, f"{command} {unknown}"
    assert not {node.type for node in walk(root)} & set(_NEWER)
    assert programs(root) <= PROGRAMS


@pytest.mark.parametrize("name", scripts())
def test_a_script_is_ascii_with_the_line_ends_of_windows(name: str) -> None:
    text = scripts()[name]
    assert text.isascii()
    assert text.count("\r\n") == text.count("\n") > 100
    assert "\t" not in text


def test_a_script_that_is_broken_or_calls_another_command_is_found() -> None:
    assert parse("if ($a { 'b' }").has_error
    assert list(calls(parse("Format-Disk -Number 0"))) == [("Format-Disk", ("-Number",))]
    assert {"&&"} <= {node.type for node in walk(parse("a && b"))}


def test_the_firewall_is_never_opened_to_all() -> None:
    assert "DefaultInboundAction" not in node_script()
    rules = [given for name, given in calls(parse(node_script())) if name.startswith("New-NetFire")]
    assert len(rules) == 2
    assert all("-RemoteAddresses" in given for given in rules)
