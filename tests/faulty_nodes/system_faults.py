"""Faults of a node's system, its driver, its WSL, and its training environment."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

from tests.cluster.master import Master
from tests.cluster.namespaces import Node, run_tool
from tests.faulty_nodes.fault import Fault, Inject
from tests.faulty_nodes.site import FaultySite, Session, mount_tmpfs

USER, USER_ID = "trainer", 54321
PCI, MODULES = Path("/sys/bus/pci/devices"), Path("/sys/module")
MEMINFO = """\
MemTotal:       {total} kB
MemFree:        {free} kB
MemAvailable:   {free} kB
SwapTotal:      0 kB
"""
WSL_RELEASE = "5.15.167.4-microsoft-standard-WSL2"


def mount_home(options: str, then: str = "true") -> Inject:
    """Return the fault of a home folder on another disk; `{home}` is that folder."""

    def inject(site: FaultySite, stack: ExitStack) -> None:
        home = site.nodes[0].home
        commands = [mount_tmpfs(home, options), then.format(home=home)]
        site.change_session(stack, site.nodes[0], Session(commands=commands))

    return inject


def remount_home(options: str) -> Inject:
    """Return the fault of a home folder that is mounted with these options."""

    def inject(site: FaultySite, stack: ExitStack) -> None:
        home = site.nodes[0].home
        commands = [f"mount --bind {home} {home}", f"mount -o remount,bind,{options} {home}"]
        site.change_session(stack, site.nodes[0], Session(commands=commands))

    return inject


def shrink_shm(site: FaultySite, stack: ExitStack) -> None:
    mount = mount_tmpfs(Path("/dev/shm"), "size=64m")
    site.change_session(stack, site.nodes[0], Session(commands=[mount]))


def shrink_memory(total_gib: int, free_gib: int) -> Inject:
    def inject(site: FaultySite, stack: ExitStack) -> None:
        text = MEMINFO.format(total=total_gib << 20, free=free_gib << 20)
        files = {Path("/proc/meminfo"): site.put_file("meminfo", text)}
        site.change_session(stack, site.nodes[0], Session(files=files))

    return inject


def shift_clock(seconds: int) -> Inject:
    def inject(site: FaultySite, stack: ExitStack) -> None:
        variables = site.shim(clock_s=seconds)
        site.change_session(stack, site.nodes[0], Session(variables=variables))

    return inject


def stop_time_service(site: FaultySite, stack: ExitStack) -> None:
    path = site.put_program("timedatectl", "echo NTP=no; echo CanNTP=yes")
    variables = site.shim(synchronised=0) | with_path(path)
    site.change_session(stack, site.nodes[0], Session(variables=variables))


def end_at_logout(site: FaultySite, stack: ExitStack) -> None:
    path = site.put_program("busctl", "echo b true")
    files = {Path("/proc/1/comm"): site.put_file("comm", "systemd\n")}
    session = Session(files=files, variables=with_path(path))
    site.change_session(stack, site.nodes[0], session)


def log_in_as_user(site: FaultySite, stack: ExitStack) -> Master:
    """A login that is not an administrator's, on a PC without sudo for it."""
    node = site.nodes[0]
    line = f"{USER}:x:{USER_ID}:{USER_ID}::{node.home}:/bin/sh\n"
    passwd = site.put_file("passwd", Path("/etc/passwd").read_text() + line)
    give_home(node, USER_ID)
    stack.callback(give_home, node, 0)
    session = Session(files={Path("/etc/passwd"): passwd})
    site.change_session(stack, node, session)
    stack.callback(open_folders, site, "go-x")
    open_folders(site, "go+x")
    return site.fresh_master((one, USER if one is node else "root") for one in site.nodes)


def give_home(node: Node, user_id: int) -> None:
    run_tool("chown", "-R", f"{user_id}:{user_id}", str(node.home))


def open_folders(site: FaultySite, mode: str) -> None:
    """Let other users through to the nodes' homes, which lie in a private folder."""
    for folder in (site.folder, site.folder / "cluster", site.folder / "cluster/node1"):
        folder.chmod(folder.stat().st_mode | 0o011 if mode == "go+x" else 0o700)
    Path(f"{site.cluster.key}.pub").chmod(0o644)


def install_card(modules: tuple[str, ...]) -> Inject:
    """Return the fault of an NVIDIA card with these kernel modules and no library."""

    def inject(site: FaultySite, stack: ExitStack) -> None:
        site.put_file("pci/0000:01:00.0/vendor", "0x10de\n")
        site.put_file("pci/0000:01:00.0/class", "0x030000\n")
        folder = "modules-" + "-".join(modules)
        (site.folder / folder).mkdir(exist_ok=True)
        for name in modules:
            (site.folder / folder / name).mkdir(exist_ok=True)
        files = {PCI: site.folder / "pci", MODULES: site.folder / folder}
        site.change_session(stack, site.nodes[0], Session(files=files))

    return inject


def show_card(driver: str, capability: str) -> Inject:
    """Return the fault of a card of that generation with that driver."""

    def inject(site: FaultySite, stack: ExitStack) -> None:
        variables = site.driver(driver=driver, capability=capability)
        site.change_session(stack, site.nodes[0], Session(variables=variables))

    return inject


