"""Drop packets that arrive at a device, as a firewall, a black hole or a bad cable does.

    python packet_filter.py DEVICE syn ADDRESS         new TCP connections from an address
    python packet_filter.py DEVICE longer ADDRESS      packets of more than 1300 bytes from it
    python packet_filter.py DEVICE loss PERCENT        packets at random

Run it in the namespace of the device. A program of a few instructions for the kernel (XDP) does it,
since iptables and the classifiers of `tc` are not part of every kernel. It stays until
`ip link set dev DEVICE xdp off`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import struct
import sys

BPF_CALL_NUMBERS = {"x86_64": 321, "aarch64": 280}
"""Number of the system call bpf(2)."""
PROG_LOAD, PROG_TYPE_XDP = 5, 6
DROP, PASS = 1, 2
ETHERNET_BYTES = 14
LONG_BYTES = 1300
GENERIC_MODE, NATIVE_MODE = 2, 4
_RTM_SETLINK, _REQUEST, _ACK = 19, 1, 4
_IFLA_XDP, _NESTED, _XDP_FD, _XDP_FLAGS = 43, 0x8000, 1, 3

# Instructions: code, destination, source, jump, value (kernel: bpf/standardization).
Instruction = tuple[int, int, int, int, int]
_MOVE, _MOVE_VALUE, _ADD_VALUE, _AND_VALUE, _MODULO = 0xBF, 0xB7, 0x07, 0x57, 0x97
_LOAD_1, _LOAD_2, _LOAD_4 = 0x71, 0x69, 0x61
_IF_OTHER, _IF_GREATER, _IF_NOT_LESS, _CALL, _EXIT = 0x55, 0x2D, 0x35, 0x85, 0x95
_RANDOM = 7


def load_bounds() -> list[Instruction]:
    """Put the packet's start into r2 and its end into r3."""
    return [(_LOAD_4, 2, 1, 0, 0), (_LOAD_4, 3, 1, 4, 0)]


def end_with(code: int) -> list[Instruction]:
    return [(_MOVE_VALUE, 0, 0, 0, code), (_EXIT, 0, 0, 0, 0)]


def drop_new_connections(address: str) -> list[Instruction]:
    """Drop TCP packets with SYN and without ACK that come from an IPv4 address."""
    return _drop_if(
        address,
        54,
        [
            *((_LOAD_1, 5, 2, 23, 0), (_IF_OTHER, 5, 0, 0, 6)),  # TCP
            *((_LOAD_1, 5, 2, 47, 0), (_AND_VALUE, 5, 0, 0, 0x12), (_IF_OTHER, 5, 0, 0, 0x02)),
        ],
    )


def drop_longer(address: str) -> list[Instruction]:
    """Drop IP packets of more than `LONG_BYTES` that come from an IPv4 address."""
    return _drop_if(address, LONG_BYTES + ETHERNET_BYTES + 1, [])


def _drop_if(address: str, num_bytes: int, tests: list[Instruction]) -> list[Instruction]:
    """Drop IPv4 packets from `address` that have at least `num_bytes` and pass all tests."""
    source = struct.unpack("<i", socket.inet_aton(address))[0]
    body = [
        *load_bounds(),
        *((_MOVE, 4, 2, 0, 0), (_ADD_VALUE, 4, 0, 0, num_bytes), (_IF_GREATER, 4, 3, 0, 0)),
        *((_LOAD_2, 5, 2, 12, 0), (_IF_OTHER, 5, 0, 0, 0x0008)),  # IPv4, in network order
        *((_LOAD_4, 5, 2, 26, 0), (_IF_OTHER, 5, 0, 0, source)),
        *tests,
    ]
    # Every test jumps to the end, which lets the packet pass.
    total = len(body) + 2
    placed = [
        (code, to, by, total - place - 1 if code in (_IF_OTHER, _IF_GREATER) else jump, value)
        for place, (code, to, by, jump, value) in enumerate(body)
    ]
    return [*placed, *end_with(DROP), *end_with(PASS)]


def drop_some(percent: int) -> list[Instruction]:
    """Drop that share of all packets."""
    return [
        (_CALL, 0, 0, 0, _RANDOM),
        (_MODULO, 0, 0, 0, 100),
        (_IF_NOT_LESS, 0, 0, 2, percent),
        *end_with(DROP),
        *end_with(PASS),
    ]


def load(program: list[Instruction]) -> int:
    """Load a program into the kernel and return its descriptor.

    Raises:
        OSError: the kernel refuses it, or has no BPF.
    """
    packed = b"".join(
        struct.pack("<BBhi", code, by << 4 | to, off, value) for code, to, by, off, value in program
    )
    code, licence = ctypes.create_string_buffer(packed), ctypes.create_string_buffer(b"GPL")
    fields = struct.pack(
        "<IIQQ", PROG_TYPE_XDP, len(program), ctypes.addressof(code), ctypes.addressof(licence)
    )
    attributes = ctypes.create_string_buffer(fields.ljust(128, b"\0"), 128)
    libc = ctypes.CDLL(None, use_errno=True)
    number = BPF_CALL_NUMBERS[platform.machine()]
    descriptor = int(libc.syscall(number, PROG_LOAD, ctypes.byref(attributes), 128))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), f"bpf: {os.strerror(ctypes.get_errno())}")
    return descriptor


def attach(device: str, descriptor: int) -> None:
    """Have a device run a program for each packet that arrives.

    Raises:
        OSError: the device cannot.
    """
    # Natively a pair of veth hands over packets as they are on a wire, not whole segments.
    mode = GENERIC_MODE if device == "lo" else NATIVE_MODE
    inner = struct.pack("=HHiHHI", 8, _XDP_FD, descriptor, 8, _XDP_FLAGS, mode)
    nested = struct.pack("=HH", 4 + len(inner), _IFLA_XDP | _NESTED) + inner
    body = struct.pack("=BxHiII", 0, 0, socket.if_nametoindex(device), 0, 0) + nested
    head = struct.pack("=IHHII", 16 + len(body), _RTM_SETLINK, _REQUEST | _ACK, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.send(head + body)
        error = struct.unpack_from("=i", kernel.recv(4096), 16)[0]
    if error:
        raise OSError(-error, f"xdp on {device}: {os.strerror(-error)}")


def main(argv: list[str]) -> None:
    device, kind, value = argv
    program = (
        drop_new_connections(value)
        if kind == "syn"
        else drop_longer(value)
        if kind == "longer"
        else drop_some(int(value))
    )
    attach(device, load(program))


if __name__ == "__main__":
    main(sys.argv[1:])
