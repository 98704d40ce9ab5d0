"""Requests of the check: what a node reads of its own system. `None` means not known.

A node only reads. The master interprets the values (`app/provisioning/checks`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from agents.contract.names import (
    MAX_PORT,
    check_address,
    check_device,
    check_number,
    check_text,
    drop_odd_paths,
    drop_odd_words,
)
from agents.contract.node import MAX_BYTES, MAX_LISTED, MTUS, SPEEDS_MBIT, drop_odd_numbers
from agents.contract.requests import NodeRequest
from agents.contract.wake import WakeTarget

DeviceKind = Literal["ethernet", "wifi", "vpn", "bridge", "virtual", "mobile", "loopback"]
"""Type of a network device; `virtual` is one end of a container's or VM's link."""
Sudo = Literal["root", "free", "password", "none"]
"""How commands run as administrator: as this user, without a password, with a password, or not."""
SyncService = Literal["on", "off", "none"]
"""State of the service that sets the clock: running, installed but off, or missing."""

NO_LIMIT = 2**63 - 1
"""Value of a login limit that is not set."""
_COUNTS = (
    *("inodes", "inodes_free", "swap_bytes", "shm_bytes", "shm_free_bytes"),
    *("temporary_free_bytes", "max_open_files", "max_processes", "max_address_bytes"),
)


def _check_texts(record: object, *names: str) -> None:
    for name in names:
        check_text(name, getattr(record, name) or "")


def _check_lists(record: object, *names: str) -> None:
    for name in names:
        items = getattr(record, name) or ()
        if len(items) > MAX_LISTED:
            raise ValueError(f"{name} has {len(items)} items; at most {MAX_LISTED} fit")
        for item in items:
            if isinstance(item, str):
                check_text(name, item)


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Route of packets from a node to an address."""

    address: str
    device: str | None = None
    """Network device; None: no route, or not known."""
    source: str | None = None
    """Own address that such packets carry."""
    gateway: str | None = None
    """Router on the route; None: the address is in the same network."""
    mtu: int | None = None
    """Packet size that the kernel has learned for this route, in bytes; None: that of the
    device."""

    def check_foreign(self) -> None:
        for name in ("address", "source", "gateway"):
            check_address(name, getattr(self, name))
        check_device("device", self.device)
        drop_odd_numbers(self, mtu=MTUS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Routes:
    routes: tuple[Route, ...] = ()

    def check_foreign(self) -> None:
        _check_lists(self, "routes")


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemFacts:
    sudo: Sudo | None = None
    home: str | None = None
    """Folder of the agent, which holds runs, checkpoints and environments."""
    home_writable: bool | None = None
    """True if a file can be written there."""
    home_executable: bool | None = None
    """True if a program there can be started; False: it is mounted with noexec."""
    home_file_system: str | None = None
    """Type of its file system, such as `ext4`, `nfs4` or `9p`."""
    inodes: int | None = None
    """Number of files that its file system can hold; 0: unlimited."""
    inodes_free: int | None = None
    swap_bytes: int | None = None
    shm_bytes: int | None = None
    """Size of /dev/shm, in bytes."""
    shm_free_bytes: int | None = None
    clock_synchronised: bool | None = None
    """True if the kernel reports that a time server keeps the clock."""
    clock_service: SyncService | None = None
    boot_id: str | None = None
    """Random id of this start of the system; equal only for nodes on one PC."""
    hostname_addresses: tuple[str, ...] | None = None
    """Addresses that its own name resolves to on the node, IPv4 first; empty: it does not
    resolve."""
    first_process: str | None = None
    """Name of process 1, such as `systemd`."""
    ends_at_logout: bool | None = None
    """True if systemd ends a user's processes at logout."""
    lingers: bool | None = None
    """True if systemd lingering is enabled."""
    user: str | None = None
    """Name of the user that Rackless logs in as."""
    may_sleep: bool | None = None
    """True if this PC may suspend: it has a desktop, and sleep is not masked."""
    temporary_folder: str | None = None
    """Folder in which compilers and other programs put temporary files."""
    temporary_free_bytes: int | None = None
    """Free space in the folder for temporary files, in bytes."""
    temporary_writable: bool | None = None
    """True if a file can be written there."""
    max_open_files: int | None = None
    """Maximum number of open files of a process of this login; `NO_LIMIT`: not set."""
    max_processes: int | None = None
    """Maximum number of processes and threads of this login; `NO_LIMIT`: not set."""
    max_address_bytes: int | None = None
    """Maximum address space of a process, in bytes; `NO_LIMIT`: not set."""
    max_locked_bytes: int | None = None
    """Maximum memory that a process may lock for RDMA, in bytes; `NO_LIMIT`: not set. CUDA pins
    memory without it."""

    def check_foreign(self) -> None:
        drop_odd_paths(self, "home", "temporary_folder")
        drop_odd_words(self, "home_file_system", "boot_id", "first_process", "user")
        _check_lists(self, "hostname_addresses")
        for address in self.hostname_addresses or ():
            check_address("hostname_addresses", address)
        drop_odd_numbers(self, **dict.fromkeys(_COUNTS, (0, NO_LIMIT)))


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """A network device, with its counters since it came up."""

    name: str
    kind: DeviceKind | None = None
    driver: str | None = None
    mtu: int | None = None
    speed_mbit: int | None = None
    """Speed of the link, in Mb/s."""
    best_speed_mbit: int | None = None
    """Highest speed that the card supports, in Mb/s."""
    is_full_duplex: bool | None = None
    has_carrier: bool | None = None
    saves_power: bool | None = None
    """True if a Wi-Fi card sleeps between packets."""
    packets: int | None = None
    """Number of packets received and sent."""
    errors: int | None = None
    """Number of damaged packets, received and sent."""
    dropped: int | None = None
    carrier_losses: int | None = None
    """Number of times that the link was lost."""

    def check_foreign(self) -> None:
        check_device("name", self.name)
        drop_odd_words(self, "driver")
        drop_odd_numbers(self, mtu=MTUS, speed_mbit=SPEEDS_MBIT, best_speed_mbit=SPEEDS_MBIT)
        counters = ("packets", "errors", "dropped", "carrier_losses")
        drop_odd_numbers(self, **dict.fromkeys(counters, (0, NO_LIMIT)))


@dataclass(frozen=True, kw_only=True, slots=True)
class RdmaFacts:
    """A port of an RDMA device."""

    name: str
    state: str | None = None
    """State, such as `ACTIVE` or `DOWN`."""
    rate: str | None = None
    """Speed in the driver's notation, such as `100 Gb/sec (4X EDR)`."""
    link: str | None = None
    """`InfiniBand` or `Ethernet`."""

    def check_foreign(self) -> None:
        check_device("name", self.name)
        _check_texts(self, "state", "rate", "link")


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkFacts:
    devices: tuple[DeviceFacts, ...] | None = None
    rdma: tuple[RdmaFacts, ...] | None = None
    port_range: tuple[int, int] | None = None
    """First and last port of the system's ephemeral range."""
    firewall: Literal["ufw", "firewalld", "none"] | None = None
    """Active firewall."""

    def check_foreign(self) -> None:
        _check_lists(self, "devices", "rdma")
        for port in self.port_range or ():
            check_number("port_range", port, 0, MAX_PORT)


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverFacts:
    """State of NVIDIA's driver, read without loading its library."""

    num_cards: int | None = None
    """Number of NVIDIA display adapters on the PCI bus."""
    module_version: str | None = None
    """Version of the loaded kernel module; None: not loaded, or not known."""
    library_version: str | None = None
    """Version in the name of the library on disk."""
    is_loaded: bool | None = None
    """True if the kernel module is loaded."""
    nouveau: bool | None = None
    """True if the open-source nouveau driver holds the cards."""
    devices_open: bool | None = None
    """True if this user may open the device files; None: they do not exist."""
    smi_message: str | None = None
    """Error message of nvidia-smi; empty: it works; None: it is not installed."""
    persistence: bool | None = None
    """True if the driver stays loaded while no program uses a GPU."""
    dxg: bool | None = None
    """True if the GPU of Windows is available (WSL)."""

    @property
    def was_updated(self) -> bool:
        """True if the installed version differs from the loaded one."""
        versions = (self.module_version, self.library_version)
        return None not in versions and versions[0] != versions[1]

    def check_foreign(self) -> None:
        drop_odd_words(self, "module_version", "library_version")
        drop_odd_numbers(self, num_cards=(0, MAX_LISTED))
        _check_texts(self, "smi_message")


@dataclass(frozen=True, kw_only=True, slots=True)
class WslFacts:
    """Properties of WSL and, if it may run programs of Windows, of Windows."""

    version: str | None = None
    is_systemd: bool | None = None
    linux_driver: str | None = None
    """Package of a Linux driver, which must not be in WSL; empty: not installed."""
    config: tuple[str, ...] | None = None
    """Lines of .wslconfig on Windows; empty: no such file; None: it could not be read."""
    windows_memory_bytes: int | None = None
    boot_task: bool | None = None
    """True if a task of Windows starts this distribution at boot."""
    firewall_allows: bool | None = None
    """True if the Hyper-V firewall lets other PCs in."""
    sshd_ports: tuple[int, ...] | None = None
    """Ports of an SSH server in this distribution."""

    def check_foreign(self) -> None:
        _check_texts(self, "version")
        # Empty means that none is installed.
        if self.linux_driver:
            drop_odd_words(self, "linux_driver")
        _check_lists(self, "config", "sshd_ports")
        for port in self.sshd_ports or ():
            check_number("sshd_ports", port, 0, MAX_PORT)
        drop_odd_numbers(self, windows_memory_bytes=(0, MAX_BYTES))


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """All readings of a node for the check, in addition to its NodeFacts."""

    system: SystemFacts = field(default_factory=SystemFacts)
    network: NetworkFacts = field(default_factory=NetworkFacts)
    driver: DriverFacts = field(default_factory=DriverFacts)
    wsl: WslFacts | None = None
    """Properties of WSL; None: it is not WSL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Examine(NodeRequest[Examination]):
    """Read all facts of the check that NodeFacts lacks."""

    kind = "node.examine"


@dataclass(frozen=True, kw_only=True, slots=True)
class FindRoutes(NodeRequest[Routes]):
    """Find the route from the node to each address."""

    kind = "node.routes"
    addresses: tuple[str, ...]

    def check_foreign(self) -> None:
        _check_lists(self, "addresses")
        for address in self.addresses:
            check_address("addresses", address)


@dataclass(frozen=True, kw_only=True, slots=True)
class SentPackets:
    value: int
    """Number of packets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WakeOther(NodeRequest[SentPackets]):
    """Wake another PC in the node's network."""

    kind = "node.wake"
    flat = "target"
    target: WakeTarget
