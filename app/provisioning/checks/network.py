"""Judge a node's network devices: the one that joins the nodes, its link, its errors, its
routes.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from agents.contract.requests.examination import DeviceFacts, Route
from app.nodes.identity import NEW_HOST_KEYS, NEW_MACHINE_ID, tell_apart
from app.provisioning.check_row import CheckedGroup, CheckedNode, CheckRow, Status, make_row
from app.provisioning.checks.majority import find_odd, find_usual
from app.provisioning.network_repairs import keep_wifi_awake, set_mtu, widen_ports
from app.provisioning.system_repairs import renew_machine_id
from app.shell_words import command_here, posix_command
from app.text import show_bytes, show_list

ENOUGH_PORTS = 2000
"""Minimum of ports for several runs of many ranks; each pair of ranks takes a few."""
MAX_ERRORS_SHARE = 1e-5
"""Maximum share of damaged packets; a good cable damages none in years."""
MIN_ERRORS = 20
"""Number of damaged packets that is not yet a sign; plugging a cable in damages some."""
MAX_CARRIER_LOSSES = 20
"""Maximum number of lost links since the start of the PC; suspend and switches cause some."""
ENOUGH_LOCKED_BYTES = 1 << 30
"""Minimum of memory that NCCL registers with an RDMA card, in bytes; CUDA's own needs no limit."""
STANDARD_MTU = 1500
GIGABIT_MBIT = 1000
_KINDS = {
    "ethernet": "a network card",
    "wifi": "Wi-Fi",
    "vpn": "a VPN",
    "bridge": "a bridge of containers or virtual machines",
    "virtual": "a link of a container or virtual machine",
    "mobile": "a mobile modem",
    "loopback": "loopback",
}


def judge_ports(node: CheckedNode) -> tuple[CheckRow, ...]:
    """Check that the system's range of ports is large enough for ranks."""
    ports = node.examination.network.port_range
    if ports is None:
        fix = "Run there: sysctl net.ipv4.ip_local_port_range"
        return (make_row("ports", node.name, "unknown", "its range of ports is not known", fix),)
    number = ports[1] - ports[0] + 1
    evidence = f"net.ipv4.ip_local_port_range = {ports[0]} {ports[1]}"
    if number >= ENOUGH_PORTS:
        text = f"{number} ports for connections"
        return (make_row("ports", node.name, "pass", text, "", evidence=evidence),)
    text = f"the system has only {number} ports for connections of all programs"
    fix = 'sudo sysctl net.ipv4.ip_local_port_range="32768 60999"'
    return (make_row("ports", node.name, "warn", text, fix, widen_ports(ports), evidence=evidence),)


def judge_rdma(node: CheckedNode) -> tuple[CheckRow, ...]:
    """List RDMA ports, which NCCL uses automatically; no row for nodes without them."""
    rows = []
    for port in node.examination.network.rdma or ():
        evidence = (
            f"{port.name}: {port.state or 'state not known'}, {port.rate or 'rate not known'}"
        )
        if port.state is None:
            fix = "Run there: rdma link"
            text = f"the state of RDMA port {port.name} is not known"
            rows.append(make_row("rdma", node.name, "unknown", text, fix, evidence=evidence))
        else:
            link = f"{port.link} at {port.rate}" if port.state == "ACTIVE" else "it has no link"
            text = f"RDMA port {port.name} is {port.state}: {link}"
            status: Status = "pass"
            fix = ""
            if port.state == "ACTIVE" and _locks_little(node):
                locked = show_bytes(node.examination.system.max_locked_bytes)
                text += f"; this login may lock only {locked} of memory, too little for NCCL"
                fix = "Set memlock to unlimited in /etc/security/limits.conf there (ulimit -l)"
                status = "warn"
            rows.append(make_row("rdma", node.name, status, text, fix, evidence=evidence))
    return tuple(rows)


def _locks_little(node: CheckedNode) -> bool:
    """Return whether a limit keeps NCCL from registering its buffers with an RDMA card."""
    locked = node.examination.system.max_locked_bytes
    # The kernel exempts root.
    return (
        locked is not None
        and locked < ENOUGH_LOCKED_BYTES
        and node.examination.system.sudo != "root"
    )


def judge_interfaces(group: CheckedGroup) -> tuple[CheckRow, ...]:
    """Name the device that carries training between the nodes, and its problem."""
    # The ranks of a single node connect over loopback.
    if len(group.endpoints) < 2:
        return ()
    return tuple(_judge_interface(group, name) for name in group.endpoints)


