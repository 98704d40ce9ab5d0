"""Read the facts about a node: system, CPU, memory, disk, network devices, WSL, Wake-on-LAN."""

from __future__ import annotations

import array
import contextlib
import fcntl
import hashlib
import ipaddress
import json
import os
import platform
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agents.contract.names import is_address, is_device
from agents.contract.node import GpuFacts, InterfaceFacts, MigGpu, NodeFacts, RecorderState
from agents.contract.wire import from_wire
from agents.limits import count_cpus, read_limits, read_memory
from agents.node.examination.reading import read_int, read_text
from agents.node.home_marks import read_home_id
from agents.node.login import read_login_variables
from agents.state import Home, boot_id, boot_time_s, identity_from, read_json
from agents.telemetry.host import read_disk
from agents.telemetry.lease import is_recording

RECORDER_TIMEOUT_S = 8.0
"""Maximum wait for the recorder to list the GPUs, in seconds."""
_RECORDER_PROBLEMS: dict[RecorderState, str] = {
    "missing": "the telemetry recorder did not start",
    "elsewhere": "the telemetry recorder of another PC uses this node's folder",
}
# linux/sockios.h and linux/ethtool.h
SIOCGIFADDR = 0x8915
SIOCGIFNETMASK = 0x891B
SIOCETHTOOL = 0x8946
ETHTOOL_GWOL = 0x5
WAKE_MAGIC = 1 << 5
_NET = Path("/sys/class/net")


def read_facts(home: Home) -> NodeFacts:
    """Return the current facts about this node."""
    memory = read_memory()
    disk = read_disk(home.path)
    free = shutil.disk_usage(home.path).free if disk else None
    state, recorder = find_recorder(home)
    gpus, problem = list_gpus(state, recorder)
    mig = state.get("mig_gpus", ())
    return NodeFacts(
        hostname=socket.gethostname(),
        os=parse_os_release(read_text("/etc/os-release") or "") or platform.system(),
        kernel=platform.release(),
        python=platform.python_version(),
        architecture=platform.machine(),
        cpu=parse_cpu_name(read_text("/proc/cpuinfo") or ""),
        num_cores=count_cpus(),
        memory_bytes=memory.total_bytes if memory else None,
        memory_available_bytes=memory.available_bytes if memory else None,
        pc_num_cores=os.cpu_count(),
        pc_memory_bytes=memory.pc_bytes if memory else None,
        limits=read_limits(),
        disk_bytes=disk[1] if disk else None,
        disk_free_bytes=free,
        gpus=gpus,
        gpu_problem=problem,
        mig_gpus=tuple(from_wire(MigGpu, one) for one in mig),
        interfaces=read_interfaces(),
        address=parse_connection(os.environ.get("SSH_CONNECTION", "")),
        wsl=read_wsl_mode(),
        wall_s=time.time(),
        compiler=find_compiler(),
        machine_id=read_machine_id(),
        agent_home=str(home.path),
        started_s=boot_time_s(),
        boot_id=boot_id() or None,
        macs=read_macs(),
        variables=read_login_variables(os.environ, Path.home()),
        home_id=read_home_id(home),
        recorder=recorder,
    )


def read_gpus(home: Home) -> tuple[tuple[GpuFacts, ...], str | None]:
    """Return the GPUs and the problem that the recorder found; only it loads NVIDIA's library."""
    return list_gpus(*find_recorder(home))


def list_gpus(
    state: Mapping[str, Any], recorder: RecorderState
) -> tuple[tuple[GpuFacts, ...], str | None]:
    """Return the GPUs and the problem in what the recorder said of itself."""
    if recorder == "here":
        cards = tuple(from_wire(GpuFacts, card) for card in state.get("gpus", ()))
        return cards, state.get("gpu_problem")
    return (), f"{_RECORDER_PROBLEMS[recorder]}, so the GPUs could not be listed"


