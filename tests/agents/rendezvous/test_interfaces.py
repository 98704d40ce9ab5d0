"""Which interface has an address, and that Gloo's doors close behind the last rank."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from agents.errors import ExpectedError
from agents.rendezvous.interfaces import (
    choose_variables,
    find_interface,
    find_route,
    listen_on,
    name_interface,
    read_addresses,
)


def test_addresses_are_those_that_ip_lists() -> None:
    listed = json.loads(subprocess.check_output(["ip", "-j", "addr"]))
    expected = {
        (device["ifname"], entry["local"]) for device in listed for entry in device["addr_info"]
    }
    assert {(device, str(address)) for device, address in read_addresses()} == expected
    for device, address in expected:
        assert find_interface(address) == device


def test_an_address_of_no_interface_is_refused_with_what_to_do() -> None:
    assert find_interface("203.0.113.7") is None
    assert find_interface("not an address") is None
    with pytest.raises(ExpectedError, match=r"No network interface of this node has the address"):
        name_interface("203.0.113.7")
    assert name_interface("203.0.113.7", "eth9") == "eth9"
    assert name_interface("127.0.0.1", "eth9") == "lo"


def test_loopback_leads_to_loopback() -> None:
    assert find_route("127.0.0.1") == "127.0.0.1"
    assert choose_variables("127.0.0.1", is_first=False) == listen_on("lo")
    assert choose_variables("localhost", is_first=True) == listen_on("lo")
    with pytest.raises(ExpectedError, match="leads to rank 0 at nowhere"):
        choose_variables("nowhere.invalid", is_first=False)


def test_nccl_matches_the_whole_name_and_opens_no_port_of_its_own() -> None:
    assert listen_on("eth1") == {
        "GLOO_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_IFNAME": "=eth1",
        "NCCL_RAS_ENABLE": "0",
    }


CLOSED_DOOR = """
import socket
from agents.rendezvous.doors import close_doors
door = socket.create_server(("127.0.0.1", 0))
inside = socket.create_connection(door.getsockname(), 5)
accepted, _ = door.accept()
assert close_doors() == 1
try:
    socket.create_connection(door.getsockname(), 0.5)
except TimeoutError:
    inside.sendall(b"still here")
    print(accepted.recv(100).decode())
"""


def test_a_closed_door_keeps_who_is_inside_and_lets_nobody_in() -> None:
    # In a process of its own: it closes every door of its process.
    said = subprocess.check_output([sys.executable, "-c", CLOSED_DOOR], text=True)
    assert said == "still here\n"


QUICK_RETRIES = """
import socket
from agents.rendezvous.connections import outlast_outages
door = socket.create_server(("127.0.0.1", 0))
inside = socket.create_connection(door.getsockname(), 5)
other, outside = socket.socketpair()
print(outlast_outages(), inside.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
"""


def test_connections_of_a_process_are_kept_through_an_outage() -> None:
    said = subprocess.check_output([sys.executable, "-c", QUICK_RETRIES], text=True).split()
    assert said[0] in ("0", "1"), "only the connection, not the door or the pair; 0: older kernels"
    assert said[1] == "1800000"
