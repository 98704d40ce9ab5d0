"""Faults of links, devices, ways, and of reaching a node at all."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from tests.cluster.master import Master
from tests.cluster.namespaces import Node
from tests.faulty_nodes.fault import Fault, Inject
from tests.faulty_nodes.played import IW, UFW
from tests.faulty_nodes.site import FaultySite, Session, tools_in

DEVICE = Path("/sys/class/net/eth0")
PORTS = "net.ipv4.ip_local_port_range"
SHAPE = "burst 128kb latency 20ms"
# What the bootstrap and the check use, without python3.
TOOLS = (
    *("sh", "sha256sum", "head", "mkdir", "test", "find", "chmod", "mv", "cat", "grep", "rm"),
    *("ls", "sort", "tail", "wc", "sleep"),
)


def block(site: FaultySite, stack: ExitStack, caller: Node, answerer: Node) -> None:
    """Let the firewall of a node drop what comes from another one; its ufw is played."""
    programs = site.play(stack, answerer, {"ufw": UFW}, ufw="")
    site.edit_etc(stack, answerer, "ufw/ufw.conf", "ENABLED=yes\n")
    site.change_session(stack, answerer, Session(programs=[programs]))
    site.filter(stack, answerer, "eth0", "syn", caller.address)


def block_one_way(site: FaultySite, stack: ExitStack) -> None:
    block(site, stack, site.nodes[0], site.nodes[1])


def block_both_ways(site: FaultySite, stack: ExitStack) -> None:
    block(site, stack, site.nodes[0], site.nodes[1])
    block(site, stack, site.nodes[1], site.nodes[0])


def block_self(site: FaultySite, stack: ExitStack) -> None:
    node = site.nodes[0]
    site.filter(stack, node, "lo", "syn", node.address)


def lose_large_packets(site: FaultySite, stack: ExitStack) -> None:
    # From one node alone: else the master's SSH would stand still before any row.
    site.filter(stack, site.nodes[1], "eth0", "longer", site.nodes[0].address)


def lose_packets(site: FaultySite, stack: ExitStack) -> None:
    site.filter(stack, site.nodes[1], "eth0", "loss", "15")


def shape(rate: str) -> Inject:
    def inject(site: FaultySite, stack: ExitStack) -> None:
        change = "tc qdisc change dev eth0 root tbf rate {} " + SHAPE
        site.in_node(stack, site.nodes[0], change.format(rate), change.format("1gbit"))

    return inject


def route(do: str) -> Inject:
    """Return the fault of a wrong way from the first node; `{peer}` is the second one's address."""

    def inject(site: FaultySite, stack: ExitStack) -> None:
        words = do.format(peer=site.nodes[1].address, router=site.nodes[2].address)
        undo = f"ip route del {words.split(' ', 1)[1] if words.startswith('unr') else words}"
        site.in_node(stack, site.nodes[0], f"ip route add {words}", undo)

    return inject


def set_mtu(site: FaultySite, stack: ExitStack) -> None:
    change = "ip link set dev eth0 mtu {}"
    site.in_node(stack, site.nodes[0], change.format(1400), change.format(1500))


def open_tunnel(site: FaultySite, stack: ExitStack) -> None:
    """A VPN that takes the traffic to another node, as one for all traffic does."""
    node = site.nodes[0]
    add, delete = "ip tuntap {} mode tun dev tun0".format, "ip tuntap del mode tun dev tun0"
    site.in_node(stack, node, add("add"), delete)
    site.in_node(stack, node, "ip link set tun0 up")
    site.in_node(stack, node, f"ip route add {site.nodes[1].address}/32 dev tun0")


def rename(name: str) -> Inject:
    def inject(site: FaultySite, stack: ExitStack) -> None:
        site.rename_device(stack, site.nodes[0], "eth0", name)

    return inject


def save_power(site: FaultySite, stack: ExitStack) -> None:
    node = site.nodes[0]
    rename("wlan0")(site, stack)
    programs = site.play(stack, node, {"iw": IW}, power="on\n")
    site.change_session(stack, node, Session(programs=[programs]))


def narrow_ports(site: FaultySite, stack: ExitStack) -> None:
    node = site.nodes[0]
    stack.callback(site.cluster.run, node, "sysctl", "-qw", f"{PORTS}=32768 60999")
    site.cluster.run(node, "sysctl", "-qw", f"{PORTS}=50000 50299")


def damage_packets(site: FaultySite, stack: ExitStack) -> None:
    counter = site.put_file("rx_crc_errors", "48211\n")
    files = {DEVICE / "statistics/rx_crc_errors": counter}
    site.change_session(stack, site.nodes[0], Session(files=files))


def describe_card(**values: str) -> Inject:
    """Return the fault of a network card whose driver tells these values."""

    def inject(site: FaultySite, stack: ExitStack) -> None:
        node = site.nodes[0]
        folder = site.folder / "card"
        healthy = {
            **{"mtu": "1500", "speed": "1000", "duplex": "full", "operstate": "up"},
            **{"carrier": "1", "iflink": "2", "ifindex": "2", "carrier_down_count": "1"},
        }
        for name, value in (healthy | values).items():
            site.put_file(f"card/{name}", f"{value}\n")
        for name in ("rx_packets", "tx_packets", "rx_errors", "tx_errors"):
            site.put_file(f"card/statistics/{name}", "1000\n" if "packets" in name else "0\n")
        (folder / "device").mkdir(exist_ok=True)
        site.change_session(stack, node, Session(files={DEVICE: folder}))

    return inject


