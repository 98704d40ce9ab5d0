"""Read the state of WSL, and of Windows if Windows programs can be run from WSL."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
from typing import Any

from agents.contract.names import MAX_TEXT_CHARACTERS
from agents.contract.node import MAX_LISTED
from agents.contract.requests.examination import WslFacts
from agents.node.examination.reading import ask, read_text

POWERSHELL = "/mnt/c/Windows/System32/WindowsPowerShell/v1.0/powershell.exe"
WINDOWS_TIMEOUT_S = 12.0
"""Maximum time for PowerShell to start and answer, in seconds."""
VM_CREATOR = "{40E0AC32-46A5-438A-A0B2-2B479E8F2E90}"
"""Id of WSL in the Hyper-V firewall."""
_QUESTION = (
    "$f=Get-NetFirewallHyperVVMSetting -PolicyStore ActiveStore -Name '" + VM_CREATOR + "' "
    "-ErrorAction SilentlyContinue;"
    "$r=@(Get-NetFirewallHyperVRule -VMCreatorId '" + VM_CREATOR + "' "
    "-ErrorAction SilentlyContinue | Where-Object {$_.Direction -eq 'Inbound' -and "
    "$_.Action -eq 'Allow' -and $_.DisplayName -like 'Rackless*'});"
    "$t=@(Get-ScheduledTask -ErrorAction SilentlyContinue | Where-Object "
    "{$_.State -ne 'Disabled' -and (@($_.Actions) | Where-Object {$_.Execute -like '*wsl*'})});"
    "$m=(Get-CimInstance Win32_ComputerSystem).TotalPhysicalMemory;"
    '@{default="$($f.DefaultInboundAction)";rules=$r.Count;tasks=$t.Count;memory=$m;'
    "profile=$env:USERPROFILE} | ConvertTo-Json -Compress"
)


def read_wsl() -> WslFacts:
    """Return the facts about WSL; those of Windows are None if it could not be asked."""
    windows = ask_windows()
    return WslFacts(
        version=_read_version(),
        is_systemd=read_text("/proc/1/comm") == "systemd",
        linux_driver=find_linux_driver(),
        config=read_config(str(windows.get("profile") or "")),
        windows_memory_bytes=_whole(windows.get("memory")),
        boot_task=None if (tasks := _whole(windows.get("tasks"))) is None else tasks > 0,
        firewall_allows=judge_firewall(windows),
        sshd_ports=read_sshd_ports(),
    )


def ask_windows() -> dict[str, Any]:
    """Return PowerShell's data on firewall, tasks and memory; empty if it cannot be asked.

    Callers must not rely on it, because Windows programs do not start from every SSH session.
    """
    answer = ask(
        [POWERSHELL, "-NoProfile", "-NonInteractive", "-Command", _QUESTION], WINDOWS_TIMEOUT_S
    )
    if answer is None or answer.code != 0:
        return {}
    # PowerShell may print warnings around the line of JSON.
    for line in answer.output.splitlines():
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return {}


def judge_firewall(windows: dict[str, Any]) -> bool | None:
    """Return whether the Hyper-V firewall permits inbound connections, from PowerShell's data."""
    default = str(windows.get("default") or "")
    if not default:
        return None
    # The value of the enum may arrive as its name or as its number.
    return default.lower() in ("allow", "2") or bool(_whole(windows.get("rules")))


def read_config(profile: str) -> tuple[str, ...] | None:
    """Return the lines of the Windows user's .wslconfig; empty without it, None if unknown."""
    folder = to_mount(profile)
    if folder is None:
        # Without the profile, the file is certain only if a single Windows user has one.
        found = glob.glob("/mnt/c/Users/*/.wslconfig")
        return decode_config(found[0]) if len(found) == 1 else None
    path = f"{folder}/.wslconfig"
    return decode_config(path) if os.path.exists(path) else ()


def to_mount(path: str) -> str | None:
    r"""Return the path at which WSL mounts a Windows path.

    >>> to_mount("C:\\Users\\Ana"), to_mount("")
    ('/mnt/c/Users/Ana', None)
    """
    match = re.fullmatch(r"([A-Za-z]):\\(.*)", path)
    return f"/mnt/{match[1].lower()}/" + match[2].replace("\\", "/") if match else None


def decode_config(path: str) -> tuple[str, ...] | None:
    """Return the lines of a Windows text file in UTF-8 or UTF-16, or None if it is unreadable."""
    with contextlib.suppress(OSError):
        with open(path, "rb") as file:
            data = file.read(1 << 16)
        # Notepad and PowerShell write UTF-16 with a byte order mark.
        wide = data.startswith((b"\xff\xfe", b"\xfe\xff"))
        text = data.decode("utf-16" if wide else "utf-8-sig", "replace")
        return tuple(line[:MAX_TEXT_CHARACTERS] for line in text.splitlines()[:MAX_LISTED])
    return None


def find_linux_driver() -> str | None:
    """Return the package of an installed Linux driver, empty if none; None without dpkg."""
    # WSL uses the driver of Windows; a Linux driver would shadow its libraries.
    answer = ask(
        ["dpkg-query", "-W", "-f=${db:Status-Abbrev} ${Package}\n", "nvidia-driver-*", "libcuda*"]
    )
    if answer is None:
        return None
    installed = [line.split()[1] for line in answer.output.splitlines() if line.startswith("ii ")]
    return installed[0] if installed else ""


def read_sshd_ports() -> tuple[int, ...] | None:
    """Return the ports of the distribution's SSH server, or None if unknown."""
    # `sshd -T` includes drop-in files and defaults, but needs root to read the host keys.
    answer = ask(["sshd", "-T"]) if os.geteuid() == 0 else None
    if answer is None or answer.code != 0:
        return parse_sshd_ports(read_text("/etc/ssh/sshd_config"))
    return parse_sshd_ports(answer.output)


def parse_sshd_ports(text: str | None) -> tuple[int, ...] | None:
    """Return the ports in an SSH server's settings.

    >>> parse_sshd_ports("port 2222"), parse_sshd_ports("#Port 2"), parse_sshd_ports(None)
    ((2222,), (22,), None)
    """
    if text is None:
        return None
    found = re.findall(r"^\s*port\s+(\d{1,5})\s*$", text, re.MULTILINE | re.IGNORECASE)
    return tuple(int(port) for port in found) or (22,)


def _read_version() -> str | None:
    answer = ask(["wslinfo", "--wsl-version"])
    return answer.output[:40] if answer is not None and answer.code == 0 else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
