"""Plan the changes to Windows that let a distro of WSL train with other PCs.

The script of `script.py` plans the same in PowerShell, from the same texts and settings, which it
carries as data. This module does no input or output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from app.provisioning.windows.facts import FirewallRule, StartTask, WindowsFacts, WindowsWanted
from app.provisioning.windows.wslconfig import WslSetting, merge
from app.shell_words import powershell_command

MIRRORED_BUILD = 22621
"""Oldest build of Windows with mirrored networking: Windows 11 22H2."""
LEAST_DYNAMIC_PORTS = 16384
"""Number of dynamic ports that Windows has by default; WSL reserves some of them, and with fewer
its programs fail to bind (microsoft/WSL#40984)."""
NO_RULE = "no rule of Rackless"
HIDDEN_RULES = "cannot be read without an administrator"
NO_TASK = "no such task"
AWAKE = "never sleeps or hibernates on mains power"
AGENT_RUNS = "Automatic, Running"


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One kind of change, in words that script, window and documentation share."""

    id: str
    title: str
    explanation: str
    undo: str
    needs_admin: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowsChange:
    """Change of one step on this PC."""

    id: str
    title: str
    explanation: str
    before: str | None
    """Current state; None if there is nothing yet."""
    after: str
    undo: str
    needs_admin: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowsPlan:
    node: str
    changes: tuple[WindowsChange, ...]
    problems: tuple[str, ...]
    """Problems that no script can solve, each with its remedy."""


_SSH_AGENT = Step(
    id="ssh-agent",
    title="Run the ssh-agent service",
    explanation="It keeps your unlocked SSH keys, so that Rackless can log in to nodes without a "
    "file that others could copy.",
    undo="The service gets its earlier start type and state back.",
    needs_admin=True,
)


def steps_for(wanted: WindowsWanted) -> tuple[Step, ...]:
    """Return the steps for a node in their order."""
    port, distro = wanted.ssh_port, wanted.distro
    return (
        Step(
            id="install",
            title=f"Install WSL with {distro}",
            explanation="Windows downloads it and may ask for a restart. Then start it once from "
            "the Start menu, choose a user name and a password, and run this script again. If "
            "another user of this PC has it already, run the script as that user instead.",
            undo="Not undone by this script: removing a distro deletes all files in it.",
            needs_admin=True,
        ),
        Step(
            id="wslconfig",
            title="Set up the network and the life of WSL in .wslconfig",
            explanation="WSL gets the addresses of this PC, so that other nodes reach it, and does "
            "not end when it is idle. Other lines of the file stay. It counts once WSL restarts.",
            undo="The file gets its earlier bytes back; one that was not there is deleted.",
            needs_admin=False,
        ),
        Step(
            id="sshd",
            title=f"Run an SSH server in {distro} on port {port}",
            explanation="Logins with a key only. Port 22 stays free for Windows, which has the "
            "same address. systemd starts the server.",
            undo="Settings and the key are removed; the package openssh-server stays.",
            needs_admin=False,
        ),
        Step(
            id="firewall",
            title="Let the other PCs of the cluster in",
            explanation="Rules of the Hyper-V firewall for the named addresses alone: the other "
            f"nodes to any TCP port, since training uses ports that change, masters to port {port}",
            undo="The rules are deleted.",
            needs_admin=True,
        ),
        Step(
            id="keep-running",
            title="Keep WSL running",
            explanation="A task starts the distro and holds it, without the usual limit of three "
            "days. Windows asks for your password, because it has to start without a login; "
            "Windows keeps it, Rackless never sees it."
            if wanted.start == "boot"
            else "A task starts the distro when you log on and holds it, without the usual limit "
            "of three days. Logging off ends WSL and what runs in it.",
            undo="The task is deleted.",
            needs_admin=True,
        ),
        Step(
            id="sleep",
            title="Keep this PC awake on mains power",
            explanation="A PC that sleeps or hibernates stops its part of a run. The screen may "
            "still switch off, and settings on battery stay.",
            undo="The earlier times are set again.",
            needs_admin=False,
        ),
        *((_SSH_AGENT,) if wanted.has_ssh_agent else ()),
    )


def settings_for(wanted: WindowsWanted, windows_build: int) -> tuple[WslSetting, ...]:
    """Return the keys that `.wslconfig` should have on this build of Windows."""
    mirrored = WslSetting(
        section="wsl2", key="networkingMode", value="mirrored", older_sections=("experimental",)
    )
    loopback = WslSetting(section="experimental", key="hostAddressLoopback", value="true")
    memory = WslSetting(section="wsl2", key="memory", value=f"{wanted.memory_gib}GB")
    has_mirrored = windows_build >= MIRRORED_BUILD
    return (
        *((mirrored,) if has_mirrored else ()),
        WslSetting(section="wsl2", key="vmIdleTimeout", value="-1"),
        *((memory,) if wanted.memory_gib is not None else ()),
        WslSetting(section="general", key="instanceIdleTimeout", value="-1"),
        *((loopback,) if has_mirrored else ()),
    )


def rules_for(wanted: WindowsWanted) -> tuple[FirewallRule, ...]:
    """Return the firewall rules for the known addresses of the cluster."""
    peers = tuple(sorted(set(wanted.peers)))
    everyone = tuple(sorted({*wanted.peers, *wanted.masters}))
    rules = []
    if peers:
        rules.append(FirewallRule(name="Rackless-peers", addresses=peers, ports=()))
    if everyone:
        port = str(wanted.ssh_port)
        rules.append(FirewallRule(name="Rackless-ssh", addresses=everyone, ports=(port,)))
    return tuple(rules)


def plan_windows(facts: WindowsFacts, wanted: WindowsWanted) -> WindowsPlan:
    """Return the changes that a PC needs; empty if all is in place."""
    steps = {step.id: step for step in steps_for(wanted)}
    changes = tuple(
        WindowsChange(
            id=id_,
            title=steps[id_].title,
            explanation=steps[id_].explanation,
            before=before,
            after=after,
            undo=steps[id_].undo,
            needs_admin=steps[id_].needs_admin,
        )
        for id_, before, after in _differences(facts, wanted)
    )
    return WindowsPlan(node=wanted.node, changes=changes, problems=tuple(_problems(facts, wanted)))


def _differences(
    facts: WindowsFacts, wanted: WindowsWanted
) -> Iterator[tuple[str, str | None, str]]:
    """Yield (id, before, after) of each change."""
    if not _has_distro(facts, wanted):
        now = f"WSL {facts.wsl_version}" if facts.wsl_version else None
        yield "install", now, f"WSL with {wanted.distro}"
        return  # the other steps need the distro
    after = merge(facts.wslconfig or "", settings_for(wanted, facts.windows_build))
    if after != facts.wslconfig:
        yield "wslconfig", facts.wslconfig, after
    if facts.sshd_lacks:
        after = f"SSH server on port {wanted.ssh_port}, keys only, started by systemd"
        yield "sshd", f"lacks {', '.join(facts.sshd_lacks)}", after
    rules = rules_for(wanted)
    if facts.has_hyperv_firewall and rules:
        before = HIDDEN_RULES if facts.rules is None else show_rules(facts.rules)
        if before != show_rules(rules):
            yield "firewall", before, show_rules(rules)
    task = StartTask(
        start=wanted.start,
        execute=facts.wsl_path,
        # WSL ends a distro without a running process.
        arguments=f"-d {wanted.distro} --exec /bin/sleep infinity",
        # No limit: by default, Windows ends a task after three days.
        time_limit="PT0S",
    )
    if show_task(facts.task) != show_task(task):
        yield "keep-running", show_task(facts.task), show_task(task)
    if facts.standby_s or facts.hibernate_s:
        yield "sleep", _show_sleep(facts), AWAKE
    if wanted.has_ssh_agent and facts.ssh_agent not in (None, AGENT_RUNS):
        yield "ssh-agent", facts.ssh_agent, AGENT_RUNS


def _problems(facts: WindowsFacts, wanted: WindowsWanted) -> Iterator[str]:
    if facts.windows_build < MIRRORED_BUILD:
        yield (
            f"Windows build {facts.windows_build} has no mirrored networking, so this PC can "
            f"train alone but not with others. Update to Windows 11 22H2 (build {MIRRORED_BUILD}) "
            "or newer."
        )
    elif not facts.has_hyperv_firewall:
        yield (
            "The Hyper-V firewall cannot be asked, so its rules are not changed. Update WSL: "
            "wsl --update"
        )
    if not _has_distro(facts, wanted):
        return
    if facts.wsl_version is None:
        yield "WSL is the one that came with Windows, which ends when idle. Run: wsl --update"
    if any(one.version == 1 for one in facts.distros if _is_same(one.name, wanted.distro)):
        yield (
            f"{wanted.distro} runs on WSL 1, which has no GPU. Run: "
            + powershell_command("wsl", "--set-version", wanted.distro, 2)
        )
    if facts.sshd_lacks is None:
        yield f"{wanted.distro} does not answer. Start it once from the Start menu, then try again."
    yield from _port_problems(facts, wanted)
    if not rules_for(wanted):
        yield (
            "No address of another PC is known, so the firewall is not changed. Add the other "
            "nodes, then save this script again."
        )
    if wanted.has_ssh_agent and facts.ssh_agent is None:
        yield "There is no ssh-agent. Add the optional feature OpenSSH Client in Settings."


def _port_problems(facts: WindowsFacts, wanted: WindowsWanted) -> Iterator[str]:
    for ports in facts.excluded_ports:
        if ports.first <= wanted.ssh_port <= ports.last:
            yield (
                f"Windows has set port {wanted.ssh_port} aside for itself, so the SSH server "
                "cannot have it. Save this script again with another one: --port N"
            )
    dynamic = facts.dynamic_ports
    if dynamic is not None and dynamic.last - dynamic.first + 1 < LEAST_DYNAMIC_PORTS:
        yield (
            f"Windows gives programs only the ports {dynamic.first} to {dynamic.last}, of which "
            "WSL takes a part; connections can fail. As administrator: netsh int ipv4 set "
            "dynamicport tcp start=49152 num=16384"
        )


def show_rules(rules: tuple[FirewallRule, ...]) -> str:
    """Return firewall rules as one line, the same for equal ones in any order.

    >>> show_rules((FirewallRule(name="Rackless-ssh", addresses=("10.0.0.2",), ports=("2222",)),))
    'Rackless-ssh: TCP port 2222 from 10.0.0.2'
    """
    lines = sorted(
        f"{rule.name}: TCP {_show_ports(rule)} from {', '.join(sorted(set(rule.addresses)))}"
        for rule in rules
    )
    return "; ".join(lines) or NO_RULE


def _show_ports(rule: FirewallRule) -> str:
    return f"port {', '.join(sorted(set(rule.ports)))}" if rule.ports else "all ports"


def show_task(task: StartTask | None) -> str:
    """Return a task as one line, the same for equal ones."""
    if task is None:
        return NO_TASK
    return f"at {task.start}: {task.execute} {task.arguments}; time limit {task.time_limit}"


def _show_sleep(facts: WindowsFacts) -> str:
    times = [("sleeps", facts.standby_s), ("hibernates", facts.hibernate_s)]
    return ", ".join(f"{what} after {seconds} s" for what, seconds in times if seconds)


def _has_distro(facts: WindowsFacts, wanted: WindowsWanted) -> bool:
    return any(_is_same(one.name, wanted.distro) for one in facts.distros)


def _is_same(name: str, other: str) -> bool:
    # wsl.exe ignores case in names of distros.
    return name.lower() == other.lower()
