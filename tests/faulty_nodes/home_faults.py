"""Faults of PCs at home that nothing was tuned on, and oddities that are no faults.

An oddity is what many PCs have and Rackless has to bear: no row may change because of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from tests.cluster.namespaces import SUBNET
from tests.faulty_nodes.fault import Fault, Inject
from tests.faulty_nodes.site import USER, USER_ID, FaultySite, Session, agent_home, mount_tmpfs
from tests.faulty_nodes.system_faults import put_card, stop_clock_service

NVML_MISMATCH = 18
"""NVML_ERROR_LIB_RM_VERSION_MISMATCH."""
OLD_DRIVER, NEW_DRIVER = "580.65.06", "580.95.05"
# Python as one of an older version: what it runs sees the number alone.
OLD_PYTHON = """
shift
exec /usr/bin/python3 -c '
import runpy, sys
sys.version_info = (3, 8, 10, "final", 0)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
' "$@\""""


def name_other_pc(site: FaultySite, stack: ExitStack) -> None:
    node, other = site.nodes[:2]
    stack.callback(site.write_hosts, node, node.address)
    site.write_hosts(node, other.address)


def name_only_ipv6(site: FaultySite, stack: ExitStack) -> None:
    node = site.nodes[0]
    stack.callback(site.write_hosts, node, node.address)
    site.write_hosts(node, "fd00::11")


def fill_temporary(site: FaultySite, stack: ExitStack) -> None:
    """A full disk for temporary files; the folders of the site lie below the same place."""
    full = site.folder / "full"
    full.mkdir(exist_ok=True)
    commands = [
        mount_tmpfs(full, "size=1m,mode=1777"),
        f"head -c 1M /dev/zero > {full}/old || true",
    ]
    session = Session(commands=commands, variables={"TMPDIR": str(full)})
    site.change_session(stack, site.nodes[0], session)


def limit(words: str) -> Inject:
    """Return the fault of a login with this limit, in the words of `ulimit`."""

    def inject(site: FaultySite, stack: ExitStack) -> None:
        site.change_session(stack, site.nodes[0], Session(commands=[f"ulimit {words}"]))

    return inject


def write_rc(text: str) -> Inject:
    """Return the oddity of a login whose shell reads these lines for each command."""

    def inject(site: FaultySite, stack: ExitStack) -> None:
        change_shell("/bin/bash")(site, stack)
        file = site.nodes[0].home / ".bashrc"
        stack.callback(file.unlink)
        file.write_text(f"{text}\n")

    return inject


def change_shell(shell: str) -> Inject:
    def inject(site: FaultySite, stack: ExitStack) -> None:
        node = site.nodes[0]
        lines = (site.etc(node) / "passwd").read_text().splitlines()
        own = f"{USER}:x:{USER_ID}:{USER_ID}::{node.home}:{shell}"
        rest = [line for line in lines if not line.startswith(f"{USER}:")]
        site.edit_etc(stack, node, "passwd", "\n".join([*rest, own]) + "\n")
        site.change_session(stack, node, Session())

    return inject


def age_python(site: FaultySite, stack: ExitStack) -> None:
    programs = site.put_program("old-python", "python3", OLD_PYTHON)
    site.change_session(stack, site.nodes[0], Session(programs=[programs]))


def update_driver(site: FaultySite, stack: ExitStack) -> None:
    """An update of the driver while the old one is loaded, as unattended upgrades make it."""
    version = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {OLD_DRIVER}  Sun\n"
    site.put_file("proc-driver/nvidia/version", version)
    site.put_file(f"lib64/libnvidia-ml.so.{NEW_DRIVER}", "")
    for library in Path("/usr/lib64").iterdir():
        link = site.folder / "lib64" / library.name
        if not link.exists():
            link.symlink_to(library.resolve())
    files = put_card(site, ("nvidia",))
    files[Path("/proc/driver")] = site.folder / "proc-driver"
    files[Path("/usr/lib64")] = site.folder / "lib64"
    variables = site.driver(driver=OLD_DRIVER, capability="8.9", init=NVML_MISMATCH)
    site.change_session(stack, site.nodes[0], Session(files=files, variables=variables))


def join_by_wifi(site: FaultySite, stack: ExitStack) -> None:
    """Wi-Fi in the network of the cable, which the system prefers."""
    add_device(site, stack, "wlan0", f"{SUBNET}.61/24")
    site.in_node(stack, site.nodes[0], f"ip route add {site.nodes[1].address} dev wlan0")


def add_second_router(site: FaultySite, stack: ExitStack) -> None:
    """Cable and Wi-Fi, each with a router to the internet."""
    add_device(site, stack, "wlan0", "192.168.77.61/24")
    node = site.nodes[0]
    undo = "ip route del default via {} dev {}"
    for router, device in ((f"{SUBNET}.1", "eth0"), ("192.168.77.1", "wlan0")):
        metric = 100 if device == "eth0" else 600
        add = f"ip route add default via {router} dev {device} metric {metric}"
        site.in_node(stack, node, add, undo.format(router, device))


