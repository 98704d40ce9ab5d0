"""A Windows PC with WSL, as far as the scripts see it, on a folder of this PC.

Files are real, and so is the shell script inside the distro, which gets a root folder of its own.
Task scheduler, firewall, services and power settings are tables.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.powershell.interpreter import (
    ArrayList,
    Command,
    Failure,
    Interpreter,
    Table,
    regex_match,
    regex_matches,
    unroll,
)

_PASSWD = "root:x:0:0::/root:/bin/sh\nann:x:{uid}:{gid}::/home/ann:/bin/sh\n"


def to_plain(value: Any) -> Any:
    """Return what ConvertTo-Json makes of a value."""
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, list) else value


def from_plain(value: Any) -> Any:
    """Return what ConvertFrom-Json makes of a value."""
    if isinstance(value, dict):
        return Table({key: from_plain(item) for key, item in value.items()})
    return [from_plain(item) for item in value] if isinstance(value, list) else value


def _sorted(items: Iterable[Any], is_unique: bool) -> list[Any]:
    return sorted(set(items) if is_unique else items)


@dataclass(kw_only=True)
class FakeWindows:
    """State of the PC; the tests read and change it."""

    folder: Path
    is_admin: bool = True
    build: int = 22631
    wsl_version: tuple[str, ...] = ("WSL version: 2.4.13.0", "Kernel version: 5.15.167.4-1")
    distros: dict[str, int] = field(default_factory=lambda: {"Ubuntu-24.04": 2})
    rules: dict[str, Table] = field(default_factory=dict)
    tasks: dict[str, Any] = field(default_factory=dict)
    power_s: dict[str, int] = field(
        default_factory=lambda: {"STANDBYIDLE": 1800, "HIBERNATEIDLE": 10800}
    )
    agent: list[str] = field(default_factory=lambda: ["Disabled", "Stopped"])
    answers: list[str] = field(default_factory=list)
    password: str | None = "secret"
    ranks: tuple[str, ...] = ()
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    shutdowns: int = 0
    installed: list[str] = field(default_factory=list)
    outputs: dict[str, list[str]] = field(default_factory=dict)
    """Output of a program, whatever its arguments are; others act on this PC."""

    def __post_init__(self) -> None:
        for name in ("Program Files/WSL", "Users/ann/AppData/Local"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "Program Files/WSL/wsl.exe").touch()
        root = self.root
        if not root.exists():
            (root / "etc/ssh").mkdir(parents=True)
            (root / "home/ann").mkdir(parents=True)
            passwd = _PASSWD.format(uid=os.getuid() or 1000, gid=os.getgid() or 1000)
            (root / "etc/passwd").write_text(passwd)

    @property
    def root(self) -> Path:
        """Root folder of the distro."""
        return self.folder / "distro"

    @property
    def wslconfig(self) -> Path:
        return self.folder / "Users/ann/.wslconfig"

    def run(self, script: str, **parameters: Any) -> tuple[int, list[Any]]:
        """Run a script on this PC."""
        return self._start().run(script, **parameters)

    def call(self, script: str, function: str, **parameters: Any) -> Any:
        """Call one function of a script on this PC."""
        one = self._start()
        one.define(script)
        return one.call(function, **parameters)

    def _start(self) -> Interpreter:
        one = Interpreter(self.commands(), self.statics())
        one.environ = {
            "PROGRAMFILES": str(self.folder / "Program Files"),
            "SYSTEMROOT": str(self.folder / "Windows"),
            "USERPROFILE": str(self.folder / "Users/ann"),
            "LOCALAPPDATA": str(self.folder / "Users/ann/AppData/Local"),
            "USERDOMAIN": "PC",
            "USERNAME": "ann",
        }
        self._interpreter = one
        return one

    # ---------------------------------------------------------------- commands

    def commands(self) -> dict[str, Command]:
        """Return the commands of this PC."""
        return {
            "&": self._native,
            "Write-Host": lambda named, words, piped: self.said.extend(map(str, words or piped)),
            "Read-Host": lambda named, words, piped: self._answer(named["prompt"]),
            "Get-Date": lambda named, words, piped: "20261126-120000",
            "Sort-Object": lambda named, words, piped: _sorted(piped, "unique" in named),
            "ConvertTo-Json": lambda named, words, piped: json.dumps(
                to_plain(named["inputobject"])
            ),
            "ConvertFrom-Json": lambda named, words, piped: from_plain(
                json.loads(named["inputobject"])
            ),
            "Get-Command": lambda named, words, piped: named["name"],
            "New-TimeSpan": lambda named, words, piped: 60 * named.get("minutes", 0),
            "New-Object": self._new_object,
            **self._file_commands(),
            **self._task_commands(),
            **self._firewall_commands(),
            **self._service_commands(),
        }

    def _file_commands(self) -> dict[str, Command]:
        def move(named: dict[str, Any], words: list[Any], piped: list[Any]) -> None:
            os.replace(named["literalpath"], named["destination"])

        def copy(named: dict[str, Any], words: list[Any], piped: list[Any]) -> None:
            shutil.copyfile(named["literalpath"], named["destination"])

        return {
            "Join-Path": lambda named, words, piped: os.path.join(
                named["path"], named["childpath"].replace("\\", "/")
            ),
            "Test-Path": lambda named, words, piped: self._exists(named["literalpath"]),
            "New-Item": lambda named, words, piped: os.makedirs(named["path"]),
            "Move-Item": move,
            "Copy-Item": copy,
            "Remove-Item": lambda named, words, piped: os.unlink(named["literalpath"]),
            "Get-ChildItem": lambda named, words, piped: [
                SimpleNamespace(GetValue={"DistributionName": name, "Version": version}.get)
                for name, version in self.distros.items()
            ],
        }

    def _task_commands(self) -> dict[str, Command]:
        def register(named: dict[str, Any], words: list[Any], piped: list[Any]) -> Any:
            is_boot = named["trigger"] == "boot"
            assert ("password" in named) == is_boot
            kind = "MSFT_TaskBootTrigger" if is_boot else "MSFT_TaskLogonTrigger"
            self.tasks[named["taskname"]] = SimpleNamespace(
                Triggers=[SimpleNamespace(CimClass=SimpleNamespace(CimClassName=kind))],
                Actions=[named["action"]],
                Settings=SimpleNamespace(ExecutionTimeLimit=named["settings"]),
                state="Ready",
            )
            return self.tasks[named["taskname"]]

        def start(named: dict[str, Any], words: list[Any], piped: list[Any]) -> None:
            self.tasks[named["taskname"]].state = "Running"

        def remove(named: dict[str, Any], words: list[Any], piped: list[Any]) -> None:
            assert named["confirm"] is False
            del self.tasks[named["taskname"]]

        def set_limit(named: dict[str, Any], words: list[Any], piped: list[Any]) -> str:
            return f"PT{named['executiontimelimit']}S"

        def credential(named: dict[str, Any], words: list[Any], piped: list[Any]) -> Any:
            if self.password is None:
                return None
            secret = SimpleNamespace(Password=self.password)
            return SimpleNamespace(UserName=named["username"], GetNetworkCredential=lambda: secret)

        set_limit.switches = {  # type: ignore[attr-defined]
            "allowstartifonbatteries",
            "dontstopifgoingonbatteries",
            "startwhenavailable",
        }
        register.switches = {"force"}  # type: ignore[attr-defined]
        return {
            "Get-ScheduledTask": lambda named, words, piped: self.tasks.get(named["taskname"]),
            "New-ScheduledTaskAction": lambda named, words, piped: SimpleNamespace(
                Execute=named["execute"], Arguments=named["argument"]
            ),
            "New-ScheduledTaskTrigger": lambda named, words, piped: (
                "boot" if "atstartup" in named else "logon"
            ),
            "New-ScheduledTaskPrincipal": lambda named, words, piped: named["userid"],
            "New-ScheduledTaskSettingsSet": set_limit,
            "Register-ScheduledTask": register,
            "Start-ScheduledTask": start,
            "Unregister-ScheduledTask": remove,
            "Get-Credential": credential,
        }

    def _firewall_commands(self) -> dict[str, Command]:
        def listed(named: dict[str, Any], words: list[Any], piped: list[Any]) -> list[Any]:
            if not self.is_admin:
                raise Failure("Access is denied.")
            return list(self.rules.values())

        def add(named: dict[str, Any], words: list[Any], piped: list[Any]) -> Any:
            assert named["direction"] == "Inbound"
            assert named["protocol"] == "TCP"
            assert named["vmcreatorid"] == "{40E0AC32-46A5-438A-A0B2-2B479E8F2E90}"
            self.rules[named["name"]] = Table(
                Name=named["name"],
                RemoteAddresses=unroll(named["remoteaddresses"]),
                LocalPorts=unroll(named.get("localports", "Any")),
            )
            return self.rules[named["name"]]

        return {
            "Get-NetFirewallHyperVRule": listed,
            "New-NetFirewallHyperVRule": add,
            "Remove-NetFirewallHyperVRule": lambda named, words, piped: [
                self.rules.pop(named["name"]) and None
            ],
        }

    def _service_commands(self) -> dict[str, Command]:
        def set_state(index: int, value: Callable[[dict[str, Any]], str]) -> Command:
            def change(named: dict[str, Any], words: list[Any], piped: list[Any]) -> None:
                assert named["name"] == "ssh-agent"
                self.agent[index] = value(named)

            return change

        return {
            "Get-Service": lambda named, words, piped: SimpleNamespace(
                StartType=self.agent[0], Status=self.agent[1]
            ),
            "Set-Service": set_state(0, lambda named: named["startuptype"]),
            "Start-Service": set_state(1, lambda named: "Running"),
            "Stop-Service": set_state(1, lambda named: "Stopped"),
        }

    # ---------------------------------------------------------------- programs

    def _native(self, named: dict[str, Any], words: list[Any], piped: list[Any]) -> list[str]:
        self._interpreter.scopes[0]["lastexitcode"] = 0
        words = list(map(str, words))
        if named["program"] in self.outputs:
            return self.outputs[named["program"]]
        if named["program"] == "powercfg.exe":
            return self._powercfg(words)
        if named["program"] == "netsh.exe":
            is_dynamic = "dynamicportrange" in words
            return ["Start : 49152", "Number : 16384"] if is_dynamic else ["  50000   50059  *"]
        assert named["program"].endswith("wsl.exe"), named
        if words == ["--version"]:
            return list(self.wsl_version)
        if words == ["--shutdown"]:
            self.shutdowns += 1
            return []
        if words[0] == "--install":
            self.installed.append(words[-1])
            return []
        assert words[:2] == ["-d", "Ubuntu-24.04"], words
        if "pgrep" in words:
            return list(self.ranks)
        done = subprocess.run(
            words[words.index("--exec") + 1 :],
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": self._path(), "ROOT_DIR": str(self.root)},
        )
        self._interpreter.scopes[0]["lastexitcode"] = done.returncode
        self.said.append(done.stderr)
        return done.stdout.splitlines()

    def _path(self) -> str:
        """Return a PATH on which apt-get installs an SSH server into the distro's root."""
        folder = self.folder / "bin"
        if not folder.exists():
            folder.mkdir()
            server = "$ROOT_DIR/usr/sbin/sshd"
            for name, text in (
                ("apt-get", f'mkdir -p "$ROOT_DIR/usr/sbin"; touch {server}; chmod +x {server}'),
                ("ssh-keygen", "exit 0"),
                ("systemctl", "exit 0"),
            ):
                (folder / name).write_text(f"#!/bin/sh\n{text}\n")
                (folder / name).chmod(0o755)
        return f"{folder}:/usr/bin:/bin"

    def _powercfg(self, words: list[str]) -> list[str]:
        if words[0] == "/query":
            seconds = self.power_s[words[-1]]
            return [
                "      Unites de parametres possibles : Secondes",
                f"    Index actuel (secteur) : 0x{seconds:08x}",
                "    Index actuel (batterie) : 0x00000384",
            ]
        if words[0] == "/setacvalueindex":
            self.power_s[words[-2]] = int(words[-1])
        return []

    def _answer(self, prompt: str) -> str:
        self.asked.append(prompt)
        return self.answers.pop(0) if self.answers else ""

    def _exists(self, path: str) -> bool:
        return bool(self.distros) if path.startswith("HKCU:") else os.path.exists(path)

    # ---------------------------------------------------------------- .NET

    def _new_object(self, named: dict[str, Any], words: list[Any], piped: list[Any]) -> Any:
        kind = named["typename"]
        if kind == "System.Collections.ArrayList":
            return ArrayList()
        if kind == "Security.Principal.WindowsPrincipal":
            return SimpleNamespace(IsInRole=lambda role: self.is_admin)
        return _Encoding("utf-16-le" if "Unicode" in kind else "utf-8")

    def statics(self) -> dict[str, Callable[..., Any]]:
        """Return the static members of .NET that the scripts use."""
        encodings = {65001: "utf-8", 28591: "latin-1"}
        version = SimpleNamespace(Version=SimpleNamespace(Build=self.build))
        return {
            "regex::Match": regex_match,
            "regex::Matches": regex_matches,
            "array::Reverse": lambda items: items.reverse(),
            "Environment::OSVersion": lambda: version,
            "IO.File::ReadAllBytes": lambda path: Path(path).read_bytes(),
            "IO.File::WriteAllBytes": lambda path, data: Path(path).write_bytes(data) and None,
            "IO.File::ReadAllText": lambda path: Path(path).read_bytes().decode(),
            "IO.File::WriteAllText": lambda path, text: Path(path).write_text(text) and None,
            "Convert::ToBase64String": lambda data: base64.b64encode(data).decode(),
            "Convert::FromBase64String": base64.b64decode,
            "Convert::ToInt64": int,
            "Text.Encoding::GetEncoding": lambda number: _Encoding(encodings[number]),
            "Text.Encoding::ASCII": lambda: _Encoding("ascii"),
            "Security.Principal.WindowsIdentity::GetCurrent": lambda: "PC\\ann",
            "Security.Principal.WindowsBuiltInRole::Administrator": lambda: "Administrator",
        }


class _Encoding:
    """System.Text.Encoding."""

    def __init__(self, name: str) -> None:
        self._name = name

    def GetString(self, data: bytes, start: int, count: int) -> str:  # noqa: N802
        return data[start : start + count].decode(self._name)

    def GetBytes(self, text: str) -> bytes:  # noqa: N802
        return text.encode(self._name)
