"""Read the state of the network for the check: devices, counters, routes, RDMA, firewall."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import json
import os
import re
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from agents.contract.names import is_device
from agents.contract.requests import examination
from agents.node.examination.reading import ask, list_folder, read_int, read_text

NETWORK_FOLDER = "/sys/class/net"
RDMA_FOLDER = "/sys/class/infiniband"
# By prefix of the name, because virtual devices share a driver or have none.
_NAMES: tuple[tuple[re.Pattern[str], examination.DeviceKind], ...] = (
    (re.compile(r"lo$"), "loopback"),
    (re.compile(r"loopback\d"), "loopback"),
    (
        re.compile(r"(tun|tap|wg|ppp|tailscale|zt|utun|nordlynx|proton|gpd|ipsec|vpn|cscotun)"),
        "vpn",
    ),
    (re.compile(r"(docker|br-|virbr|lxcbr|lxdbr|podman|cni|bridge|br\d)"), "bridge"),
    (re.compile(r"(veth|vnet|macvtap|dummy|cali|flannel)"), "virtual"),
    (re.compile(r"(wwan|wwp)"), "mobile"),
    (re.compile(r"(wlan|wlp|wlx|wl)"), "wifi"),
)
_ETHTOOL, _ETHTOOL_GET = 0x8946, 0x00000001
_WIRELESS_POWER = 0x8B2D
# Speed of each link mode in the 32 bits of ETHTOOL_GSET, in Mb/s (linux/ethtool.h).
_MODES = (
    (0x0003, 10),
    (0x000C, 100),
    (0x0030 | 1 << 17, 1000),
    (1 << 15, 2500),
    (1 << 12 | 1 << 18 | 1 << 19, 10_000),
    (1 << 21 | 1 << 22, 20_000),
    (0xF << 23, 40_000),
    (0xF << 27, 56_000),
)
_DAMAGED = (
    *("rx_errors", "tx_errors", "rx_crc_errors", "rx_frame_errors", "tx_carrier_errors"),
    *("collisions",),
)


def read_network() -> examination.NetworkFacts:
    """Return the facts about network devices, RDMA, ports and the firewall."""
    found = list_folder(NETWORK_FOLDER)
    names = None if found is None else [name for name in found if is_device(name)]
    return examination.NetworkFacts(
        devices=None if names is None else tuple(read_device(name) for name in names),
        rdma=read_rdma(),
        port_range=parse_port_range(read_text("/proc/sys/net/ipv4/ip_local_port_range") or ""),
        firewall=read_firewall(),
    )


def read_device(name: str) -> examination.DeviceFacts:
    """Return the facts about one network device."""
    base = f"{NETWORK_FOLDER}/{name}"
    speed = read_int(f"{base}/speed")
    counters = {
        name: read_int(f"{base}/statistics/{name}")
        for name in list_folder(f"{base}/statistics") or ()
    }
    duplex = read_text(f"{base}/duplex")
    carrier = read_int(f"{base}/carrier")
    typed = re.search(r"^DEVTYPE=(\S+)", read_text(f"{base}/uevent") or "", re.MULTILINE)
    kind = find_kind(
        name,
        list_folder(base) or (),
        typed[1] if typed else "",
        read_int(f"{base}/iflink") != read_int(f"{base}/ifindex"),
    )
    # Drivers of virtual devices invent a speed: veth reports 10 Gb/s.
    real = os.path.exists(f"{base}/device")
    return examination.DeviceFacts(
        name=name,
        kind=kind,
        driver=_read_driver(base),
        mtu=read_int(f"{base}/mtu"),
        speed_mbit=speed if speed and speed > 0 and real else None,
        best_speed_mbit=read_best_speed(name) if real else None,
        is_full_duplex={"full": True, "half": False}.get(duplex or "") if real else None,
        has_carrier=None if carrier is None else carrier == 1,
        saves_power=read_power_saving(name) if kind == "wifi" else None,
        packets=_sum(counters, "rx_packets", "tx_packets"),
        errors=_sum(counters, *_DAMAGED),
        dropped=_sum(counters, "rx_dropped", "tx_dropped"),
        carrier_losses=read_int(f"{base}/carrier_down_count"),
    )


def find_kind(
    name: str, entries: Sequence[str], kind_of_driver: str = "", is_linked: bool = False
) -> examination.DeviceKind | None:
    """Return the kind of a network device by its name and the entries of its folder.

    Args:
        name: name of the device.
        entries: names in its folder below /sys/class/net.
        kind_of_driver: DEVTYPE in its `uevent`, which only some drivers set.
        is_linked: True if it is one end of a pair or on top of another device.

    >>> find_kind("enp3s0", ["device"]), find_kind("wg0", []), find_kind("wlp2s0", ["wireless"])
    ('ethernet', 'vpn', 'wifi')
    """
    if "wireless" in entries or "phy80211" in entries:
        return "wifi"
    # The wireless folder is certain; names of other devices are conventions.
    for pattern, kind in _NAMES:
        if pattern.match(name):
            return kind
    if "bridge" in entries:
        return "bridge"
    if "tun_flags" in entries or kind_of_driver == "wireguard":
        return "vpn"
    if "device" in entries:
        return "ethernet"
    return "virtual" if is_linked else None


def read_best_speed(name: str) -> int | None:
    """Return the highest speed that a card supports, in Mb/s."""
    # struct ethtool_cmd: cmd, supported, advertising, and 32 more bytes.
    command = bytearray(struct.pack("=III32x", _ETHTOOL_GET, 0, 0))
    if not _ask_device(name, _ETHTOOL, command):
        return None
    supported = struct.unpack_from("=I", command, 4)[0]
    speeds = [speed for bits, speed in _MODES if supported & bits]
    return max(speeds, default=None)


def _ask_device(name: str, request: int, data: bytearray) -> bool:
    """Pass `data` to a driver, which writes its answer into it; return whether it answered."""
    block = (ctypes.c_char * len(data)).from_buffer(data)
    # struct ifreq: 16 bytes of name, then the address of the data.
    question = struct.pack("16sP16x", os.fsencode(name)[:15], ctypes.addressof(block))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker, contextlib.suppress(OSError):
        fcntl.ioctl(asker.fileno(), request, question)
        return True
    return False


def read_power_saving(name: str) -> bool | None:
    """Return whether a Wi-Fi card sleeps between packets."""
    # iw asks by nl80211; the older ioctl below works without the program.
    answer = ask(["iw", "dev", name, "get", "power_save"])
    if answer is not None and answer.code == 0:
        return answer.output.endswith(": on")
    # struct iwreq: 16 bytes of name, then iw_param {value, fixed, disabled, flags}.
    question = struct.pack("16s16x", os.fsencode(name)[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker, contextlib.suppress(OSError):
        disabled = fcntl.ioctl(asker.fileno(), _WIRELESS_POWER, question)[21]
        return disabled == 0
    return None


def read_rdma(folder: str = RDMA_FOLDER) -> tuple[examination.RdmaFacts, ...] | None:
    """Return each port of each RDMA device; empty without RDMA, None if unreadable."""
    if not os.path.isdir(folder):
        return ()
    names = list_folder(folder)
    if names is None:
        return None
    found = []
    for name in names:
        for port in list_folder(f"{folder}/{name}/ports") or ():
            base = f"{folder}/{name}/ports/{port}"
            state = read_text(f"{base}/state")  # such as `4: ACTIVE`
            found.append(
                examination.RdmaFacts(
                    name=f"{name}/{port}",
                    state=state.rpartition(": ")[2] if state else None,
                    rate=read_text(f"{base}/rate"),
                    link=read_text(f"{base}/link_layer"),
                )
            )
    return tuple(found)


def read_firewall() -> Literal["ufw", "firewalld", "none"] | None:
    """Return the active firewall, or None if unknown."""
    # Only root may run `ufw status`; any user may read its settings.
    settings = read_text("/etc/ufw/ufw.conf")
    if settings is not None and re.search(r"^ENABLED=yes", settings, re.MULTILINE | re.IGNORECASE):
        return "ufw"
    answer = ask(["systemctl", "is-active", "firewalld"])
    # Without systemd, a readable ufw.conf at least shows that ufw is off.
    if answer is None or not answer.output:
        return "none" if settings is not None else None
    return "firewalld" if answer.output == "active" else "none"


def parse_port_range(text: str) -> tuple[int, int] | None:
    """Return both numbers of ip_local_port_range.

    >>> parse_port_range("32768\\t60999"), parse_port_range("")
    ((32768, 60999), None)
    """
    with contextlib.suppress(ValueError):
        first, last = map(int, text.split())
        return first, last
    return None


def find_routes(addresses: Sequence[str]) -> examination.Routes:
    """Return the route to each address; invalid addresses get an empty route."""
    return examination.Routes(routes=tuple(_find_route(address) for address in addresses))


def _find_route(address: str) -> examination.Route:
    try:
        # Parsed, because the address comes from another PC and becomes an argument.
        number = str(ipaddress.ip_address(address.partition("%")[0]))
    except ValueError:
        return examination.Route(address=address[:100])
    answer = ask(["ip", "-j", "route", "get", number])
    if answer is None or answer.code != 0:
        return examination.Route(address=number)
    return parse_route(number, answer.output)


def parse_route(address: str, output: str) -> examination.Route:
    """Return the route in the output of `ip -j route get`."""
    entry: Any = None
    with contextlib.suppress(ValueError, LookupError, TypeError):
        entry = json.loads(output)[0]
    # The output of another version of ip may differ.
    if not isinstance(entry, dict):
        return examination.Route(address=address)
    metrics = [item for item in entry.get("metrics") or () if isinstance(item, dict)]
    mtus = [item["mtu"] for item in metrics if isinstance(item.get("mtu"), int)]
    device = _text_of(entry, "dev")
    return examination.Route(
        address=address,
        device=device if device and is_device(device) else None,
        source=_text_of(entry, "prefsrc"),
        gateway=_text_of(entry, "gateway"),
        mtu=mtus[0] if mtus else None,
    )


def _text_of(entry: Mapping[str, Any], key: str) -> str | None:
    value = entry.get(key)
    return str(value)[:100] if value else None


def _read_driver(base: str) -> str | None:
    with contextlib.suppress(OSError):
        return os.path.basename(os.readlink(f"{base}/device/driver"))
    return None


def _sum(counters: Mapping[str, int | None], *names: str) -> int | None:
    known = [value for name in names if (value := counters.get(name)) is not None]
    return sum(known) if known else None