def add_device(site: FaultySite, stack: ExitStack, name: str, address: str) -> None:
    node = site.nodes[0]
    add = f"ip link add {name} type veth peer name {name}-far"
    site.in_node(stack, node, add, f"ip link del {name}")
    for words in (f"addr add {address} dev {name}", f"link set {name} up"):
        site.in_node(stack, node, f"ip {words}")
    site.in_node(stack, node, f"ip link set {name}-far up")


def share_home(site: FaultySite, stack: ExitStack) -> None:
    """One folder of the agent for two nodes, as with a home on NFS."""
    first, second = site.nodes[:2]
    shared = {"RACKLESS_AGENT_HOME": str(agent_home(first))}
    site.change_session(stack, second, Session(variables=shared))


def set_variables(**variables: str) -> Inject:
    """Return the fault of a login with these variables."""

    def inject(site: FaultySite, stack: ExitStack) -> None:
        site.change_session(stack, site.nodes[0], Session(variables=variables))

    return inject


def be_noexec(site: FaultySite, stack: ExitStack) -> None:
    temporary = site.folder / "noexec"
    temporary.mkdir(exist_ok=True)
    mount = mount_tmpfs(temporary, "size=2g,noexec,mode=1777")
    session = Session(commands=[mount], variables={"TMPDIR": str(temporary)})
    site.change_session(stack, site.nodes[0], session)


def set_sshd(*lines: str) -> Inject:
    """Return the oddity of an sshd with these lines in its configuration."""

    def inject(site: FaultySite, stack: ExitStack) -> None:
        site.change_session(stack, site.nodes[0], Session(settings=lines))

    return inject


def show_banner(site: FaultySite, stack: ExitStack) -> None:
    text = site.put_file("banner", "RACKLESS-BOOT is watched. No access without leave!\n" * 40)
    set_sshd(f"Banner {text}")(site, stack)


HOME_FAULTS = (
    Fault(name="own name means another PC", inject=name_other_pc, check="hostname", status="warn",
          says="10.77.0.12, which is no address of this PC"),
    Fault(name="own name with IPv6 alone", inject=name_only_ipv6, check="hostname", status="warn",
          says="no IPv4 address, only fd00::11"),
    Fault(name="clock 90 s ahead", inject=stop_clock_service(clock_s=90), check="clock",
          status="warn", says="90 s ahead", repair="time-sync", played="timedatectl, clock"),
    Fault(name="full folder for temporary files", inject=fill_temporary, check="tmp",
          status="warn", says="is nearly full"),
    Fault(name="256 open files", inject=limit("-n 256"), check="limits", status="warn",
          says="only 256 files open"),
    Fault(name="limit of addresses", inject=limit("-v 16777216"), check="limits", status="warn",
          says="16.0 GiB of addresses"),
    Fault(name="login script that asks", inject=write_rc("read -p 'Start tmux? ' answer"),
          check="reach", status="fail", says="its login shell did not start our command"),
    Fault(name="login without a shell", inject=change_shell("/usr/sbin/nologin"), check="reach",
          status="fail", says="not available"),
    Fault(name="Python 3.8", inject=age_python, check="reach", status="fail",
          says="python3 on this node is 3.8; Rackless needs 3.10"),
    Fault(name="driver updated while loaded", inject=update_driver, check="driver", status="fail",
          says=f"updated to {NEW_DRIVER} while {OLD_DRIVER} is still loaded", also_fails=("gpu",)),
    Fault(name="Wi-Fi takes the traffic of the cable", inject=join_by_wifi, check="route",
          status="warn", says="leave by wlan0 (Wi-Fi), not by eth0", also_fails=("tcp",)),
    Fault(name="one home for two nodes", inject=share_home, check="shared-home", status="fail",
          says="node1 and node2 have one folder for the agent"),
    Fault(name="GPUs hidden by the login", inject=set_variables(CUDA_VISIBLE_DEVICES="1"),
          check="variables", status="warn", says="hides or reorders GPUs"),
    Fault(name="NCCL set on one node", inject=set_variables(NCCL_PROTO="LL"), check="variables",
          status="warn", says="NCCL_PROTO is not the same on all nodes"),
)  # fmt: skip
ODDITIES: Mapping[str, Inject] = {
    "login script that prints": write_rc("echo Welcome; echo 'RACKLESS 1' >&2; fortune"),
    "umask 077": write_rc("umask 077"),
    "banner before the login": show_banner,
    "one session for each connection": set_sshd("MaxSessions 1"),
    "two routers": add_second_router,
    "noexec folder for temporary files": be_noexec,
    "debugging in the login": set_variables(
        TORCH_DISTRIBUTED_DEBUG="DETAIL", PYTHONOPTIMIZE="2", PYTHONWARNINGS="error"
    ),
}