def _judge_interface(group: CheckedGroup, name: str) -> CheckRow:
    endpoint, node = group.endpoints[name], group.nodes[name]
    devices = node.examination.network.devices
    if endpoint.interface is None:
        text = (
            f"no network device of this node has the address {endpoint.address}: it is reached "
            "through a router or a forwarded port, and its ranks could not be reached"
        )
        fix = "Use its own address: rackless nodes set-address NAME --ssh USER@ADDRESS"
        return make_row("interface", name, "fail", text, fix)
    device = find_device(node, endpoint.interface)
    others = [_describe(one) for one in devices or () if one.name != endpoint.interface]
    evidence = f"{endpoint.address} on {endpoint.interface}; others: {show_list(others) or 'none'}"
    if device is None or device.kind is None:
        text = f"{endpoint.interface} joins the nodes; what kind of device it is, is not known"
        status: Status = "unknown" if endpoint.interface != "lo" else "pass"
        show = posix_command("ip", "-d", "link", "show", endpoint.interface)
        fix = f"Run there: {show}" if status == "unknown" else ""
        return make_row("interface", name, status, text, fix, evidence=evidence)
    text = f"{device.name} ({_KINDS[device.kind]}) joins the nodes at {endpoint.address}"
    better = _find_better(group, name)
    fixes: dict[str, str] = {
        "wifi": "Connect that PC by cable: Wi-Fi is slow and loses packets in bursts",
        "vpn": "Add the nodes at their addresses in your own network: rackless nodes set-address",
        "bridge": "Add the node at the address of its network card: rackless nodes set-address",
        "mobile": "Connect that PC by cable to the others",
    }
    fix = fixes.get(device.kind, "")
    if device.has_carrier is False:
        text, fix = f"{device.name} has no link: no cable, or the switch is off", "Check its cable"
        return make_row("interface", name, "fail", text, fix, evidence=evidence)
    if fix and better:
        text = f"{text}, although {better} joins them, too"
        there = f"USER@{better.split()[-1]}"
        words = ("rackless", "nodes", "set-address", name, "--ssh", there)
        fix = f"Use {better}: {command_here(*words)}"
    repair = keep_wifi_awake(device.name) if device.saves_power else None
    if repair is not None:
        text = f"{text}; it sleeps between packets and answers late"
        sleep = posix_command("sudo", "iw", "dev", device.name, "set", "power_save", "off")
        fix = f"{fix}; until then: {sleep}"
    status = "warn" if fix else "pass"
    return make_row("interface", name, status, text, fix, repair, evidence=evidence)


def _find_better(group: CheckedGroup, name: str) -> str:
    """Return `DEVICE at ADDRESS` of a network card in a network that all nodes share, or ""."""
    networks = [
        {
            _network_of(one.address)
            for one in node.facts.interfaces
            if (found := find_device(node, one.name)) and found.kind in ("ethernet", "virtual")
        }
        for node in group.nodes.values()
    ]
    shared = set.intersection(*networks) - {""} if networks else set()
    for one in group.nodes[name].facts.interfaces:
        if _network_of(one.address) in shared:
            return f"{one.name} at {one.address}"
    return ""