def loop_name(site: FaultySite, stack: ExitStack) -> None:
    node = site.nodes[0]
    stack.callback(site.write_hosts, node, node.address)
    site.write_hosts(node, "127.0.1.1")


def clone_disk(site: FaultySite, stack: ExitStack) -> Master:
    first, second = site.nodes[:2]
    site.edit_etc(stack, second, "machine-id", (site.etc(first) / "machine-id").read_text())
    site.change_session(stack, second, Session())
    # The master that knew both PCs would see that one is another PC now.
    return site.fresh_master()


def cut_cable(site: FaultySite, stack: ExitStack) -> None:
    stack.callback(site.cluster.heal, site.nodes[0])
    site.cluster.cut(site.nodes[0])


def stop_server(site: FaultySite, stack: ExitStack) -> None:
    stack.callback(site.restart, site.nodes[0])
    site.cluster.stop_sshd(site.nodes[0])


def change_key(site: FaultySite, stack: ExitStack) -> None:
    node = site.nodes[0]
    names = ("host_key", "host_key.pub")
    kept = {name: (node.folder / name).read_bytes() for name in names}

    def restore() -> None:
        for name, data in kept.items():
            (node.folder / name).write_bytes(data)
        site.restart(node)

    stack.callback(restore)
    site.cluster.change_host_key(node)
    site.restart(node)


def forget_login(site: FaultySite, stack: ExitStack) -> None:
    nobody = site.put_file("nobody.pub", "")
    known = Path(f"{site.cluster.key}.pub")
    site.change_session(stack, site.nodes[0], Session(files={known: nobody}))


def remove_python(site: FaultySite, stack: ExitStack) -> None:
    path = tools_in(site.folder / "tools", TOOLS)
    site.change_session(stack, site.nodes[0], Session(variables={"PATH": str(path)}))


NETWORK_FAULTS = (
    Fault(name="port blocked one way", inject=block_one_way, check="tcp", status="fail",
          says="a firewall on node2 drops", peer="node2", repair="firewall-", played="ufw"),
    Fault(name="ports blocked both ways", inject=block_both_ways, check="tcp", status="fail",
          says="a firewall on node1 drops", node="node2", peer="node1", repair="firewall-",
          played="ufw"),
    Fault(name="own address blocked", inject=block_self, check="tcp", status="fail",
          says="its own address", peer="node1"),
    Fault(name="MTU black hole", inject=lose_large_packets, check="tcp", status="fail",
          says="MTU black hole", peer="node2"),
    Fault(name="lossy link", inject=lose_packets, check="tcp", status="warn",
          says="had to be sent again", peer="node2"),
    Fault(name="link of 50 Mb/s", inject=shape("50mbit"), check="tcp", status="warn",
          says="much slower than Gigabit", peer="node2"),
    Fault(name="no way to another node", inject=route("unreachable {peer}"), check="route",
          status="fail", says="no route from here to node2", also_fails=("tcp",)),
    Fault(name="VPN takes the traffic", inject=open_tunnel, check="route", status="warn",
          says="leave by tun0 (a VPN)", also_fails=("tcp",)),
    Fault(name="router between the nodes", inject=route("{peer} via {router}"), check="route",
          status="warn", says="pass a router, 10.77.0.13", also_fails=("tcp",)),
    Fault(name="path of 1280 bytes", inject=route("{peer} dev eth0 mtu 1280"), check="route",
          status="warn", says="only packets of 1280 bytes"),
    Fault(name="other packet size", inject=set_mtu, check="mtu", status="warn",
          says="packets of 1400 bytes", repair="mtu-"),
    Fault(name="Wi-Fi joins the nodes", inject=rename("wlan0"), check="interface", status="warn",
          says="Wi-Fi"),
    Fault(name="Wi-Fi that saves power", inject=save_power, check="interface", status="warn",
          says="it sleeps between packets", repair="wifi-power-", played="iw"),
    Fault(name="VPN joins the nodes", inject=rename("wg0"), check="interface", status="warn",
          says="a VPN"),
    Fault(name="bridge of Docker joins the nodes", inject=rename("docker0"), check="interface",
          status="warn", says="a bridge of containers"),
    Fault(name="few ports", inject=narrow_ports, check="ports", status="warn",
          says="only 300 ports", repair="ports"),
    Fault(name="damaged packets", inject=damage_packets, check="errors", status="warn",
          says="damages packets: 48211"),
    Fault(name="Gigabit card at 100 Mb/s", inject=describe_card(speed="100"), check="link-speed",
          status="warn", says="at 100 Mb/s only"),
    Fault(name="half duplex", inject=describe_card(duplex="half"), check="link-speed",
          status="warn", says="half duplex"),
    Fault(name="link lost again and again", inject=describe_card(carrier_down_count="412"),
          check="errors", status="warn", says="lost its link 412 times"),
    Fault(name="127.0.1.1 in hosts", inject=loop_name, check="hostname", status="warn",
          says="127.0.1.1, which is loopback", repair="own-name"),
    Fault(name="cloned disk", inject=clone_disk, check="machine-id", status="warn", node="node2",
          says="the machine id of node1: its disk was cloned", repair="new-machine-id"),
    Fault(name="cable pulled", inject=cut_cable, check="reach", status="fail", says="10.77.0.11"),
    Fault(name="no SSH server", inject=stop_server, check="reach", status="fail",
          says="nothing listens"),
    Fault(name="changed host key", inject=change_key, check="reach", status="fail",
          says="host key"),
    Fault(name="login not accepted", inject=forget_login, check="reach", status="fail",
          says="key"),
    Fault(name="no python3", inject=remove_python, check="reach", status="fail",
          says="no python3"),
)  # fmt: skip
