"""Judge a node in WSL: what ends it when it is idle, and what keeps the other nodes out.

Windows is asked only if WSL can start its programs; otherwise its rows are `unknown`.
"""

from __future__ import annotations

from collections.abc import Sequence

from agents.contract.requests.examination import WslFacts
from app.provisioning.check_row import CheckedNode, CheckRow, Status, make_row
from app.provisioning.checks.system import WINDOWS_FILE_SYSTEMS
from app.provisioning.windows.repair import run_script
from app.provisioning.windows.wslconfig import WslSetting, read_value
from app.shell_words import posix_command
from app.text import show_bytes

MIN_MEMORY_SHARE = 0.6
"""Minimum share of Windows' RAM for WSL on a training PC; WSL's default is half."""
SCRIPT = "Run the script for Windows of this node once on that PC: docs/windows.md"
_FILE = "%UserProfile%\\.wslconfig"


def judge_wsl_idle(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Check that WSL does not end when it has no terminal open."""
    wsl = node.examination.wsl
    if wsl is None:
        return ()
    if wsl.config is None:
        text = f"{_FILE} could not be read: WSL may end when no terminal is open"
        return (make_row("wsl-idle", node.name, "unknown", text, SCRIPT, run_script(node.name)),)
    values = {
        "instanceIdleTimeout": read_setting(wsl.config, "general", "instanceIdleTimeout"),
        "vmIdleTimeout": read_setting(wsl.config, "wsl2", "vmIdleTimeout"),
    }
    repair = run_script(node.name)
    evidence = ", ".join(f"{name}={value or 'not set'}" for name, value in values.items())
    missing = [name for name, value in values.items() if not _is_negative(value)]
    if not missing:
        text = "WSL stays on without a terminal"
        return (make_row("wsl-idle", node.name, "pass", text, "", evidence=evidence),)
    text = "WSL ends, and training with it, when no terminal is open: its idle time-outs are on"
    fix = (
        f"In {_FILE}: instanceIdleTimeout=-1 below [general] and vmIdleTimeout=-1 below [wsl2], "
        "then: wsl --shutdown"
    )
    return (make_row("wsl-idle", node.name, "warn", text, fix, repair, evidence=evidence),)


def judge_wsl_boot(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Check that WSL starts with Windows, before a user logs in."""
    wsl = node.examination.wsl
    if wsl is None:
        return ()
    evidence = "tasks of Windows that start wsl.exe"
    return (
        _judge(
            node,
            "wsl-boot",
            wsl.boot_task,
            passes="a task of Windows starts WSL",
            warns="no task of Windows starts WSL: after a restart the node stays away until "
            "a user logs in and opens it",
            unknown="it is not known whether a task of Windows starts WSL",
            evidence=evidence,
        ),
    )


def judge_wsl_firewall(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Check that the Hyper-V firewall lets the other nodes in."""
    wsl = node.examination.wsl
    if wsl is None:
        return ()
    return (
        _judge(
            node,
            "wsl-firewall",
            wsl.firewall_allows,
            passes="the Hyper-V firewall has a rule that lets the nodes in",
            warns="the Hyper-V firewall has no rule that lets the other nodes in; ping passes all "
            "the same",
            unknown="the rules of the Hyper-V firewall could not be read; the tcp rows say whether "
            "the others get in",
            evidence="rules of the Hyper-V firewall whose name begins with Rackless",
        ),
    )


def judge_wsl_memory(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Check WSL's share of the RAM of Windows."""
    # Of all of WSL, also if a limit leaves this node less.
    own = node.facts.pc_memory_bytes or node.facts.memory_bytes
    wsl = node.examination.wsl
    if wsl is None:
        return ()
    whole = wsl.windows_memory_bytes
    if whole is None or own is None:
        text = "the RAM of Windows is not known; by default, WSL gets half of it"
        return (make_row("wsl-memory", node.name, "unknown", text, SCRIPT),)
    evidence = f"{show_bytes(own)} of {show_bytes(whole)}"
    if own >= MIN_MEMORY_SHARE * whole:
        text = f"WSL has {evidence} of RAM"
        return (make_row("wsl-memory", node.name, "pass", text, "", evidence=evidence),)
    # Windows keeps a fifth for itself.
    gib = int(whole * 0.8) >> 30
    text = f"WSL has only {evidence} of RAM"
    fix = f"memory={gib}GB below [wsl2] in {_FILE}, then: wsl --shutdown"
    repair = run_script(node.name, gib)
    return (make_row("wsl-memory", node.name, "warn", text, fix, repair, evidence=evidence),)


def judge_wsl_driver(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Check that no Linux driver hides the Windows driver."""
    wsl = node.examination.wsl
    if wsl is None:
        return ()
    if wsl.linux_driver is None:
        text, fix = "its packages could not be listed", "Run there: dpkg -l 'nvidia-driver-*'"
        return (make_row("wsl-driver", node.name, "unknown", text, fix),)
    if not wsl.linux_driver:
        text = "no Linux driver is installed, as WSL needs it"
        return (make_row("wsl-driver", node.name, "pass", text),)
    text = f"the package {wsl.linux_driver} hides the driver of Windows"
    purge = posix_command("sudo", "apt-get", "purge", "-y", wsl.linux_driver)
    fix = f"{purge} && sudo apt-get autoremove -y"
    return (make_row("wsl-driver", node.name, "fail", text, fix, evidence=wsl.linux_driver),)


def judge_wsl_files(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Check that runs are not stored on a Windows drive."""
    wsl, system = node.examination.wsl, node.examination.system
    if wsl is None:
        return ()
    kind, home = system.home_file_system, system.home
    if kind is None:
        fix = "Run there: df -T ~"
        return (make_row("wsl-files", node.name, "unknown", "its disk is not known", fix),)
    if kind not in WINDOWS_FILE_SYSTEMS:
        text = "its files are on WSL's own disk"
        return (make_row("wsl-files", node.name, "pass", text, "", evidence=f"{home}: {kind}"),)
    text = f"{home} is on a drive of Windows, which is ten times slower from WSL and has no rights"
    fix = "Use a home folder below /home, not below /mnt"
    return (make_row("wsl-files", node.name, "fail", text, fix, evidence=f"{home}: {kind}"),)


def judge_wsl_sshd(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Check that the SSH server of WSL has its own port and starts automatically."""
    wsl = node.examination.wsl
    if wsl is None:
        return ()
    if wsl.sshd_ports is None:
        text, fix = "the settings of its SSH server could not be read", "Run there: sudo sshd -T"
        return (make_row("wsl-sshd", node.name, "unknown", text, fix),)
    ports = ", ".join(str(port) for port in wsl.sshd_ports)
    evidence = f"port {ports}; systemd: {'yes' if wsl.is_systemd else 'no'}"
    text, fix = _find_sshd_problem(wsl, node.facts.wsl)
    if not text:
        passes = f"its SSH server has port {ports}"
        return (make_row("wsl-sshd", node.name, "pass", passes, "", evidence=evidence),)
    repair = run_script(node.name)
    return (make_row("wsl-sshd", node.name, "warn", text, fix, repair, evidence=evidence),)


def _find_sshd_problem(wsl: WslFacts, mode: str | None) -> tuple[str, str]:
    if wsl.is_systemd is False:
        return (
            "systemd does not run in this distro, so its SSH server does not start by itself",
            "systemd=true below [boot] in /etc/wsl.conf, then on Windows: wsl --shutdown",
        )
    if 22 in (wsl.sshd_ports or ()) and mode == "mirrored":
        return (
            "its SSH server uses port 22, which WSL shares with the SSH server of Windows",
            "Port 2222 in /etc/ssh/sshd_config, then: sudo systemctl daemon-reload && sudo "
            "systemctl restart ssh.socket",
        )
    return "", ""


def read_setting(lines: Sequence[str], section: str, name: str) -> str:
    """Return the value that WSL reads for a key of .wslconfig, or "" if it is not set.

    >>> read_setting(["[wsl2]", "vmIdleTimeout = -1 # never"], "wsl2", "vmidletimeout")
    '-1'
    """
    setting = WslSetting(section=section, key=name, value="")
    return read_value("\n".join(lines), setting) or ""


def _is_negative(value: str) -> bool:
    return value.startswith("-") and value[1:].isdigit() and int(value[1:]) > 0


def _judge(
    node: CheckedNode,
    check: str,
    value: bool | None,
    *,
    passes: str,
    warns: str,
    unknown: str,
    evidence: str,
) -> CheckRow:
    if value:
        return make_row(check, node.name, "pass", passes, "", evidence=evidence)
    status: Status = "unknown" if value is None else "warn"
    text, repair = unknown if value is None else warns, run_script(node.name)
    return make_row(check, node.name, status, text, SCRIPT, repair, evidence=evidence)