def be_wsl(mode: str) -> Inject:
    """Return the fault of a node in WSL with this networking mode."""

    def inject(site: FaultySite, stack: ExitStack) -> None:
        path = site.put_program("wslinfo", f"echo {mode}")
        variables = site.shim(release=WSL_RELEASE) | with_path(path)
        site.change_session(stack, site.nodes[0], Session(variables=variables))

    return inject


def with_path(folder: Path) -> dict[str, str]:
    return {"PATH": f"{folder}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}


def swap_python(lines: str) -> Inject:
    """Return the fault of an interpreter that changes after it was adopted."""

    def inject(site: FaultySite, stack: ExitStack) -> None:
        node = site.nodes[0]
        last = f'exec {sys.executable} "$@"'
        program = site.put_program("python", last, "wrapped") / "python"
        stack.callback(site.adopt, node, Path(sys.executable))
        site.adopt(node, program)
        site.put_program("python", f"{lines.format(folder=site.folder)}\n{last}", "wrapped")

    return inject


def install_other_torch(site: FaultySite, stack: ExitStack) -> None:
    site.put_file("other/torch-2.12.0.dist-info/METADATA", "Name: torch\nVersion: 2.12.0\n")
    swap_python("export PYTHONPATH={folder}/other:$PYTHONPATH")(site, stack)


def remove_environment(site: FaultySite, stack: ExitStack) -> None:
    node = site.nodes[0]
    record = next((node.home / ".local/share/rackless-agent").glob("environment*.json"))
    kept = record.read_bytes()
    stack.callback(record.write_bytes, kept)
    record.unlink()


WHEN_REDUCING = 'case "$*" in *allreduce*) {};; esac'
SYSTEM_FAULTS = (
    Fault(name="disk nearly full", inject=mount_home("size=1g"), check="disk", status="fail",
          says="free"),
    Fault(name="inodes used up", inject=mount_home("size=8g,nr_inodes=3000"), check="inodes",
          status="fail", says="more files"),
    Fault(name="noexec home", inject=mount_home("size=8g,noexec"), check="home", status="fail",
          says="mounted with noexec", also_fails=("disk",)),
    Fault(name="read-only home", inject=remount_home("ro"), check="reach", status="fail",
          says="ead-only"),
    Fault(name="/dev/shm of 64 MB", inject=shrink_shm, check="shm", status="warn",
          says="/dev/shm has only 64"),
    Fault(name="little RAM free", inject=shrink_memory(32, 1), check="memory", status="warn",
          says="leave only 1.0 GiB"),
    Fault(name="little RAM", inject=shrink_memory(6, 5), check="memory", status="warn",
          says="6.0 GiB of RAM is little"),
    Fault(name="no swap", inject=shrink_memory(16, 12), check="swap", status="warn",
          says="without swap"),
    Fault(name="clock an hour ahead", inject=shift_clock(3600), check="clock", status="warn",
          says="3600 s ahead"),
    Fault(name="clock a day behind", inject=shift_clock(-86400), check="clock", status="warn",
          says="86400 s behind"),
    Fault(name="time service off", inject=stop_time_service, check="time-sync", status="warn",
          says="no time server keeps"),
    Fault(name="programs end at logout", inject=end_at_logout, check="logout", status="fail",
          says="at logout"),
    Fault(name="login without sudo", inject=log_in_as_user, check="sudo", status="warn",
          says="may not use sudo"),
    Fault(name="card without a driver", inject=install_card(()), check="driver", status="fail",
          says="there is no NVIDIA driver", also_fails=("gpu",)),
    Fault(name="card held by nouveau", inject=install_card(("nouveau",)), check="driver",
          status="fail", says="nouveau holds it", also_fails=("gpu",)),
    Fault(name="driver of 2021", inject=show_card("470.256.02", "8.6"), check="gpu",
          status="fail", says="driver 470.256.02 is older than 580"),
    Fault(name="driver without CUDA 13", inject=show_card("550.144.03", "8.9"), check="gpu",
          status="warn", says="older than 580"),
    Fault(name="card older than torch serves", inject=show_card("580.65.06", "6.1"), check="gpu",
          status="fail", says="has no kernels in the build of torch"),
    Fault(name="WSL behind NAT", inject=be_wsl("nat"), check="wsl", status="fail",
          says="other nodes cannot reach this one"),
    Fault(name="WSL without a network", inject=be_wsl("none"), check="wsl", status="fail",
          says="WSL networking is none"),
    Fault(name="no environment", inject=remove_environment, check="environment", status="fail",
          says="no training environment", needs_torch=True),
    Fault(name="other torch", inject=install_other_torch, check="environment", status="fail",
          says="torch 2.12.0 instead of", needs_torch=True),
    Fault(name="torch that sees no GPU", inject=show_card("580.65.06", "8.9"), check="cuda",
          status="fail", says="torch sees 0 of 1 GPUs", needs_torch=True),
    Fault(name="silent rank", inject=swap_python(WHEN_REDUCING.format("exec sleep 1000")),
          check="all-reduce", status="fail", says="did not answer during the all-reduce",
          needs_torch=True),
    Fault(name="rank that ends at once", inject=swap_python(WHEN_REDUCING.format("exit 3")),
          check="all-reduce", status="fail", says="did not run with", needs_torch=True),
)  # fmt: skip
