"""What the script reads from outputs of Windows, in several languages and encodings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.nodes.transport.local import read_distro_names
from app.provisioning.windows.facts import WindowsWanted
from app.provisioning.windows.script import write_script
from tests.powershell.fake_windows import FakeWindows
from tests.powershell.interpreter import Interpreter

RECORDED = Path(__file__).resolve().parents[1] / "recorded" / "windows"
SCRIPT = write_script(WindowsWanted(node="red", distro="Ubuntu-24.04"))


def recorded(name: str) -> str:
    return (RECORDED / name).read_text(encoding="utf-8")


def ask(folder: Path, program: str, name: str, function: str, **parameters: Any) -> Any:
    """Call a function of the script where a program prints a recorded output."""
    pc = FakeWindows(folder=folder)
    pc.outputs = {program: recorded(name).splitlines()}
    return pc.call(SCRIPT, function, **parameters)


@pytest.mark.parametrize(
    ("language", "version"),
    [("en", "2.6.2.0"), ("ja", "2.6.3.0"), ("zh", "2.6.1.0"), ("de", "2.7.7.0")],
)
@pytest.mark.parametrize("as_read", ["utf-8", "utf-16 read byte by byte"])
def test_the_version_of_wsl(tmp_path: Path, language: str, version: str, as_read: str) -> None:
    pc = FakeWindows(folder=tmp_path)
    text = recorded(f"wsl-version.{language}.txt")
    if as_read != "utf-8":  # what PowerShell makes of UTF-16 in a console of one byte a character
        text = text.encode("utf-16").decode("latin-1").replace("\n", "")
    pc.wsl_version = tuple(text.splitlines())
    wsl = str(tmp_path / "Program Files/WSL/wsl.exe")
    assert pc.call(SCRIPT, "Get-WslVersion", Wsl=wsl) == version
    pc.wsl_version = ("Invalid command line option: --version",)
    assert pc.call(SCRIPT, "Get-WslVersion", Wsl=wsl) is None


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("powercfg-standbyidle.en.txt", 1800),
        ("powercfg-standbyidle.de.txt", 300),
        ("powercfg-standbyidle.ru.txt", 0),
        ("powercfg-diskidle.zh.txt", 1200),
    ],
)
def test_the_time_until_sleep_on_mains_power(tmp_path: Path, name: str, seconds: int) -> None:
    found = ask(tmp_path, "powercfg.exe", name, "Get-PowerTime", Name="STANDBYIDLE")
    assert found == seconds
    hidden = FakeWindows(folder=tmp_path)
    hidden.outputs = {"powercfg.exe": ["The power scheme does not have that setting."]}
    assert hidden.call(SCRIPT, "Get-PowerTime", Name="HIBERNATEIDLE") is None


@pytest.mark.parametrize(
    ("language", "count", "last"),
    [("en", 5, (51517, 51616)), ("es", 4, (50000, 50059)), ("zh", 4, (54235, 54235))],
)
def test_ports_that_windows_has_set_aside(
    tmp_path: Path, language: str, count: int, last: tuple[int, int]
) -> None:
    name = f"excludedportrange.{language}.txt"
    found = ask(tmp_path, "netsh.exe", name, "Get-ExcludedPorts")
    assert len(found) == count
    assert (found[-1]["first"], found[-1]["last"]) == last


@pytest.mark.parametrize(
    ("language", "first", "last"), [("en", 49152, 65535), ("fr", 49152, 65535), ("zh", 1024, 15000)]
)
def test_ports_that_windows_gives_to_programs(
    tmp_path: Path, language: str, first: int, last: int
) -> None:
    found = ask(tmp_path, "netsh.exe", f"dynamicportrange.{language}.txt", "Get-DynamicPorts")
    assert (found["first"], found["last"]) == (first, last)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16-le", "utf-16"])
def test_the_names_of_distros(encoding: str) -> None:
    data = recorded("wsl-list-quiet.txt").replace("\n", "\r\n").encode(encoding)
    assert read_distro_names(data) == ("Ubuntu-24.04", "Debian")


def test_every_recorded_file_names_its_source() -> None:
    listed = recorded("SOURCES.md")
    files = [path.name for path in RECORDED.glob("*.txt")]
    assert files
    assert [name for name in files if f"`{name}`" not in listed] == []


def test_the_interpreter_refuses_what_it_does_not_know() -> None:
    with pytest.raises(NotImplementedError, match="Format-Disk"):
        Interpreter({}, {}).run("Format-Disk -Number 0")
