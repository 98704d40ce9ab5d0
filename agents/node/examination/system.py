"""Read the state of the system for the check: home folder, clock, names, rights, sleep."""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import os
import pwd
import resource
import socket
import stat
import subprocess
import tempfile
import time
from pathlib import Path

from agents.contract.requests.examination import NO_LIMIT, Sudo, SyncService, SystemFacts
from agents.contract.shares import find_mount, parse_mounts
from agents.limits import read_swap
from agents.node.examination.reading import ask, find_program, read_text
from agents.shared.files.python_child import SAFE_FOLDER, python_environ

SHM = "/dev/shm"
SLEEP_TARGETS = ("sleep.target", "suspend.target")
# adjtimex(2): return value and status bit of an unsynchronised clock.
_TIME_ERROR, _STA_UNSYNC = 5, 0x40
_TIMEX_BYTES = 512
_SYNC_UNITS = ("systemd-timesyncd", "chrony", "chronyd", "ntp", "ntpd", "ntpsec")


def read_system(home: Path) -> SystemFacts:
    """Return the facts about the system; `home` is the agent's folder."""
    inodes = _read_inodes(home)
    swap = read_swap()
    shm = _read_space(SHM)
    temporary = os.environ.get("TMPDIR") or "/tmp"
    space = _read_space(temporary)
    return SystemFacts(
        sudo=read_sudo(),
        home=str(home),
        home_writable=try_write(home),
        home_executable=try_execute(home),
        home_file_system=find_file_system(home, read_text("/proc/self/mountinfo") or ""),
        inodes=inodes[0] if inodes else None,
        inodes_free=inodes[1] if inodes else None,
        swap_bytes=swap[0] if swap else None,
        shm_bytes=shm[0] if shm else None,
        shm_free_bytes=shm[1] if shm else None,
        clock_synchronised=read_synchronised(),
        clock_service=read_clock_service(),
        boot_id=read_text("/proc/sys/kernel/random/boot_id") or None,
        hostname_addresses=resolve_hostname(),
        first_process=read_text("/proc/1/comm") or None,
        ends_at_logout=read_ends_at_logout(),
        lingers=_read_lingers(),
        user=_read_user(),
        may_sleep=read_may_sleep(),
        temporary_folder=temporary,
        temporary_free_bytes=space[1] if space else None,
        temporary_writable=try_write(Path(temporary)),
        max_open_files=read_limit(resource.RLIMIT_NOFILE),
        max_processes=read_limit(resource.RLIMIT_NPROC),
        max_address_bytes=read_limit(resource.RLIMIT_AS),
        max_locked_bytes=read_limit(resource.RLIMIT_MEMLOCK),
    )


def read_limit(kind: int) -> int:
    """Return a limit of this process (RLIMIT_...), which its children inherit, or `NO_LIMIT`."""
    soft, _ = resource.getrlimit(kind)
    return NO_LIMIT if soft == resource.RLIM_INFINITY else soft


def read_sudo() -> Sudo | None:
    """Return how this user can run commands as root; changes nothing."""
    if os.geteuid() == 0:
        return "root"
    if find_program("sudo") is None:
        return "none"
    # -n: sudo fails instead of asking for a password.
    answer = ask(["sudo", "-n", "true"])
    if answer is None:
        return None
    if answer.code == 0:
        return "free"
    # sudo has no exit code for this; the C locale fixes its wording.
    asks = "password is required" in answer.problem or "terminal is required" in answer.problem
    return "password" if asks else "none"


