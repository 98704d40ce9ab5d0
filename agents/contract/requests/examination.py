"""Requests of the check: what a node reads of its own system; `None` is what it could not read.

A node only reads. What a value means is decided on the master (`app/provisioning/checks`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from agents.contract.names import check_text
from agents.contract.node import MAX_LISTED
from agents.contract.requests import NodeRequest
from agents.contract.wake import WakeTarget

DeviceKind = Literal["ethernet", "wifi", "vpn", "bridge", "virtual", "mobile", "loopback"]
"""What a network device is; `virtual` is one end of a container's or a VM's link."""
Sudo = Literal["root", "free", "password", "none"]
"""How commands of an administrator run: as this user, without a password, with one, or not."""
SyncService = Literal["on", "off", "none"]
"""Service that sets the clock: it runs, it is installed and off, or there is none."""

NO_LIMIT = 2**63 - 1
"""Stands for a limit of a login that is not set."""


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
    """Way by which packets to an address leave a node."""

    address: str
    device: str | None = None
    """Network device; None: there is no way, or it could not be asked."""
    source: str | None = None
    """Own address that such packets carry."""
    gateway: str | None = None
    """Router on the way; None: the address is in the same network."""
    mtu: int | None = None
    """Packet size that the kernel has learned for this way, in bytes; None: that of the device."""

    def check_foreign(self) -> None:
        _check_texts(self, "address", "device", "source", "gateway")


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
    """Whether a file could be written there."""
    home_executable: bool | None = None
    """Whether a program there can be started; False: it is mounted with noexec."""
    home_file_system: str | None = None
    """Type of its file system, such as `ext4`, `nfs4` or `9p`."""
    inodes: int | None = None
    """Files that its file system can hold; 0: it has no limit."""
    inodes_free: int | None = None
    swap_bytes: int | None = None
    shm_bytes: int | None = None
    """Size of /dev/shm, in bytes."""
    shm_free_bytes: int | None = None
    clock_synchronised: bool | None = None
    """Whether the kernel says that a time server keeps the clock."""
    clock_service: SyncService | None = None
    boot_id: str | None = None
    """Random id of this start of the system: equal for two nodes on one PC alone."""
    hostname_addresses: tuple[str, ...] | None = None
    """Addresses to which its own name resolves on the node, IPv4 first; empty: to none."""
    first_process: str | None = None
    """Name of process 1, such as `systemd`."""
    ends_at_logout: bool | None = None
    """Whether systemd ends a user's processes at logout."""
    lingers: bool | None = None
    """Whether the user's services go on without a login."""
    user: str | None = None
    """Name that Rackless logs in as."""
    may_sleep: bool | None = None
    """Whether this PC may suspend: a desktop runs and sleep is not masked."""
    temporary_folder: str | None = None
    """Folder in which compilers and other programs put their temporary files."""
    temporary_free_bytes: int | None = None
    """Free space in the folder for temporary files, in bytes."""
    temporary_writable: bool | None = None
    """Whether a file could be written there."""
    max_open_files: int | None = None
    """Files that a process of this login may have open; `NO_LIMIT`: there is none."""
    max_processes: int | None = None
    """Processes and threads that this login may have; `NO_LIMIT`: there is none."""
    max_address_bytes: int | None = None
    """Addresses that a process may use, in bytes; `NO_LIMIT`: there is none."""

    def check_foreign(self) -> None:
        _check_texts(self, "home", "home_file_system", "boot_id", "first_process", "user")
        _check_texts(self, "temporary_folder")
        _check_lists(self, "hostname_addresses")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """A network device and its counters since it came up."""

    name: str
    kind: DeviceKind | None = None
    driver: str | None = None
    mtu: int | None = None
    speed_mbit: int | None = None
    """Speed of the link, in Mb/s."""
    best_speed_mbit: int | None = None
    """Highest speed that the card itself supports, in Mb/s."""
    is_full_duplex: bool | None = None
    has_carrier: bool | None = None
    saves_power: bool | None = None
    """Whether a Wi-Fi card sleeps between packets."""
    packets: int | None = None
    """Packets received and sent."""
    errors: int | None = None
    """Packets that were damaged, either way."""
    dropped: int | None = None
    carrier_losses: int | None = None
    """How often the link was lost."""

    def check_foreign(self) -> None:
        _check_texts(self, "name", "driver")


