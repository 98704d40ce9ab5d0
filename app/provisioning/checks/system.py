"""Judge a node's system: home folder, memory, clock, names, rights, and threats to a run."""

from __future__ import annotations

from collections.abc import Sequence

from agents.contract.names import is_word
from agents.contract.shares import NETWORK_FILE_SYSTEMS
from app.nodes.shared_homes import explain_held_home, explain_shared_home
from app.presentation.limit_text import find_limit, say_raise
from app.provisioning import system_repairs
from app.provisioning.check_row import CheckedGroup, CheckedNode, CheckRow, Status, make_row
from app.provisioning.repairs import Repair
from app.shell_words import posix_command
from app.text import show_bytes, show_list

MIN_FREE_INODES = 50_000
"""Minimum of free inodes for an environment and its caches; torch alone has 30,000 files."""
ENOUGH_MEMORY_BYTES = 7 << 30
"""RAM below which loading a model is likely to fail, in bytes; PCs sold with 8 GB show less."""
ENOUGH_FREE_MEMORY_BYTES = 2 << 30
"""RAM of torch, its libraries and the data loader before any model, in bytes."""
NEEDS_SWAP_BYTES = 20 << 30
"""RAM below which loading a model should have swap for its peak, in bytes."""
ENOUGH_SHM_BYTES = 1 << 30
"""Minimum of /dev/shm for NCCL and data loaders, in bytes; containers have 64 MiB."""
WINDOWS_FILE_SYSTEMS = ("9p", "v9fs", "drvfs", "virtiofs")