def try_write(folder: Path) -> bool | None:
    """Return whether a file can be written in a folder, or None if the disk is only full."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"1")
            file.flush()
    except OSError as error:
        # ENOSPC, EDQUOT: another row of the check reports a full disk.
        return None if error.errno in (28, 122) else False
    return True


def try_execute(folder: Path) -> bool | None:
    """Return whether a program in a folder can be started, or None if none can be written there."""
    try:
        handle, name = tempfile.mkstemp(dir=folder, prefix="try-")
    except OSError:
        return None
    try:
        with os.fdopen(handle, "w") as file:
            file.write("#!/bin/sh\nexit 0\n")
        os.chmod(name, stat.S_IRWXU)
        # Only a start shows what mount options and security modules permit.
        return _starts(name)
    except OSError:
        return None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)


def _starts(program: str) -> bool | None:
    for _ in range(20):
        try:
            done = subprocess.run(
                [program],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=3,
                check=False,
                env=python_environ(os.environ),
                cwd=SAFE_FOLDER,
            )
        except PermissionError:
            return False
        except OSError as error:
            # ETXTBSY: a program that another thread is starting has inherited the descriptor.
            if error.errno != 26:
                return None
            time.sleep(0.02)
        except subprocess.SubprocessError:
            return None
        else:
            return done.returncode == 0
    return None


def find_file_system(folder: Path, mounts: str) -> str | None:
    """Return the file system type of a folder, from the text of /proc/self/mountinfo."""
    mount = find_mount(os.path.realpath(folder), parse_mounts(mounts))
    return None if mount is None else mount.kind


def read_synchronised() -> bool | None:
    """Return whether the clock is synchronised, according to the kernel."""
    with contextlib.suppress(OSError, AttributeError):
        adjtimex = ctypes.CDLL(None, use_errno=True).adjtimex
        # struct timex with modes 0 only reads; the status is the int after four longs.
        timex = ctypes.create_string_buffer(_TIMEX_BYTES)
        state = adjtimex(timex)
        if state >= 0:
            offset = 5 * ctypes.sizeof(ctypes.c_long)
            status = ctypes.c_int.from_buffer(timex, offset).value
            return state != _TIME_ERROR and not status & _STA_UNSYNC
    return None


def read_clock_service() -> SyncService | None:
    """Return the state of the time service, or None if systemd does not answer."""
    answer = ask(["timedatectl", "show", "--property=NTP", "--property=CanNTP"])
    if answer is not None and answer.code == 0:
        shown = dict(line.split("=", 1) for line in answer.output.splitlines() if "=" in line)
        if shown.get("NTP") == "yes":
            return "on"
        if shown.get("CanNTP") == "yes":
            return "off"
        # timedatectl does not know time services that are not registered with it, such as chrony.
        states = ask(["systemctl", "is-active", *_SYNC_UNITS])
        if states is not None:
            return "on" if "active" in states.output.split() else "none"
    return None


def resolve_hostname() -> tuple[str, ...] | None:
    """Return the addresses of this PC's host name, IPv4 first, as the resolver returns them."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    except UnicodeError:
        return None
    # A link-local IPv6 address includes its zone, such as fe80::1%eth0.
    addresses = {str(entry[4][0]).partition("%")[0] for entry in found}
    return tuple(sorted(addresses, key=lambda address: (":" in address, address)))


def read_ends_at_logout() -> bool | None:
    """Return whether logind ends a user's processes at logout, or None without logind."""
    answer = ask(
        [
            *("busctl", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1"),
            *("org.freedesktop.login1.Manager", "KillUserProcesses"),
        ]
    )
    if answer is None or answer.code != 0:
        return None
    return answer.output.split() == ["b", "true"]


def _read_lingers() -> bool | None:
    folder = Path("/var/lib/systemd/linger")
    with contextlib.suppress(OSError, KeyError):
        return folder.is_dir() and (folder / getpass.getuser()).exists()
    return None


def _read_user() -> str | None:
    # From the process, not from a variable: administrators' commands will name this user.
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(os.geteuid()).pw_name
    return None


def read_may_sleep(root: Path = Path("/")) -> bool | None:
    """Return whether a desktop on this PC may suspend it, or None without systemd."""
    if not (root / "run/systemd/system").is_dir():
        return None
    # `systemctl mask` links a unit to /dev/null.
    masked = all(
        os.path.realpath(root / "etc/systemd/system" / name) == "/dev/null"
        for name in SLEEP_TARGETS
    )
    # The link exists if a display manager is installed; a server has none and does not suspend.
    desktop = os.path.lexists(root / "etc/systemd/system/display-manager.service")
    return desktop and not masked


def _read_inodes(folder: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = os.statvfs(folder)
        return found.f_files, found.f_favail
    return None


def _read_space(path: str) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = os.statvfs(path)
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return None
