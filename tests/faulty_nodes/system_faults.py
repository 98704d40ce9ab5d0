"""Faults of a node's system, its driver, its WSL, and its training environment."""

from __future__ import annotations

import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.fakes.sudo import write_sudo
from tests.faulty_nodes.fault import Fault, Inject
from tests.faulty_nodes.played import (
    APT_GET,
    BUSCTL,
    DPKG_QUERY,
    DRIVER,
    LOGINCTL,
    NVIDIA_SMI,
    SWAP_TOOLS,
    SYSTEMCTL,
    TIMEDATECTL,
    UBUNTU_DRIVERS,
)
from tests.faulty_nodes.site import (
    USER_ID,
    FaultySite,
    Session,
    agent_home,
    mount_tmpfs,
    system_tools,
    tools_in,
)

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
        owned = f"{options},uid={USER_ID},gid={USER_ID},mode=700"
        commands = [mount_tmpfs(home, owned), then.format(home=home)]
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
        node = site.nodes[0]
        text = MEMINFO.format(total=total_gib << 20, free=free_gib << 20)
        programs = site.play(stack, node, SWAP_TOOLS, meminfo=text)
        files = {Path("/proc/meminfo"): site.played(node) / "meminfo"}
        site.change_session(stack, node, Session(files=files, programs=[programs]))

    return inject


def stop_clock_service(**values: int) -> Inject:
    """Return the fault of a PC whose time service is off, and of what the kernel says then."""

    def inject(site: FaultySite, stack: ExitStack) -> None:
        node = site.nodes[0]
        programs = site.play(stack, node, {"timedatectl": TIMEDATECTL}, ntp="no\n")
        variables = site.shim(ntp=site.played(node) / "ntp", **values)
        site.change_session(stack, node, Session(variables=variables, programs=[programs]))

    return inject


def end_at_logout(site: FaultySite, stack: ExitStack) -> None:
    node = site.nodes[0]
    programs = site.play(stack, node, {"busctl": BUSCTL, "loginctl": LOGINCTL})
    state = site.played(node) / "systemd"
    (state / "linger").mkdir(parents=True)
    files = {Path("/proc/1/comm"): site.put_file("comm", "systemd\n")}
    files[Path("/var/lib/systemd")] = state
    site.change_session(stack, node, Session(files=files, programs=[programs]))


def run_desktop(site: FaultySite, stack: ExitStack) -> None:
    node = site.nodes[0]
    programs = site.play(stack, node, {"systemctl": SYSTEMCTL})
    site.edit_etc(stack, node, "systemd/system/display-manager.service", "[Unit]\n")
    files = {Path("/proc/1/comm"): site.put_file("comm", "systemd\n")}
    commands = [mount_tmpfs(Path("/run"), "mode=755"), "mkdir -p /run/sshd /run/systemd/system"]
    session = Session(files=files, commands=commands, programs=[programs])
    site.change_session(stack, node, session)


def refuse_sudo(site: FaultySite, stack: ExitStack) -> None:
    folder = write_sudo(site.folder / "no-sudo", refused=True)
    site.change_session(stack, site.nodes[0], Session(programs=[folder]))


def put_card(site: FaultySite, modules: tuple[str, ...]) -> dict[Path, Path]:
    """Return the files of a PC with an NVIDIA card and these kernel modules."""
    site.put_file("pci/0000:01:00.0/vendor", "0x10de\n")
    site.put_file("pci/0000:01:00.0/class", "0x030000\n")
    folder = site.folder / f"modules-{'-'.join(modules)}"
    for name in modules:
        (folder / name).mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    return {PCI: site.folder / "pci", MODULES: folder}


def install_card(modules: tuple[str, ...]) -> Inject:
    """Return the fault of an NVIDIA card with these kernel modules and no library."""

    def inject(site: FaultySite, stack: ExitStack) -> None:
        programs = be_ubuntu(site, stack)
        files = put_card(site, modules)
        site.change_session(stack, site.nodes[0], Session(files=files, programs=[programs]))

    return inject


def be_ubuntu(site: FaultySite, stack: ExitStack) -> Path:
    """Let the first node be Ubuntu, with its tool for drivers; return the tool's folder."""
    node = site.nodes[0]
    site.edit_etc(stack, node, "os-release", 'PRETTY_NAME="Ubuntu 24.04.1 LTS"\n')
    return site.play(stack, node, {"ubuntu-drivers": UBUNTU_DRIVERS})


def show_card(driver: str, capability: str) -> Inject:
    """Return the fault of a card of that generation with that driver."""

    def inject(site: FaultySite, stack: ExitStack) -> None:
        programs = be_ubuntu(site, stack)
        variables = site.driver(driver=driver, capability=capability)
        session = Session(variables=variables, programs=[programs])
        site.change_session(stack, site.nodes[0], session)

    return inject


def start_with_driver(site: FaultySite, stack: ExitStack) -> None:
    """The restart that a new driver asks for: the card then has what was installed."""
    node = site.nodes[0]
    installed = site.played(node) / "driver"
    if not installed.exists():
        return  # nothing was repaired, which is seen by the row
    # The time of its start is that of this PC, so the next repair would wait for a restart, too.
    stack.callback(shutil.rmtree, agent_home(node) / "changes")
    variables = site.driver(driver=installed.read_text().strip(), capability="8.9")
    session = Session(files=put_card(site, ("nvidia",)), variables=variables)
    site.change_boot_id(node)
    site.change_session(stack, node, session)


def unload_driver(site: FaultySite, stack: ExitStack) -> None:
    node = site.nodes[0]
    programs = site.play(stack, node, {"nvidia-smi": NVIDIA_SMI}, persistence="Disabled\n")
    variables = site.driver(driver=DRIVER, capability="8.9")
    files = put_card(site, ("nvidia",))
    session = Session(files=files, variables=variables, programs=[programs])
    site.change_session(stack, node, session)