@dataclass(frozen=True, kw_only=True, slots=True)
class RdmaFacts:
    """A port of an RDMA device."""

    name: str
    state: str | None = None
    """State such as `ACTIVE` or `DOWN`."""
    rate: str | None = None
    """Speed in the driver's words, such as `100 Gb/sec (4X EDR)`."""
    link: str | None = None
    """`InfiniBand` or `Ethernet`."""

    def check_foreign(self) -> None:
        _check_texts(self, "name", "state", "rate", "link")


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkFacts:
    devices: tuple[DeviceFacts, ...] | None = None
    rdma: tuple[RdmaFacts, ...] | None = None
    port_range: tuple[int, int] | None = None
    """First and last port that the system gives out."""
    firewall: Literal["ufw", "firewalld", "none"] | None = None
    """Firewall that is switched on."""

    def check_foreign(self) -> None:
        _check_lists(self, "devices", "rdma")


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverFacts:
    """State of NVIDIA's driver, read without loading its library."""

    num_cards: int | None = None
    """NVIDIA display adapters on the PCI bus."""
    module_version: str | None = None
    """Version of the kernel module that is loaded; None: none is, or it is not known."""
    library_version: str | None = None
    """Version in the name of the library on disk."""
    is_loaded: bool | None = None
    """Whether the kernel module is loaded."""
    nouveau: bool | None = None
    """Whether the free driver holds the cards."""
    devices_open: bool | None = None
    """Whether this user may open the device files; None: there are none."""
    smi_message: str | None = None
    """What nvidia-smi says when it fails; empty: it works; None: it is not installed."""
    persistence: bool | None = None
    """Whether the driver stays loaded while no program uses a GPU."""
    dxg: bool | None = None
    """Whether the GPU of Windows is there (WSL)."""

    @property
    def was_updated(self) -> bool:
        """Whether another version was installed than the one that is loaded."""
        versions = (self.module_version, self.library_version)
        return None not in versions and versions[0] != versions[1]

    def check_foreign(self) -> None:
        _check_texts(self, "module_version", "library_version", "smi_message")


@dataclass(frozen=True, kw_only=True, slots=True)
class WslFacts:
    """What WSL shows of itself and, where it lets programs of Windows run, of Windows."""

    version: str | None = None
    is_systemd: bool | None = None
    linux_driver: str | None = None
    """Package of a Linux driver, which must not be in WSL; empty: there is none."""
    config: tuple[str, ...] | None = None
    """Lines of .wslconfig on Windows; empty: there is none; None: it could not be read."""
    windows_memory_bytes: int | None = None
    boot_task: bool | None = None
    """Whether a task of Windows starts this distro at boot."""
    firewall_allows: bool | None = None
    """Whether the Hyper-V firewall lets other PCs in."""
    sshd_ports: tuple[int, ...] | None = None
    """Ports on which an SSH server listens here."""

    def check_foreign(self) -> None:
        _check_texts(self, "version", "linux_driver")
        _check_lists(self, "config", "sshd_ports")


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """Everything that a node reads for the check beyond its NodeFacts."""

    system: SystemFacts = field(default_factory=SystemFacts)
    network: NetworkFacts = field(default_factory=NetworkFacts)
    driver: DriverFacts = field(default_factory=DriverFacts)
    wsl: WslFacts | None = None
    """None: it is not WSL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Examine(NodeRequest[Examination]):
    """Read everything that the check needs beyond the facts."""

    kind = "node.examine"


@dataclass(frozen=True, kw_only=True, slots=True)
class FindRoutes(NodeRequest[Routes]):
    """Find the way by which packets to each address leave the node."""

    kind = "node.routes"
    addresses: tuple[str, ...]

    def check_foreign(self) -> None:
        _check_lists(self, "addresses")


@dataclass(frozen=True, kw_only=True, slots=True)
class SentPackets:
    value: int
    """Number of packets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WakeOther(NodeRequest[SentPackets]):
    """Wake another PC of the node's network."""

    kind = "node.wake"
    flat = "target"
    target: WakeTarget
