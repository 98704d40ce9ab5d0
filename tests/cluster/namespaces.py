"""Several PCs on this one: each a network namespace with its own address, host key, sshd and home.

    master 10.77.0.1    node1 10.77.0.11    node2 10.77.0.12 ...
        eth0 |               eth0 |              eth0 |
             +------- bridge in a namespace of its own ------+     links shaped both ways

TCP, carrier loss, ports, host keys and home folders are those of separate PCs. The file system,
the process table and the users are shared: `HOME` differs (sshd sets it), the passwd entry does
not. The interfaces, routes and firewall of this PC are not touched. Needs root, iproute2 and
openssh-server.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

PREFIX = "rackless"
SUBNET = "10.77.0"
START_S = 10.0
SYSTEM_PATH = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"


class ClusterError(RuntimeError):
    """Raised when a step of the set-up fails; contains the command and its output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    name: str
    namespace: str
    address: str
    port: str
    """Its interface on the bridge's side."""
    folder: Path
    """Host key, sshd's configuration and log."""

    @property
    def home(self) -> Path:
        return self.folder / "home"


@dataclass(frozen=True, order=True, slots=True)
class Listener:
    """A socket that waits for others to connect or send."""

    protocol: str
    address: str
    port: int
    process: str


def run_tool(*argv: str, check: bool = True) -> str:
    """Run a command to its end and return what it printed.

    Raises:
        ClusterError: it failed and `check` is set.
    """
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, env={**os.environ, "PATH": SYSTEM_PATH}
    )
    if check and done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise ClusterError(f"{' '.join(argv)}: {said}")
    return done.stdout


