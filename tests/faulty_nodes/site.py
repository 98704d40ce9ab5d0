"""Nodes in namespaces, each with names and ids of its own, that can be given faults and healed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster import packet_filter
from tests.cluster.master import Master
from tests.cluster.namespaces import Cluster, Node, run_tool
from tests.faulty_nodes.shim import build_driver, build_shim

AGENT_FOLDER = ".local/share/rackless-agent"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MACHINE_ID = Path("/etc/machine-id")
HOSTS = Path("/etc/hosts")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """Result of one `rackless check`."""

    rows: list[dict[str, Any]]
    seconds: float

    def failed(self) -> set[tuple[str, str]]:
        """Return (check, node) of each row that failed."""
        return {(row["check"], row["node"]) for row in self.rows if row["status"] == "fail"}


@dataclass(kw_only=True, slots=True)
class Session:
    """What the sessions of a node's sshd see."""

    files: dict[Path, Path] = field(default_factory=dict)
    """Files or folders of the system, and those in their place."""
    commands: list[str] = field(default_factory=list)
    """Shell commands before sshd starts, such as mounts."""
    variables: dict[str, str] = field(default_factory=dict)


class FaultySite:
    """A cluster whose master knows all nodes; with `with_torch` they can train, too."""

    def __init__(self, folder: Path, num_nodes: int, *, with_torch: bool) -> None:
        self.folder = folder
        self.cluster = Cluster(folder / "cluster", num_nodes)
        self.master = Master(self.cluster, folder / "rackless")
        self.with_torch = with_torch
        self._settings = {
            node.name: (node.folder / "sshd_config").read_text() for node in self.nodes
        }
        try:
            for node in self.nodes:
                self._make_files(node)
                self.restart(node)
                self.add(self.master, node)
                if with_torch:
                    self.adopt(node, Path(sys.executable))
        except BaseException:
            self.cluster.down()
            raise

    def __enter__(self) -> FaultySite:
        return self

    def __exit__(self, *error: object) -> None:
        self.cluster.down()

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.cluster.nodes

    def check(self, master: Master | None = None) -> Checked:
        """Run `rackless check` as a person would, and return its rows."""
        began_s = time.monotonic()
        done = (master or self.master).rackless("check", timeout_s=240.0)
        return Checked(rows=done.document, seconds=time.monotonic() - began_s)

    def add(self, master: Master, node: Node, user: str = "root") -> None:
        """Add a node to a master, with the fingerprint that its owner would compare."""
        master.answer(
            *("nodes", "add", node.name, "--ssh", f"{user}@{node.address}"),
            *("--key", str(self.cluster.key)),
            *("--accept-host-key", self.cluster.fingerprint(node)),
        )

    def adopt(self, node: Node, python: Path) -> None:
        """Have a node train with an interpreter that is there already."""
        self.master.answer("nodes", "setup", node.name, "--python", str(python))

    # ---- faults; each is taken back when the stack ends

    def change_session(self, stack: ExitStack, node: Node, session: Session) -> None:
        """Let new sessions on a node see other files, mounts and variables."""
        stack.callback(self.restart, node)
        self.restart(node, session)

    def in_node(self, stack: ExitStack, node: Node, do: str, undo: str = "") -> None:
        """Run a command in a node's namespace, and another one in the end."""
        if undo:
            stack.callback(self.cluster.run, node, *undo.split())
        self.cluster.run(node, *do.split())

    def filter(self, stack: ExitStack, node: Node, device: str, kind: str, value: str) -> None:
        """Drop packets that arrive at a node; see tests/cluster/packet_filter.py."""
        self.cluster.run(node, sys.executable, packet_filter.__file__, device, kind, value)
        stack.callback(self.cluster.run, node, "ip", "link", "set", "dev", device, "xdp", "off")

    def rename_device(self, stack: ExitStack, node: Node, old: str, new: str) -> None:
        """Give a network device another name, by which its kind is known."""

        def rename(before: str, after: str) -> None:
            for words in (f"{before} down", f"{before} name {after}", f"{after} up"):
                self.cluster.run(node, "ip", "link", "set", *words.split())

        stack.callback(rename, new, old)
        rename(old, new)

    def put_program(self, name: str, text: str, folder: str = "bin") -> Path:
        """Write a shell script that stands for a program of the system; return its folder."""
        place = self.folder / folder
        place.mkdir(exist_ok=True)
        program = place / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
        return place

    def put_file(self, name: str, text: str) -> Path:
        """Write a file that stands for one of the system."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def shim(self, **values: object) -> dict[str, str]:
        """Return the variables that have programs told other values; see shim.py."""
        return {"LD_PRELOAD": str(build_shim(self.folder)), **_name(values)}

    def driver(self, **values: object) -> dict[str, str]:
        """Return the variables of a PC with one NVIDIA card; see shim.py."""
        return {"LD_LIBRARY_PATH": str(build_driver(self.folder)), **_name(values)}

    def fresh_master(self, nodes: Iterable[tuple[Node, str]]) -> Master:
        """Return a master that has just added these nodes, each with its login."""
        master = Master(self.cluster, self.folder / f"rackless-{time.monotonic_ns()}")
        for node, user in nodes:
            self.add(master, node, user)
        return master

    # ---- nodes

    def restart(self, node: Node, session: Session | None = None) -> None:
        """Start a node's sshd again, healthy or with other files, mounts and variables."""
        session = session or Session()
        variables = "".join(f" {name}={value}" for name, value in session.variables.items())
        text = self._settings[node.name].replace(
            "OMP_NUM_THREADS=1", f"OMP_NUM_THREADS=1{variables}"
        )
        (node.folder / "sshd_config").write_text(text)
        self.cluster.stop_sshd(node)
        self._end_rest(node)
        files: Mapping[Path, Path] = {
            BOOT_ID: node.folder / "boot_id",
            MACHINE_ID: node.folder / "machine-id",
            HOSTS: node.folder / "hosts",
            **session.files,
        }
        self.cluster.start_sshd(node, files, session.commands)

    def _end_rest(self, node: Node) -> None:
        """End what outlives a connection, such as the recorder, which knows the old system."""
        for pid in self.cluster.pids(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _make_files(self, node: Node) -> None:
        (node.folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        (node.folder / "machine-id").write_text(f"{uuid.uuid4().hex}\n")
        self.write_hosts(node, node.address)

    def write_hosts(self, node: Node, *addresses: str) -> Path:
        """Write the addresses of the node's own name; return the file."""
        lines = ["127.0.0.1 localhost", *(f"{one} {socket.gethostname()}" for one in addresses)]
        path = node.folder / "hosts"
        path.write_text("\n".join(lines) + "\n")
        return path


def _name(values: Mapping[str, object]) -> dict[str, str]:
    return {f"SHIM_{name.upper()}": str(value) for name, value in values.items()}


def mount_tmpfs(folder: Path, options: str) -> str:
    """Return the command that puts an empty disk on a folder."""
    return f"mount -t tmpfs -o {options} tmpfs {folder}"


def agent_home(node: Node) -> Path:
    return node.home / AGENT_FOLDER


def tools_in(folder: Path, names: Sequence[str]) -> Path:
    """Return a folder with links to these programs of this PC alone."""
    folder.mkdir(exist_ok=True)
    for name in names:
        path = run_tool("which", name).strip()
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(path)
    return folder
