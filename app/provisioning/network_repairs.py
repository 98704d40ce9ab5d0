"""Repairs of a node's network: packet size, firewall, power saving and ports.

Commands are those of Debian and Ubuntu.
"""

from __future__ import annotations

import re

from agents.contract.repair import FileEdit, Probe, RepairStep
from app.provisioning.repairs import Repair

PORTS = "net.ipv4.ip_local_port_range"
USUAL_PORTS = (32768, 60999)
"""First and last port of Linux's default range; see Documentation/networking/ip-sysctl."""
# A route without a router, to one PC.
_NEIGHBOUR = r"(?s)(?!.*\b(via|unreachable|broadcast|multicast)\b).*\bdev \S.*"


def set_mtu(interface: str, before: int, after: int) -> Repair:
    """Return the repair that gives an interface packets of `after` bytes instead of `before`."""
    device = ("ip", "link", "set", "dev", interface, "mtu")
    size = ("cat", f"/sys/class/net/{interface}/mtu")
    return Repair(
        id=f"mtu-{interface}",
        title=f"Send packets of {after} bytes",
        explanation=f"All PCs of one network need the same size, or large packets are lost. This "
        f"lasts until {interface} is set up again, such as by a restart. To keep it, with "
        f"NetworkManager: nmcli connection modify NAME 802-3-ethernet.mtu {after}; with netplan: "
        f"netplan set ethernets.{interface}.mtu={after}.",
        steps=(
            RepairStep(
                says=f"Set the packet size of {interface} from {before} to {after} bytes",
                run=(*device, str(after)),
                undo=(*device, str(before)),
                needs=(Probe(argv=size, shows=str(before)),),
                done=Probe(argv=size, shows=str(after)),
            ),
        ),
    )


def open_ufw(node: str, source: str) -> Repair:
    """Return the repair that lets `source`, an address, through the firewall of `node`.

    Its own routes must say that the address is in a network of that PC: a node that lies about its
    address could otherwise open the firewall of another one to the internet.
    """
    neighbour = Probe(argv=("ip", "-o", "route", "get", source), shows=_NEIGHBOUR, as_root=True)
    rule = ("proto", "tcp", "from", source)
    return Repair(
        id=f"firewall-{source.replace(':', '-')}",
        node=node,
        title=f"Let {source} through the firewall",
        explanation="Ranks connect on ports that the system chooses, so the rule is for all TCP "
        f"ports, from {source} alone. Nothing of Rackless listens there while no run is on.",
        steps=(
            RepairStep(
                says=f"Allow TCP from {source}",
                run=("ufw", "allow", *rule),
                undo=("ufw", "delete", "allow", *rule),
                needs=(neighbour,),
                done=Probe(
                    argv=("ufw", "status"),
                    shows=rf"(?s).*Anywhere(/tcp)?\s+ALLOW( IN)?\s+{re.escape(source)}(/tcp)?\b.*",
                    as_root=True,
                ),
            ),
        ),
    )


def keep_wifi_awake(interface: str) -> Repair:
    """Return the repair that stops a Wi-Fi card from sleeping between packets."""
    device = ("iw", "dev", interface)
    return Repair(
        id=f"wifi-power-{interface}",
        title=f"Keep {interface} awake",
        explanation="A Wi-Fi card that saves power answers late, and every step of a run waits for "
        "it. It then takes about a watt more. This lasts until a restart; to keep it, with "
        "NetworkManager: nmcli connection modify NAME 802-11-wireless.powersave 2.",
        steps=(
            RepairStep(
                says=f"Switch off power saving of {interface}",
                run=(*device, "set", "power_save", "off"),
                undo=(*device, "set", "power_save", "on"),
                done=Probe(argv=(*device, "get", "power_save"), shows="Power save: off"),
            ),
        ),
    )


def widen_ports(now: tuple[int, int]) -> Repair:
    """Return the repair that gives programs the usual range of ports instead of `now`."""
    first, last = USUAL_PORTS
    value = f"{first} {last}"
    return Repair(
        id="ports",
        title="Give programs the usual range of ports",
        explanation="Each pair of ranks takes a few ports. Connections that are open stay.",
        steps=(
            RepairStep(
                says=f"Set the range to {first} to {last}",
                run=("sysctl", "-w", f"{PORTS}={value}"),
                undo=("sysctl", "-w", f"{PORTS}={now[0]} {now[1]}"),
                done=Probe(argv=("sysctl", "-n", PORTS), shows=rf"{first}\s+{last}"),
            ),
            RepairStep(
                says="Set it after a restart, too",
                edit=FileEdit(
                    path="/etc/sysctl.d/60-rackless.conf", content=f"{PORTS} = {value}\n"
                ),
            ),
        ),
    )