class Cluster:
    """A master and `num_nodes` nodes, up from construction until `down`.

    Use it as a context manager: whatever happens inside, nothing is left behind.
    """

    def __init__(self, folder: Path, num_nodes: int = 3, rate: str = "1gbit") -> None:
        remove_stale()
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._rate = rate
        self._fabric = f"{PREFIX}-{os.getpid()}-{time.monotonic_ns()}"
        self.key = folder / "client_key"
        self.master = self._node("master", 1)
        self.nodes = tuple(self._node(f"node{n}", 10 + n) for n in range(1, num_nodes + 1))
        self._sshd: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._up()
        except BaseException:
            self.down()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()

    def node(self, name: str) -> Node:
        return next(node for node in (self.master, *self.nodes) if node.name == name)

    # ---- what tests do with it

    def command(self, node: Node, *argv: str) -> list[str]:
        """Return the command line that runs `argv` inside the node's namespace.

        `ip` replaces itself by the command, so the pid of the started process is the command's own.
        """
        return ["ip", "netns", "exec", node.namespace, *argv]

    def start(self, node: Node, *argv: str, **options: Any) -> subprocess.Popen[Any]:
        """Start a process inside the node's namespace; `down` ends it if nobody else did."""
        environ = {**os.environ, **options.pop("env", {}), "PATH": SYSTEM_PATH}
        return subprocess.Popen(self.command(node, *argv), env=environ, **options)

    def run(self, node: Node, *argv: str) -> str:
        """Run a command inside the node's namespace and return its output."""
        return run_tool(*self.command(node, *argv))

    def over_ssh(self, node: Node, command: str, timeout_s: float = 5.0) -> str:
        """Run a shell command on a node as the master would, with OpenSSH's own client.

        Raises:
            ClusterError: no connection, or the command failed.
        """
        options = ["BatchMode=yes", "IdentitiesOnly=yes", f"ConnectTimeout={timeout_s:.0f}"]
        options += [f"UserKnownHostsFile={self._folder}/known_hosts", "StrictHostKeyChecking=yes"]
        settings = [word for option in options for word in ("-o", option)]
        target = f"root@{node.address}"
        return self.run(self.master, "ssh", "-i", str(self.key), *settings, target, command)

    def fingerprint(self, node: Node) -> str:
        """Return `SHA256:...` of the node's host key."""
        return run_tool("ssh-keygen", "-lf", f"{node.folder}/host_key.pub").split()[1]

    def cut(self, node: Node) -> None:
        """Pull the cable: the node loses its carrier."""
        run_tool("ip", "-n", self._fabric, "link", "set", node.port, "down")

    def heal(self, node: Node) -> None:
        run_tool("ip", "-n", self._fabric, "link", "set", node.port, "up")

    def sshd_pid(self, node: Node) -> int:
        return self._sshd[node.name].pid

    def stop_sshd(self, node: Node) -> None:
        """Kill the node's sshd and all of its connections, and nothing else."""
        self._sshd[node.name].kill()
        self._sshd[node.name].wait()
        for pid in self.pids(node):
            with contextlib.suppress(OSError):
                if b"sshd" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]:
                    os.kill(pid, signal.SIGKILL)

    def start_sshd(
        self, node: Node, files: Mapping[Path, Path] | None = None, commands: Sequence[str] = ()
    ) -> None:
        """Start the node's sshd again.

        Args:
            node: node whose sshd was stopped.
            files: files of the system, and those that its sessions see in their place.
            commands: shell commands to run before it, such as mounts that its sessions see.
        """
        self._run_sshd(node, files or {}, commands)
        self._wait_for_sshd(node)

    def change_host_key(self, node: Node) -> None:
        """Give the node another host key, as an exchanged PC would have; see `start_sshd`."""
        key = node.folder / "host_key"
        key.unlink()
        run_tool("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))

    def listeners(self, node: Node) -> list[Listener]:
        """Return every socket that listens in the node's namespace, TCP and UDP."""
        lines = self.run(node, "ss", "-Hlntup").splitlines()
        return sorted({read_listener(line) for line in lines})

    def add_network(self, device: str = "eth1", subnet: str = "10.78.0") -> None:
        """Join master and nodes by a second network, as by another card; see `address_in`."""
        bridge = f"bridge-{device}"
        run_tool("ip", "-n", self._fabric, "link", "add", bridge, "type", "bridge")
        run_tool("ip", "-n", self._fabric, "link", "set", bridge, "up")
        for node in (self.master, *self.nodes):
            port = f"{device}-{node.name}"
            link = ["link", "add", device, "netns", node.namespace, "type", "veth", "peer", "name"]
            run_tool("ip", *link, port, "netns", self._fabric)
            address = f"{address_in(node, subnet)}/24"
            run_tool("ip", "-n", node.namespace, "addr", "add", address, "dev", device)
            run_tool("ip", "-n", node.namespace, "link", "set", device, "up")
            run_tool("ip", "-n", self._fabric, "link", "set", port, "master", bridge, "up")

    def pids(self, node: Node) -> list[int]:
        """Return the processes that live in the node's namespace."""
        listed = run_tool("ip", "netns", "pids", node.namespace, check=False)
        return [int(pid) for pid in listed.split()]

    def down(self) -> None:
        """End every process of the cluster and remove the namespaces. Safe to repeat."""
        namespaces = [node.namespace for node in (self.master, *self.nodes)]
        remove_namespaces([*namespaces, self._fabric])
        for process in self._sshd.values():
            process.wait()
        self._sshd.clear()

    # ---- how it comes up

    def _node(self, name: str, last_byte: int) -> Node:
        return Node(
            name=name,
            namespace=f"{self._fabric}-{name}",
            address=f"{SUBNET}.{last_byte}",
            port=f"to-{name}",
            folder=self._folder / name,
        )

    def _up(self) -> None:
        run_tool("ip", "netns", "add", self._fabric)
        run_tool("ip", "-n", self._fabric, "link", "add", "bridge", "type", "bridge")
        run_tool("ip", "-n", self._fabric, "link", "set", "bridge", "up")
        run_tool("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key))
        for node in (self.master, *self.nodes):
            node.home.mkdir(parents=True, mode=0o700)
            self._join(node)
        for node in self.nodes:
            self._start_sshd(node)
        for node in self.nodes:
            self._wait_for_sshd(node)

    def _join(self, node: Node) -> None:
        """Give a node its namespace, its address and its shaped link to the bridge."""
        run_tool("ip", "netns", "add", node.namespace)
        link = ["link", "add", "eth0", "netns", node.namespace, "type", "veth", "peer", "name"]
        run_tool("ip", *link, node.port, "netns", self._fabric)
        run_tool("ip", "-n", node.namespace, "link", "set", "lo", "up")
        run_tool("ip", "-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", "eth0")
        run_tool("ip", "-n", node.namespace, "link", "set", "eth0", "up")
        run_tool("ip", "-n", self._fabric, "link", "set", node.port, "master", "bridge", "up")
        shape = ["root", "tbf", "rate", self._rate, "burst", "128kb", "latency", "20ms"]
        run_tool("tc", "-n", node.namespace, "qdisc", "add", "dev", "eth0", *shape)
        run_tool("tc", "-n", self._fabric, "qdisc", "add", "dev", node.port, *shape)

    def _start_sshd(self, node: Node) -> None:
        key = node.folder / "host_key"
        run_tool("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        kind, public = Path(f"{key}.pub").read_text().split()[:2]
        with (self._folder / "known_hosts").open("a") as known:
            known.write(f"{node.address} {kind} {public}\n")
        configuration = node.folder / "sshd_config"
        configuration.write_text(self._sshd_settings(node))
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd refuses to start without it
        self._run_sshd(node, {}, ())

    def _run_sshd(self, node: Node, files: Mapping[Path, Path], commands: Sequence[str]) -> None:
        sshd = shutil.which("sshd", path=SYSTEM_PATH)
        if sshd is None:
            raise ClusterError("there is no sshd: apt-get install openssh-server")
        # `ip netns exec` gives each command mounts of its own, which its children share.
        mounts = [f"mount --bind {shlex.quote(str(ours))} {path}" for path, ours in files.items()]
        last = shlex.join(["exec", sshd, "-D", "-e", "-f", f"{node.folder}/sshd_config"])
        with (node.folder / "sshd.log").open("ab") as log:
            self._sshd[node.name] = self.start(
                node,
                *("sh", "-ec", "\n".join([*mounts, *commands, last])),
                stdin=subprocess.DEVNULL,
                stderr=log,
            )

    def _sshd_settings(self, node: Node) -> str:
        lines = [
            "Port 22",
            f"ListenAddress {node.address}",
            f"HostKey {node.folder}/host_key",
            "PidFile none",
            f"AuthorizedKeysFile {self.key}.pub",
            "StrictModes no",  # the key lies in a temporary folder
            "PermitRootLogin prohibit-password",
            "PasswordAuthentication no",
            f"UsePAM {'yes' if root_is_locked() else 'no'}",
            "UseDNS no",
            "PrintMotd no",
            "PrintLastLog no",
            "Subsystem sftp internal-sftp",
            f"SetEnv HOME={node.home} OMP_NUM_THREADS=1",  # all nodes share this PC's cores
        ]
        return "\n".join(lines) + "\n"

    def _wait_for_sshd(self, node: Node) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end and self._sshd[node.name].poll() is None:
            if self.listeners(node):
                return
            time.sleep(0.02)
        raise ClusterError(f"sshd of {node.name}: {(node.folder / 'sshd.log').read_text()[-400:]}")


def address_in(node: Node, subnet: str) -> str:
    """Return the node's address in a second network."""
    return f"{subnet}.{node.address.rpartition('.')[2]}"


def root_is_locked() -> bool:
    """Return whether sshd would refuse root without PAM (Ubuntu locks the account with `!`)."""
    entries = (line.split(":") for line in Path("/etc/shadow").read_text().splitlines())
    return any(name == "root" and password.startswith("!") for name, password, *_ in entries)


def read_listener(line: str) -> Listener:
    """Read one line of `ss -Hlntup`."""
    protocol, _, _, _, local, _, *rest = line.split()
    address, _, port = local.rpartition(":")
    process = rest[0].split('"')[1] if rest else ""
    return Listener(protocol, address, int(port), process)


def namespaces() -> list[str]:
    """Return the network namespaces of this PC that some test cluster made."""
    names = [line.split()[0] for line in run_tool("ip", "netns", "list").splitlines() if line]
    return [name for name in names if name.startswith(f"{PREFIX}-")]


def remove_namespaces(names: list[str]) -> None:
    """Kill all processes in the namespaces, wait for their end, and delete the namespaces."""
    existing = set(namespaces()) & set(names)
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        listed = [run_tool("ip", "netns", "pids", name, check=False).split() for name in existing]
        pids = [int(pid) for some in listed for pid in some if not is_zombie(int(pid))]
        if not pids:
            break
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for name in existing:
        run_tool("ip", "netns", "del", name, check=False)


def is_zombie(pid: int) -> bool:
    """Return whether the process is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def remove_stale() -> None:
    """Remove leftovers of clusters whose test process was killed; their names contain its pid."""
    dead = [name for name in namespaces() if not Path(f"/proc/{name.split('-')[1]}").exists()]
    if dead:
        remove_namespaces(dead)