def find_recorder(home: Home) -> tuple[dict[str, Any], RecorderState]:
    """Return what the recorder says of itself, and where it is; wait while it starts."""
    deadline = time.monotonic() + RECORDER_TIMEOUT_S
    num_foreign = 0
    while time.monotonic() < deadline:
        state = read_json(home.telemetry / "recorder.json") or {}
        recorder = identity_from(state)
        if recorder and recorder.is_alive():
            return state, "here"
        is_foreign = recorder and recorder.boot_id != boot_id() and is_recording(home)
        num_foreign = num_foreign + 1 if is_foreign else 0
        # Twice: a new recorder here takes the lock just before it removes the old file.
        if num_foreign > 1:
            return {}, "elsewhere"
        time.sleep(0.05)
    return {}, "missing"


def parse_os_release(text: str) -> str | None:
    """Return the system's name, such as `Ubuntu 24.04.1 LTS`, from /etc/os-release."""
    for line in text.splitlines():
        if line.startswith("PRETTY_NAME="):
            return line.partition("=")[2].strip().strip("\"'") or None
    return None


def parse_cpu_name(text: str) -> str | None:
    """Return the CPU's name from /proc/cpuinfo."""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        # `model name` is x86; ARM kernels write `Hardware`, MIPS and others `cpu model`.
        if name.strip().lower() in ("model name", "hardware", "cpu model") and value.strip():
            return " ".join(value.split())
    return None


def parse_connection(text: str) -> str | None:
    """Return this node's address from SSH_CONNECTION (`client port server port`)."""
    parts = text.split()
    # A link-local IPv6 address includes its zone, such as fe80::1%eth0.
    address = parts[2].partition("%")[0] if len(parts) == 4 else ""
    # sshd writes UNKNOWN where its input is not a socket, as behind some proxies.
    return address if is_address(address) else None


def read_interfaces() -> tuple[InterfaceFacts, ...]:
    """Return the network devices that have an address, loopback last."""
    # Linux allows nearly any sign in a name; the master accepts only usual ones.
    found = [one for one in _read_with_ip() or _read_with_ioctl() if is_device(one.name)]
    return tuple(sorted(found, key=lambda i: (i.name == "lo", i.name, ":" in i.address)))


def parse_ip_addresses(text: str) -> list[tuple[str, str]]:
    """Return (device, address) of each global or host address, from `ip -j addr`."""
    pairs = []
    for device in json.loads(text):
        for entry in device.get("addr_info", ()):
            if entry.get("scope") != "link" and entry.get("local"):
                pairs.append((str(device["ifname"]), str(entry["local"])))
    return pairs


def _read_with_ip() -> list[InterfaceFacts]:
    # The PATH of a non-interactive SSH session often lacks sbin.
    for command in ("ip", "/sbin/ip", "/usr/sbin/ip"):
        with contextlib.suppress(OSError, ValueError, KeyError, subprocess.SubprocessError):
            output = subprocess.run(
                [command, "-j", "addr"], capture_output=True, timeout=5, check=True, text=True
            ).stdout
            return [_describe_interface(*pair) for pair in parse_ip_addresses(output)]
    return []


def _read_with_ioctl() -> list[InterfaceFacts]:
    """Return the IPv4 address of each device from the kernel, without the `ip` command."""
    pairs = ((name, _ask_ipv4(name, SIOCGIFADDR)) for _, name in socket.if_nameindex())
    return [_describe_interface(name, address) for name, address in pairs if address]


def _describe_interface(name: str, address: str) -> InterfaceFacts:
    base = f"/sys/class/net/{name}"
    speed = read_int(f"{base}/speed")
    state = read_text(f"{base}/operstate")
    return InterfaceFacts(
        name=name,
        address=address,
        mtu=read_int(f"{base}/mtu"),
        # The kernel reports -1 for a link that is down and for many virtual devices.
        speed_mbit=speed if speed and speed > 0 else None,
        # Loopback and tunnels report `unknown`, which is neither.
        up={"up": True, "down": False}.get(state or ""),
        mac=read_mac(name),
        broadcast=read_broadcast(name),
        wakes=read_wakes(name),
    )