def remove_compiler(site: FaultySite, stack: ExitStack) -> None:
    """A card and no compiler: the PATH has links to all programs but that."""
    node = site.nodes[0]
    scripts = {"apt-get": APT_GET, "dpkg-query": DPKG_QUERY}
    programs = site.play(stack, node, scripts, packages="")
    compilers = site.played(node) / "bin"
    compilers.mkdir()
    tools = tools_in(site.folder / "no-compiler", system_tools() - {"gcc", "clang"})
    variables = site.driver(driver=DRIVER, capability="8.9")
    variables["PATH"] = f"{programs}:{compilers}:{site.sudo}:{tools}"
    files = put_card(site, ("nvidia",))
    site.change_session(stack, node, Session(files=files, variables=variables))


def be_wsl(mode: str) -> Inject:
    """Return the fault of a node in WSL with this networking mode."""

    def inject(site: FaultySite, stack: ExitStack) -> None:
        programs = site.put_program("wsl", "wslinfo", f"echo {mode}")
        session = Session(variables=site.shim(release=WSL_RELEASE), programs=[programs])
        site.change_session(stack, site.nodes[0], session)

    return inject


def swap_python(lines: str) -> Inject:
    """Return the fault of an interpreter that changes after it was adopted."""

    def inject(site: FaultySite, stack: ExitStack) -> None:
        node = site.nodes[0]
        last = f'exec {sys.executable} "$@"'
        program = site.put_program("wrapped", "python", last) / "python"
        stack.callback(site.adopt, node, Path(sys.executable))
        site.adopt(node, program)
        site.put_program("wrapped", "python", f"{lines.format(folder=site.folder)}\n{last}")

    return inject


def install_other_torch(site: FaultySite, stack: ExitStack) -> None:
    site.put_file("other/torch-2.12.0.dist-info/METADATA", "Name: torch\nVersion: 2.12.0\n")
    swap_python("export PYTHONPATH={folder}/other:$PYTHONPATH")(site, stack)


def remove_environment(site: FaultySite, stack: ExitStack) -> None:
    record = next(agent_home(site.nodes[0]).glob("environment*.json"))
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
          says="/dev/shm has only 64", repair="shared-memory"),
    Fault(name="little RAM free", inject=shrink_memory(32, 1), check="memory", status="warn",
          says="leave only 1.0 GiB"),
    Fault(name="little RAM", inject=shrink_memory(6, 5), check="memory", status="warn",
          says="6.0 GiB of RAM is little"),
    Fault(name="no swap", inject=shrink_memory(16, 12), check="swap", status="warn",
          says="without swap", repair="swap", played="fallocate, swapon, swapoff"),
    Fault(name="clock an hour ahead", inject=stop_clock_service(clock_s=3600), check="clock",
          status="warn", says="3600 s ahead", repair="time-sync", played="timedatectl, clock"),
    Fault(name="clock a day behind", inject=stop_clock_service(clock_s=-86400), check="clock",
          status="warn", says="86400 s behind", repair="time-sync", played="timedatectl, clock"),
    Fault(name="time service off", inject=stop_clock_service(synchronised=0), check="time-sync",
          status="warn", says="no time server keeps", repair="time-sync",
          played="timedatectl, clock"),
    Fault(name="programs end at logout", inject=end_at_logout, check="logout", status="fail",
          says="at logout", repair="linger", played="loginctl"),
    Fault(name="desktop that may suspend", inject=run_desktop, check="sleep", status="warn",
          says="may suspend this PC", repair="no-sleep", played="systemctl"),
    Fault(name="no C compiler", inject=remove_compiler, check="compiler", status="warn",
          says="a C compiler is missing", repair="compiler", played="apt-get, dpkg-query"),
    Fault(name="driver that unloads itself", inject=unload_driver, check="persistence",
          status="warn", says="unloads itself", repair="gpu-persistence", played="nvidia-smi"),
    Fault(name="login without sudo", inject=refuse_sudo, check="sudo", status="warn",
          says="may not use sudo"),
    Fault(name="card without a driver", inject=install_card(()), check="driver", status="fail",
          says="there is no NVIDIA driver", also_fails=("gpu",),
          repair="gpu-driver", played="ubuntu-drivers, restart", restart=start_with_driver),
    Fault(name="card held by nouveau", inject=install_card(("nouveau",)), check="driver",
          status="fail", says="nouveau holds it", also_fails=("gpu",),
          repair="gpu-driver", played="ubuntu-drivers, restart", restart=start_with_driver),
    Fault(name="driver of 2021", inject=show_card("470.256.02", "8.6"), check="gpu",
          status="fail", says="driver 470.256.02 is older than 580",
          repair="gpu-driver", played="ubuntu-drivers, restart", restart=start_with_driver),
    Fault(name="driver without CUDA 13", inject=show_card("550.144.03", "8.9"), check="gpu",
          status="warn", says="older than 580",
          repair="gpu-driver", played="ubuntu-drivers, restart", restart=start_with_driver),
    Fault(name="card older than torch serves", inject=show_card("580.65.06", "6.1"), check="gpu",
          status="fail", says="has no kernels in the build of torch"),
    Fault(name="WSL behind NAT", inject=be_wsl("nat"), check="wsl", status="fail",
          says="other nodes cannot reach this one",
          elsewhere="its repair is a script for PowerShell on Windows"),
    Fault(name="WSL without a network", inject=be_wsl("none"), check="wsl", status="fail",
          says="WSL networking is none",
          elsewhere="its repair is a script for PowerShell on Windows"),
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