def judge_home(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Check that the agent's folder can be written and that programs start from it."""
    system = node.examination.system
    home = system.home or "the agent's folder"
    mount = posix_command("findmnt", "-T", home)
    evidence = f"{home}, {system.home_file_system or 'file system not known'}"
    if system.home_writable is False:
        text = f"{home} cannot be written: it is read-only or belongs to another user"
        fix = f"Run there: {mount}; then mount it with rw, or chown it to your user"
    elif system.home_executable is False:
        text = f"no program starts from {home}: it is mounted with noexec"
        fix = f"Remove noexec from that mount: {mount}; sudo mount -o remount,exec MOUNT"
    elif system.home_writable is None or system.home_executable is None:
        text = f"it could not be tested whether {home} can be written and used"
        test = posix_command("touch", f"{home}/test")
        fix = f"Run there: {test} && {posix_command('df', '-h', home)}"
        return (make_row("home", node.name, "unknown", text, fix, evidence=evidence),)
    elif system.home_file_system in NETWORK_FILE_SYSTEMS:
        text = f"{home} lies on a shared drive, which other nodes may use at the same time"
        fix = (
            "Set RACKLESS_AGENT_HOME in that user's environment to a folder on the node's own disk"
        )
        return (make_row("home", node.name, "warn", text, fix, evidence=evidence),)
    else:
        text = f"{home} can be written, and programs start from it"
        return (make_row("home", node.name, "pass", text, "", evidence=evidence),)
    return (make_row("home", node.name, "fail", text, fix, evidence=evidence),)


def judge_shared_homes(group: CheckedGroup) -> tuple[CheckRow, ...]:
    """Report nodes whose agents have one folder, in which they disturb each other."""
    facts = {name: node.facts for name, node in group.nodes.items()}
    rows = []
    for names in group.shared_homes:
        text, fix = explain_shared_home(names, facts)
        rows += [make_row("shared-home", name, "fail", text, fix) for name in names]
    known = {name for names in group.shared_homes for name in names}
    for name, node in facts.items():
        # The other PC may be no node here.
        if node.recorder == "elsewhere" and name not in known:
            text, fix = explain_held_home(name)
            rows.append(make_row("shared-home", name, "fail", text, fix))
    return tuple(rows)


def judge_inodes(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Check the number of files that the disk can still hold: it may be full with space left."""
    system = node.examination.system
    free = system.inodes_free
    # btrfs and others have no limit and report 0.
    if system.inodes == 0:
        return (make_row("inodes", node.name, "pass", "its file system has no limit of files"),)
    if free is None:
        fix = "Run there: df -i ~"
        return (make_row("inodes", node.name, "unknown", "free inodes are not known", fix),)
    evidence = f"{free} of {system.inodes} inodes are free"
    if free >= MIN_FREE_INODES:
        return (
            make_row("inodes", node.name, "pass", f"room for {free} files", "", evidence=evidence),
        )
    text = f"the disk can hold only {free} more files, however much space it has"
    fix = "Delete folders with many small files there, such as caches; df -i shows where"
    # A tenth is less than torch alone needs.
    status: Status = "fail" if free < MIN_FREE_INODES // 10 else "warn"
    return (make_row("inodes", node.name, status, text, fix, evidence=evidence),)


def judge_memory(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Check the node's RAM, and how much other programs leave."""
    facts = node.facts
    total, free = facts.memory_bytes, facts.memory_available_bytes
    if total is None or free is None:
        fix = "Run there: free -h"
        return (make_row("memory", node.name, "unknown", "its RAM is not known", fix),)
    limit = find_limit(facts, "memory")
    evidence = f"{show_bytes(free)} of {show_bytes(total)} available"
    if limit is not None:
        whole = show_bytes(facts.pc_memory_bytes)
        evidence += f"; limited by {limit.place}, while the PC has {whole}"
        if total < ENOUGH_MEMORY_BYTES or free < ENOUGH_FREE_MEMORY_BYTES:
            text = (
                f"{limit.place} leaves this node {show_bytes(total)} of its PC's {whole}, "
                f"{show_bytes(free)} of it free: little for loading models"
            )
            fix = say_raise(limit)
            return (make_row("memory", node.name, "warn", text, fix, evidence=evidence),)
    if free < ENOUGH_FREE_MEMORY_BYTES:
        text = f"other programs leave only {show_bytes(free)} of RAM"
        fix = "Close programs there; this lists the largest: ps aux --sort=-rss | head"
        return (make_row("memory", node.name, "warn", text, fix, evidence=evidence),)
    if total < ENOUGH_MEMORY_BYTES:
        text = f"{show_bytes(total)} of RAM is little for loading models"
        fix = "Train small models there, add RAM, or leave the node out of the run"
        return (make_row("memory", node.name, "warn", text, fix, evidence=evidence),)
    return (make_row("memory", node.name, "pass", evidence, "", evidence=evidence),)


def judge_swap(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Check that a node with little RAM has swap for the peak while a model loads."""
    swap, memory = node.examination.system.swap_bytes, node.facts.memory_bytes
    if swap is None:
        fix = "Run there: swapon --show"
        return (make_row("swap", node.name, "unknown", "its swap is not known", fix),)
    evidence = f"swap {show_bytes(swap)}, RAM {show_bytes(memory)}"
    if swap == 0 and memory is not None and memory < NEEDS_SWAP_BYTES:
        limit = find_limit(node.facts, "swap")
        if limit is not None:
            text = f"{limit.place} permits no swap, so a short peak of memory ends a run"
            return (make_row("swap", node.name, "warn", text, say_raise(limit), evidence=evidence),)
        text = "without swap, a short peak of memory ends a run instead of slowing it down"
        fix = (
            "sudo fallocate -l 8G /swapfile && sudo chmod 600 /swapfile && sudo mkswap /swapfile "
            "&& sudo swapon /swapfile"
        )
        repair = None if node.facts.wsl else system_repairs.add_swap()
        return (make_row("swap", node.name, "warn", text, fix, repair, evidence=evidence),)
    text = f"{show_bytes(swap)} of swap" if swap else "no swap, and RAM enough without"
    return (make_row("swap", node.name, "pass", text, "", evidence=evidence),)


def judge_shm(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Check /dev/shm, through which data loaders and GPUs of one node exchange tensors."""
    system = node.examination.system
    size, free = system.shm_bytes, system.shm_free_bytes
    if size is None or free is None:
        text = "there is no /dev/shm, or it cannot be read"
        return (make_row("shm", node.name, "unknown", text, "Run there: df -h /dev/shm"),)
    evidence = f"{show_bytes(free)} of {show_bytes(size)} free in /dev/shm"
    if min(size, free) >= ENOUGH_SHM_BYTES:
        return (make_row("shm", node.name, "pass", evidence, "", evidence=evidence),)
    text = f"/dev/shm has only {show_bytes(min(size, free))} for tensors between processes"
    fix = "sudo mount -o remount,size=50% /dev/shm"
    memory = node.facts.memory_bytes
    repair = (
        system_repairs.grow_shared_memory(size, memory) if memory and size < memory // 2 else None
    )
    # More than half is in use: old files are the cause, not the limit.
    if free < size // 2:
        fix, repair = "Delete old files in /dev/shm there: ls -l /dev/shm", None
    return (make_row("shm", node.name, "warn", text, fix, repair, evidence=evidence),)


def judge_sync(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Check that a time server keeps the clock, so that it stays right."""
    system = node.examination.system
    synchronised, service = system.clock_synchronised, system.clock_service
    evidence = f"kernel: {_say(synchronised, 'synchronised', 'not synchronised')}; " + (
        f"service: {service or 'not known'}"
    )
    if node.facts.wsl is not None:
        text = "Windows keeps the clock of WSL"
        return (make_row("time-sync", node.name, "pass", text, "", evidence=evidence),)
    if synchronised:
        text = "a time server keeps its clock"
        return (make_row("time-sync", node.name, "pass", text, "", evidence=evidence),)
    if synchronised is None and service is None:
        fix = "Run there: timedatectl"
        text = "it is not known whether a time server keeps its clock"
        return (make_row("time-sync", node.name, "unknown", text, fix, evidence=evidence),)
    text = "no time server keeps its clock, so it will drift from the others"
    fix = "sudo timedatectl set-ntp true"
    if service == "none":
        fix = "sudo apt-get install -y systemd-timesyncd && sudo timedatectl set-ntp true"
    elif service == "on":
        text = "its time service runs, but has reached no server yet"
        fix = "Run there: timedatectl timesync-status; UDP port 123 must be open to the internet"
    known = {"off": True, "none": False}
    repair = (
        system_repairs.synchronise_clock(has_service=known[service]) if service in known else None
    )
    return (make_row("time-sync", node.name, "warn", text, fix, repair, evidence=evidence),)


def judge_sudo(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Check that this login can apply fixes that need an administrator."""
    sudo = node.examination.system.sudo
    evidence = f"sudo: {sudo or 'not known'}"
    words = {
        "root": "this login is the administrator's",
        "free": "this login may use sudo without a password",
        "password": "this login may use sudo with its password",
    }
    if sudo is None:
        text = "it is not known whether this login may use sudo"
        return (
            make_row("sudo", node.name, "unknown", text, "Run there: sudo -v", evidence=evidence),
        )
    if sudo == "none":
        text = "this login may not use sudo: fixes that need an administrator must be run by one"
        fix = "An administrator of that PC can run: usermod -aG sudo USER"
        return (make_row("sudo", node.name, "warn", text, fix, evidence=evidence),)
    return (make_row("sudo", node.name, "pass", words[sudo], "", evidence=evidence),)


def judge_hostname(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Check that the node's hostname resolves to an address at which others reach it."""
    found, name = node.examination.system.hostname_addresses, node.facts.hostname
    if found is None:
        text = f"its own name {name} could not be resolved"
        return (
            make_row(
                "hostname",
                node.name,
                "unknown",
                text,
                f"Run there: {posix_command('getent', 'hosts', name)}",
            ),
        )
    evidence = f"{name}: {show_list(found) or 'no address'}"
    text, fix, repair = _find_wrong_name(node, found)
    if text:
        row = make_row("hostname", node.name, "warn", text, fix, repair, evidence=evidence)
    else:
        text = f"its own name {name} is {show_list(found)}"
        row = make_row("hostname", node.name, "pass", text, "", evidence=evidence)
    return (row,)


def _find_wrong_name(node: CheckedNode, found: Sequence[str]) -> tuple[str, str, Repair | None]:
    """Return the problem with the addresses of a node's hostname, and the fix; empty if none."""
    name, address = node.facts.hostname, node.facts.address
    own = {one.address for one in node.facts.interfaces} | {address}
    has_ipv4 = any(one and ":" not in one and not one.startswith("127.") for one in own)
    # A PC without IPv4 is reached by IPv6; other programs ask for IPv4.
    usable = [one for one in found if ":" not in one or not has_ipv4]
    looped = next((one for one in usable if one.startswith("127.")), "")
    # Without interfaces, the node's addresses could not be read.
    foreign = [one for one in usable if one not in own] if node.facts.interfaces else []
    if not usable:
        only = f", only {show_list(found)}" if found else ""
        text = (
            f"its own name {name} has no IPv4 address{only}; torchrun and Ray started by hand "
            "need one"
        )
        line = f"{address or 'ADDRESS'} {name if is_word(name) else 'ITS-NAME'}"
        return text, f"Add a line to /etc/hosts there: {line}", None
    if looped:
        # Ubuntu's installer writes 127.0.1.1.
        text = (
            f"its own name {name} means {looped}, which is loopback: runs of Rackless name the "
            "address themselves, but torchrun, Gloo or Ray started by hand would wait there"
        )
        fix = f"In /etc/hosts there, replace {looped} by the node's address in your network"
        is_plain = is_word(name) and node.facts.wsl is None
        if looped == "127.0.1.1" and address and is_plain:
            return text, fix, system_repairs.name_own_address(name, address)
        return text, fix, None
    if foreign and has_ipv4:
        text = (
            f"its own name {name} means {foreign[0]}, which is no address of this PC: programs "
            "that look up their own address, such as torchrun, would wait for another PC"
        )
        find = posix_command("grep", "-w", "--", name, "/etc/hosts")
        fix = (
            f"Let {name} mean {address or 'its own address'} there; this finds the other "
            f"address: {find} || {posix_command('getent', 'ahostsv4', name)}"
        )
        return text, fix, None
    return "", "", None


def judge_sleep(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Check that the PC does not suspend during a run."""
    system = node.examination.system
    # WSL suspends with Windows; systems without systemd do not suspend by themselves.
    if node.facts.wsl is not None or system.first_process != "systemd":
        return ()
    if system.may_sleep is None:
        text = "it is not known whether this PC may suspend"
        fix = "Run there: systemctl status sleep.target"
        return (make_row("sleep", node.name, "unknown", text, fix),)
    if not system.may_sleep:
        return (make_row("sleep", node.name, "pass", "nothing suspends this PC"),)
    text = "its desktop may suspend this PC in the middle of a run"
    fix = "sudo systemctl mask sleep.target suspend.target hibernate.target hybrid-sleep.target"
    evidence = "a display manager is enabled; sleep.target is not masked"
    return (
        make_row(
            "sleep", node.name, "warn", text, fix, system_repairs.forbid_sleep(), evidence=evidence
        ),
    )


def judge_logout(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Check that a logout does not end a run."""
    system = node.examination.system
    if system.first_process != "systemd":
        return ()
    evidence = (
        f"KillUserProcesses={_say(system.ends_at_logout, 'yes', 'no')}, "
        f"linger={_say(system.lingers, 'yes', 'no')}"
    )
    if system.ends_at_logout is None:
        text = "it is not known whether a logout ends the user's programs"
        fix = "Run there: busctl get-property org.freedesktop.login1 /org/freedesktop/login1 \
org.freedesktop.login1.Manager KillUserProcesses"
        return (make_row("logout", node.name, "unknown", text, fix, evidence=evidence),)
    if system.ends_at_logout and not system.lingers:
        text = "systemd ends all programs of this user at logout, runs too"
        fix = "sudo loginctl enable-linger $USER"
        repair = system_repairs.keep_after_logout(system.user) if system.user else None
        return (make_row("logout", node.name, "fail", text, fix, repair, evidence=evidence),)
    text = "runs outlive a logout"
    return (make_row("logout", node.name, "pass", text, "", evidence=evidence),)


def _say(value: bool | None, yes: str, no: str) -> str:
    return "not known" if value is None else yes if value else no