def _network_of(address: str) -> str:
    """Return the first three numbers of an IPv4 address, or "" for unusable ones."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return ""
    # The facts have no netmask; home networks have 24 bits.
    usable = found.version == 4 and not found.is_loopback and not found.is_link_local
    return address.rpartition(".")[0] if usable else ""


def judge_carriers(group: CheckedGroup) -> tuple[CheckRow, ...]:
    """Check the speed and duplex of the link of the device that joins the nodes."""
    rows = []
    for name, device in _lan_devices(group).items():
        speed, best = device.speed_mbit, device.best_speed_mbit
        evidence = (
            f"{device.name}: link {speed or 'not known'} Mb/s, card {best or 'not known'} Mb/s"
        )
        fix = "Try another cable (Cat 5e or better) and another port of the switch"
        if device.is_full_duplex is False:
            text = f"{device.name} works in half duplex: it cannot send and receive at once"
            rows.append(make_row("link-speed", name, "warn", text, fix, evidence=evidence))
        elif speed is None:
            # Drivers of Wi-Fi and virtual devices report no speed; the tcp rows measure it.
            fix = "The tcp rows have the measured speed"
            text = f"{device.name} does not report the speed of its link"
            rows.append(make_row("link-speed", name, "unknown", text, fix, evidence=evidence))
        elif best is not None and speed < best:
            text = f"{device.name} could do {best} Mb/s, but its link runs at {speed} Mb/s"
            rows.append(make_row("link-speed", name, "warn", text, fix, evidence=evidence))
        elif speed < GIGABIT_MBIT:
            text = f"the link of {device.name} runs at {speed} Mb/s only"
            rows.append(make_row("link-speed", name, "warn", text, fix, evidence=evidence))
        else:
            text = f"{device.name} is linked at {speed} Mb/s"
            rows.append(make_row("link-speed", name, "pass", text, "", evidence=evidence))
    return tuple(rows)


def judge_errors(group: CheckedGroup) -> tuple[CheckRow, ...]:
    """Check the error counters of the device that joins the nodes."""
    rows = []
    for name, device in _lan_devices(group).items():
        errors, packets = device.errors, device.packets
        if errors is None or packets is None:
            fix = f"Run there: {posix_command('ip', '-s', 'link', 'show', device.name)}"
            text = f"the counters of {device.name} could not be read"
            rows.append(make_row("errors", name, "unknown", text, fix))
            continue
        evidence = (
            f"{device.name}: {errors} damaged and {device.dropped or 0} dropped of {packets} "
            f"packets, link lost {device.carrier_losses or 0} times"
        )
        fix = "Replace its cable, then try another port of the switch"
        if errors > max(MIN_ERRORS, packets * MAX_ERRORS_SHARE):
            text = f"{device.name} damages packets: {errors} of {packets}"
            rows.append(make_row("errors", name, "warn", text, fix, evidence=evidence))
        elif (device.carrier_losses or 0) > MAX_CARRIER_LOSSES:
            text = f"{device.name} has lost its link {device.carrier_losses} times"
            rows.append(make_row("errors", name, "warn", text, fix, evidence=evidence))
        else:
            text = f"{device.name} has damaged {errors} of {packets} packets"
            rows.append(make_row("errors", name, "pass", text, "", evidence=evidence))
    return tuple(rows)


def judge_mtus(group: CheckedGroup) -> tuple[CheckRow, ...]:
    """Compare packet sizes: if they differ on one network, only large packets are lost."""
    known: dict[str, int] = {}
    rows = []
    for name, endpoint in group.endpoints.items():
        mtu = _read_mtu(group.nodes[name], endpoint.interface)
        if mtu is None:
            fix = "Run there: ip link"
            text = "the size of its packets is not known"
            rows.append(make_row("mtu", name, "unknown", text, fix))
        else:
            known[name] = mtu
    # Of all nodes: a node on loopback alone would differ from the others.
    odd, usual = find_odd(known), find_usual(known)
    for name, mtu in known.items():
        device = group.endpoints[name].interface or "DEVICE"
        evidence = f"{device}: mtu {mtu}"
        if name in odd:
            others = f"{odd[name].who} use {odd[name].value}"
            text = f"packets of {mtu} bytes, while {others}: large ones may be lost"
            fix = f"Use one size on all PCs and their switch, normally {STANDARD_MTU} bytes"
            repair = None
            # The only size that a repair sets: no node chooses one for another PC.
            if usual == STANDARD_MTU:
                fix = posix_command("sudo", "ip", "link", "set", "dev", device, "mtu", STANDARD_MTU)
                repair = set_mtu(device, mtu, STANDARD_MTU)
            rows.append(make_row("mtu", name, "warn", text, fix, repair, evidence=evidence))
        elif mtu < STANDARD_MTU:
            text = f"packets of {mtu} bytes, as on a VPN; networks normally use {STANDARD_MTU}"
            command = posix_command("sudo", "ip", "link", "set", device, "mtu", STANDARD_MTU)
            fix = f"{command}, unless your network needs less"
            rows.append(make_row("mtu", name, "warn", text, fix, evidence=evidence))
        else:
            jumbo = " (jumbo frames)" if mtu > STANDARD_MTU and device != "lo" else ""
            text = f"packets of {mtu} bytes{jumbo}, as on all nodes"
            rows.append(make_row("mtu", name, "pass", text, "", evidence=evidence))
    return tuple(rows)


def judge_machines(group: CheckedGroup) -> tuple[CheckRow, ...]:
    """Find PCs with the same machine id, from cloned disks, which routers and Rackless confuse."""
    seen: dict[str, str] = {}
    rows = []
    for name, node in group.nodes.items():
        own = node.facts.machine_id
        if own is None:
            text = "it has no machine id, so it is not recognised at another address"
            fix = "sudo systemd-machine-id-setup"
            rows.append(make_row("machine-id", name, "unknown", text, fix))
            continue
        twin = seen.setdefault(own, name)
        boot = node.examination.system.boot_id
        evidence = f"hash of the machine id {own[:8]}, boot {(boot or 'not known')[:8]}"
        # One boot id means one running system; a clone has its own.
        other = group.nodes[twin]
        is_clone = boot != other.examination.system.boot_id or tell_apart(node.facts, other.facts)
        if twin == name or not is_clone:
            # Two nodes may be one PC, such as two logins.
            same = "" if twin == name else f"; the same PC as {twin}"
            text = f"its machine id is its own{same}"
            rows.append(make_row("machine-id", name, "pass", text, "", evidence=evidence))
        else:
            text = (
                f"it has the machine id of {twin}: its disk was cloned, so the router may give "
                "both PCs one address, and Rackless could take one for the other"
            )
            fix = f"{NEW_MACHINE_ID}, then restart that PC"
            repair = renew_machine_id(own, f"{boot} {node.facts.macs}")
            rows.append(make_row("machine-id", name, "warn", text, fix, repair, evidence=evidence))
    return tuple(rows)


def judge_host_keys(group: CheckedGroup) -> tuple[CheckRow, ...]:
    """Find PCs with the same host key, from cloned disks: each can pass for the other."""
    seen: dict[str, str] = {}
    rows = []
    for name, key in group.host_keys.items():
        twin = seen.setdefault(key, name)
        if name not in group.nodes or twin not in group.nodes:
            continue
        if unlike := tell_apart(group.nodes[name].facts, group.nodes[twin].facts):
            text = (
                f"it has the SSH host key of {twin}, although their {unlike} differ: its disk was "
                "cloned, so whoever administers one PC can pretend to be the other"
            )
            fix = (
                f"{NEW_HOST_KEYS}, then restart that PC, remove the node and add it again to "
                "confirm the new key"
            )
            rows.append(make_row("host-key", name, "warn", text, fix, evidence=key))
    return tuple(rows)


def judge_routes(group: CheckedGroup, name: str, routes: Mapping[str, Route]) -> CheckRow:
    """Judge the routes of node `name` to its peers; `routes` has them by name of the peer."""
    interface = group.endpoints[name].interface
    evidence = "; ".join(
        f"{peer}: {route.device or 'no way'}" + (f" by {route.gateway}" if route.gateway else "")
        for peer, route in routes.items()
    )
    lost = [peer for peer, route in routes.items() if route.device is None]
    # No route to any peer is more likely a failure to read them than a PC without a network.
    if lost and len(lost) == len(routes):
        text = "it is not known by which device packets to the others leave"
        fix = f"Run there: {_ask_route(group, lost[0])}"
        return make_row("route", name, "unknown", text, fix, evidence=evidence)
    if lost:
        text = f"there is no route from here to {show_list(lost)}"
        fix = "Connect the nodes to one network; run there: ip route"
        return make_row("route", name, "fail", text, fix, evidence=evidence)
    for peer, route in routes.items():
        if route.device not in (interface, "lo"):
            device = find_device(group.nodes[name], route.device or "")
            what = f" ({_KINDS[device.kind]})" if device and device.kind else ""
            text = (
                f"packets to {peer} leave by {route.device}{what}, not by {interface}, "
                "which joins the nodes"
            )
            ask = _ask_route(group, peer)
            fix = f"Turn that off or exclude your network from it; run there: {ask}"
            return make_row("route", name, "warn", text, fix, evidence=evidence)
        if route.gateway is not None:
            text = f"packets to {peer} pass a router, {route.gateway}, which limits their speed"
            fix = "Connect the nodes to one switch and give them addresses of one network"
            return make_row("route", name, "warn", text, fix, evidence=evidence)
    smaller = {peer: route.mtu for peer, route in routes.items() if route.mtu}
    if smaller:
        peer, mtu = next(iter(smaller.items()))
        text = f"a device on the path to {peer} lets only packets of {mtu} bytes pass"
        fix = "Turn VPNs off, and check the packet size of the switch or router between the nodes"
        return make_row("route", name, "warn", text, fix, evidence=evidence)
    return make_row("route", name, "pass", f"{interface} leads to all nodes", "", evidence=evidence)


def _ask_route(group: CheckedGroup, peer: str) -> str:
    return posix_command("ip", "route", "get", group.endpoints[peer].address)


def find_device(node: CheckedNode, name: str) -> DeviceFacts | None:
    """Return a network device of a node by name, or None."""
    devices = node.examination.network.devices or ()
    return next((device for device in devices if device.name == name), None)


def _lan_devices(group: CheckedGroup) -> dict[str, DeviceFacts]:
    """Return the device that joins each node to the others, without nodes on loopback."""
    found = {
        name: find_device(group.nodes[name], endpoint.interface or "")
        for name, endpoint in group.endpoints.items()
    }
    return {name: device for name, device in found.items() if device and device.name != "lo"}


def _read_mtu(node: CheckedNode, interface: str | None) -> int | None:
    # Only the device that training uses: bridges and VPNs have other sizes.
    return next((one.mtu for one in node.facts.interfaces if one.name == interface), None)


def _describe(device: DeviceFacts) -> str:
    return f"{device.name} ({_KINDS[device.kind]})" if device.kind else device.name
