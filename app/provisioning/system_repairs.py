"""Repairs of a node's system: clock, names, sleep, logout, swap and shared memory.

Commands are those of Debian and Ubuntu with systemd.
"""

from __future__ import annotations

import hashlib
import re
import uuid

from agents.contract.repair import FileEdit, Probe, RepairStep
from app.provisioning.repairs import Repair, package_steps

SWAP_FILE = "/rackless.swap"
_SLEEP = ("sleep.target", "suspend.target", "hibernate.target", "hybrid-sleep.target")
_GIB = 1 << 30


def synchronise_clock(*, has_service: bool = True) -> Repair:
    """Return the repair that lets the system synchronise its clock.

    Args:
        has_service: True if a time service is installed.
    """
    service = () if has_service else package_steps(("systemd-timesyncd",))
    return Repair(
        id="time-sync",
        title="Synchronise the clock",
        explanation="The system asks time servers from now on and corrects its clock. Logs of "
        "several nodes can then be compared. It takes up to a minute.",
        steps=(
            *service,
            RepairStep(
                says="Switch on the system's time synchronisation",
                run=("timedatectl", "set-ntp", "true"),
                undo=("timedatectl", "set-ntp", "false"),
                done=Probe(argv=("timedatectl", "show", "-p", "NTP", "--value"), shows="yes"),
            ),
        ),
    )


def name_own_address(hostname: str, address: str) -> Repair:
    """Return the repair that maps a PC's hostname to `address` instead of loopback."""
    line = rf"^(\s*)127\.0\.1\.1(?=\s(?:.*\s)?{re.escape(hostname)}(?:\s|$))"
    return Repair(
        id="own-name",
        title=f"Let the name {hostname} mean {address}",
        explanation="Ubuntu's installer lets a PC's own name mean 127.0.1.1, which is loopback. "
        "Programs that look up their own address, such as torchrun and Ray, then wait where no "
        "peer connects. Give the PC this address for good, in its router or its network settings.",
        steps=(
            RepairStep(
                says=f"Write {address} in the line of {hostname}",
                edit=FileEdit(path="/etc/hosts", swap=((line, rf"\g<1>{address}"),)),
            ),
        ),
    )


def renew_machine_id(old: str, seed: str) -> Repair:
    """Return the repair that gives a cloned PC a machine id of its own.

    Args:
        old: hash of the present id.
        seed: what differs between the clones, so that each gets another id, and always the same.
    """
    digest = hashlib.sha256(f"rackless {old} {seed}".encode()).digest()
    machine_id = uuid.UUID(bytes=digest[:16], version=4).hex
    return Repair(
        id="new-machine-id",
        title="Give this PC a machine id of its own",
        explanation="A disk was cloned with the id by which routers give out addresses and "
        "Rackless identifies a PC. From the next restart on, this PC has an id of its own, and "
        "perhaps another address in your network. Undoing restores the old id.",
        steps=(
            RepairStep(
                says="Write a new machine id",
                edit=FileEdit(path="/etc/machine-id", content=f"{machine_id}\n", mode=0o444),
            ),
        ),
        needs_restart=True,
    )


def forbid_sleep() -> Repair:
    """Return the repair that keeps a PC from suspending."""
    return Repair(
        id="no-sleep",
        title="Keep this PC awake",
        explanation="A PC that suspends ends a run, or makes all others wait for it. It then stays "
        "on until it is shut down, also while no run is on.",
        steps=tuple(
            RepairStep(
                says=f"Forbid {target}",
                run=("systemctl", "mask", target),
                undo=("systemctl", "unmask", target),
                done=Probe(
                    argv=("systemctl", "show", "-p", "LoadState", "--value", target), shows="masked"
                ),
            )
            for target in _SLEEP
        ),
    )


def keep_after_logout(user: str) -> Repair:
    """Return the repair that lets programs of `user` continue after a logout."""
    return Repair(
        id="linger",
        title=f"Let programs of {user} continue after a logout",
        explanation="systemd then ends nothing of this user at the last logout. Runs keep "
        "training, and so does everything else that the user has started.",
        steps=(
            RepairStep(
                says=f"Let {user} linger",
                run=("loginctl", "enable-linger", user),
                undo=("loginctl", "disable-linger", user),
                done=Probe(argv=("ls", f"/var/lib/systemd/linger/{user}"), shows=".+"),
            ),
        ),
    )


def add_swap(num_gib: int = 8) -> Repair:
    """Return the repair that gives a PC a swap file of `num_gib` GiB."""
    swapped = Probe(
        argv=("swapon", "--show=NAME", "--noheadings", "--raw"),
        shows=rf"(?s)(.*\n)?{re.escape(SWAP_FILE)}(\n.*)?",
    )
    return Repair(
        id="swap",
        title=f"Add {num_gib} GiB of swap",
        explanation="A short peak of memory, such as while a model loads, then makes a run slow "
        f"instead of ending it. Takes {num_gib} GiB on the disk of /, which must not be btrfs or "
        "ZFS.",
        steps=(
            RepairStep(
                says=f"Make a file of {num_gib} GiB",
                run=("fallocate", "-l", str(num_gib * _GIB), SWAP_FILE),
                undo=("rm", "-f", SWAP_FILE),
                done=Probe(argv=("stat", "-c", "%s", SWAP_FILE), shows=str(num_gib * _GIB)),
            ),
            RepairStep(
                says="Keep other users out of it",
                run=("chmod", "600", SWAP_FILE),
                undo_note="the file is removed",
                done=swapped,
            ),
            RepairStep(
                says="Prepare it",
                run=("mkswap", SWAP_FILE),
                undo_note="the file is removed",
                done=swapped,
            ),
            RepairStep(
                says="Use it",
                run=("swapon", SWAP_FILE),
                undo=("swapoff", SWAP_FILE),
                done=swapped,
                timeout_s=600.0,
            ),
            RepairStep(
                says="Use it after a restart, too",
                edit=FileEdit(path="/etc/fstab", add=(f"{SWAP_FILE} none swap sw 0 0",)),
            ),
        ),
    )


def grow_shared_memory(now_bytes: int, ram_bytes: int) -> Repair:
    """Return the repair that lets /dev/shm grow to half of the RAM, until a restart."""
    wanted = ram_bytes // 2
    remount = ("mount", "-o")
    return Repair(
        id="shared-memory",
        title="Let /dev/shm take half of the RAM",
        explanation="Data loaders and the GPUs of one PC exchange tensors there. It takes memory "
        "only while it is used. It lasts until a restart; a line for /dev/shm in /etc/fstab would "
        "keep it.",
        steps=(
            RepairStep(
                says=f"Raise its limit from {now_bytes} to {wanted} bytes",
                run=(*remount, f"remount,size={wanted}", "/dev/shm"),
                undo=(*remount, f"remount,size={now_bytes}", "/dev/shm"),
            ),
        ),
    )