def read_machine_id() -> str | None:
    """Return a hash of this system's id, which identifies it at any address, or None."""
    # A hash, because the id itself must not be sent over a network (machine-id(5)).
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        if own_id := read_text(path):
            return hashlib.sha256(f"rackless {own_id}".encode()).hexdigest()[:32]
    return None


def find_compiler() -> str | None:
    """Return the C compiler that Triton would use: that in CC, else gcc, else clang."""
    named = os.environ.get("CC", "").split()
    for command in named[:1] or ("gcc", "clang"):
        if path := shutil.which(command):
            return path
    return None


def is_wsl() -> bool:
    """Return whether this system runs in WSL2, whose kernel has Microsoft in its release name."""
    return "microsoft" in platform.release().lower()


def read_wsl_mode() -> str | None:
    """Return the networking mode of WSL2, or `unknown`; None outside WSL."""
    if not is_wsl():
        return None
    # Older versions of WSL have no wslinfo.
    command = shutil.which("wslinfo") or "/usr/bin/wslinfo"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        output = subprocess.run(
            [command, "--networking-mode"], capture_output=True, timeout=10, check=True, text=True
        ).stdout
        return output.strip().lower() or "unknown"
    return "unknown"


def read_mac(device: str) -> str | None:
    """Return the hardware address of a network device, or None, as for a tunnel."""
    with contextlib.suppress(OSError):
        mac = (_NET / device / "address").read_text(encoding="ascii").strip().lower()
        # Loopback has zeros; InfiniBand has addresses of 20 bytes, which Wake-on-LAN cannot use.
        if len(mac) == 17 and mac != "00:00:00:00:00:00":
            return mac
    return None


def read_macs() -> tuple[str, ...]:
    """Return the hardware addresses of all network cards, or of all devices without a card.

    Bridges and the ends of links to containers are no cards: their addresses come and go.
    """
    names = [name for _, name in socket.if_nameindex()]
    cards = [name for name in names if (_NET / name / "device").exists()]
    return tuple(sorted({mac for name in cards or names if (mac := read_mac(name))}))


def read_broadcast(device: str) -> str | None:
    """Return the IPv4 broadcast address of a network device, or None without an IPv4 network."""
    # Computed, because the kernel's own value is empty for manually configured addresses.
    address, mask = (_ask_ipv4(device, request) for request in (SIOCGIFADDR, SIOCGIFNETMASK))
    if address is None or mask is None:
        return None
    network = ipaddress.IPv4Interface(f"{address}/{mask}").network
    # Point-to-point networks (/31, /32) have no broadcast address.
    return str(network.broadcast_address) if network.prefixlen < 31 else None


def _ask_ipv4(device: str, request: int) -> str | None:
    question = struct.pack("256s", os.fsencode(device)[:15])
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        answer = fcntl.ioctl(asker.fileno(), request, question)
        # struct ifreq: 16 bytes of name, then a sockaddr_in whose address begins at byte 4.
        return socket.inet_ntoa(answer[20:24])
    return None


def read_wakes(device: str) -> bool | None:
    """Return whether a magic packet wakes this PC, or None if unknown."""
    asked = _ask_card(device)
    if asked is not None:
        return asked
    # Only root may ask the card. For other users, the kernel shows whether the device may wake the
    # PC, which the same setting enables.
    with contextlib.suppress(OSError):
        state = (_NET / device / "device/power/wakeup").read_text(encoding="ascii").strip()
        return {"enabled": True, "disabled": False}.get(state)
    return None


def _ask_card(device: str) -> bool | None:
    # struct ethtool_wolinfo: command, supported options, enabled options, password.
    info = array.array("B", struct.pack("III6s", ETHTOOL_GWOL, 0, 0, b"") + bytes(2))
    place, _ = info.buffer_info()
    # struct ifreq: 16 bytes of name, then a pointer to the structure.
    request = struct.pack("16sP", os.fsencode(device)[:15], place) + bytes(16)
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        fcntl.ioctl(asker.fileno(), SIOCETHTOOL, request)
        _, supported, on = struct.unpack_from("III", info)
        return bool(on & WAKE_MAGIC) if supported else None
    return None
