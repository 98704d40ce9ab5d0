"""Nodes in namespaces, each with an /etc of its own, that can be given faults and healed.

Where they need not train, Rackless logs in as an ordinary user whose sudo asks for a password, as
on most PCs; sudo itself is played (`tests/fakes/sudo.py`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
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
from tests.fakes.sudo import write_sudo
from tests.faulty_nodes.played import write_programs
from tests.faulty_nodes.shim import build_become, build_driver, build_shim
from tests.faulty_nodes.state import hash_node

AGENT_FOLDER = ".local/share/rackless-agent"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
ETC = Path("/etc")
USER, USER_ID = "trainer", 54321
PASSWORD = "correct-horse-battery-61"
USER_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """Result of one `rackless check`."""

    rows: list[dict[str, Any]]
    seconds: float

    def failed(self) -> set[tuple[str, str]]:
        """Return (check, node) of each row that failed."""
        return {(row["check"], row["node"]) for row in self.rows if row["status"] == "fail"}

    def complaints(self) -> set[tuple[str, str, str]]:
        """Return (check, node, status) of each row that failed or warned.

        Warnings about links are left out: their speed depends on what else this PC does.
        """
        return {
            (row["check"], row["node"], row["status"])
            for row in self.rows
            if row["status"] == "fail" or (row["status"] == "warn" and row["check"] != "tcp")
        }


@dataclass(kw_only=True, slots=True)
class Session:
    """What the sessions of a node's sshd see."""

    files: dict[Path, Path] = field(default_factory=dict)
    """Files or folders of the system, and those in their place."""
    commands: list[str] = field(default_factory=list)
    """Shell commands before sshd starts, such as mounts."""
    variables: dict[str, str] = field(default_factory=dict)
    programs: Sequence[Path] = ()
    """Folders of programs that come before those of the system."""
    settings: Sequence[str] = ()
    """Lines of sshd's configuration."""


class FaultySite:
    """A cluster whose master knows all nodes; with `with_torch` they can train, too."""

    def __init__(self, folder: Path, num_nodes: int, *, with_torch: bool) -> None:
        self.folder = folder
        # Other users have to pass through to the homes.
        folder.chmod(0o711)
        self.user = "root" if with_torch else USER
        self.cluster = Cluster(folder / "cluster", num_nodes)
        self.master = Master(self.cluster, folder / "rackless")
        become = "" if with_torch else str(build_become(folder, USER_ID))
        self.sudo = write_sudo(folder / "sudo", PASSWORD, become=become)
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

    def check(self, master: Master | None = None, names: Sequence[str] = ()) -> Checked:
        """Run `rackless check` as a person would, and return its rows; no names: all nodes."""
        began_s = time.monotonic()
        done = (master or self.master).rackless("check", *names, timeout_s=240.0)
        return Checked(rows=done.document, seconds=time.monotonic() - began_s)

    def state_of(self, node: Node) -> str:
        """Return a hash of all that a repair may change on a node."""
        return hash_node(self.cluster, node, self.etc(node), self.played(node))

    def add(self, master: Master, node: Node) -> None:
        """Add a node to a master, with the fingerprint that its owner would compare."""
        master.answer(
            *("nodes", "add", node.name, "--ssh", f"{self.user}@{node.address}"),
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

    def put_program(self, folder: str, name: str, text: str) -> Path:
        """Write a shell script that stands for a program of the system; return its folder."""
        return write_programs(self.folder / folder, self.folder, {name: text})

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

    def play(self, stack: ExitStack, node: Node, scripts: Mapping[str, str], **state: str) -> Path:
        """Return a folder with programs that the site plays; see played.py.

        Args:
            stack: takes their state away when it ends.
            node: that has them.
            scripts: text of each program, by its name.
            state: text of each file of their state, by its name.
        """
        folder, programs = self.played(node), node.folder / "programs"
        folder.mkdir()
        stack.callback(shutil.rmtree, folder)
        for name, text in state.items():
            (folder / name).write_text(text)
        stack.callback(shutil.rmtree, programs)
        return write_programs(programs, folder, scripts)

    def edit_etc(self, stack: ExitStack, node: Node, name: str, text: str) -> None:
        """Give a file in a node's /etc another text, and take it back in the end."""
        path = self.etc(node) / name
        if path.is_symlink() or path.exists():
            kept = path.with_name(f".kept-{path.name}")
            path.rename(kept)
            stack.callback(kept.rename, path)
        else:
            path.parent.mkdir(exist_ok=True)
            stack.callback(path.unlink, missing_ok=True)
        path.write_text(text)

    def fresh_master(self) -> Master:
        """Return a master that has just added all nodes."""
        master = Master(self.cluster, self.folder / f"rackless-{time.monotonic_ns()}")
        for node in self.nodes:
            self.add(master, node)
        return master

    # ---- nodes

    def etc(self, node: Node) -> Path:
        """Return the folder that a node sees as /etc."""
        return node.folder / "etc"

    def played(self, node: Node) -> Path:
        """Return the folder with the state of the programs that are played on a node."""
        return node.folder / "played"

    def restart(self, node: Node, session: Session | None = None) -> None:
        """Start a node's sshd again, healthy or with other files, mounts and variables."""
        session = session or Session()
        folders = (*session.programs, self.sudo)
        path = ":".join((*(str(folder) for folder in folders), USER_PATH))
        variables = {"PATH": path, **session.variables}
        more = "".join(f" {name}={value}" for name, value in variables.items())
        text = self._settings[node.name].replace("OMP_NUM_THREADS=1", f"OMP_NUM_THREADS=1{more}")
        lines = "".join(f"{line}\n" for line in session.settings)
        (node.folder / "sshd_config").write_text(text + lines)
        self.cluster.stop_sshd(node)
        self._end_rest(node)
        files = {ETC: self.etc(node), BOOT_ID: node.folder / "boot_id", **session.files}
        self.cluster.start_sshd(node, files, session.commands)

    def _end_rest(self, node: Node) -> None:
        """End what outlives a connection, such as the recorder, which knows the old system."""
        for pid in self.cluster.pids(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _make_files(self, node: Node) -> None:
        etc = self.etc(node)
        run_tool("cp", "-a", str(ETC), str(etc))
        (etc / "machine-id").unlink(missing_ok=True)
        (etc / "machine-id").write_text(f"{uuid.uuid4().hex}\n")
        with (etc / "passwd").open("a") as names, (etc / "shadow").open("a") as locks:
            names.write(f"{USER}:x:{USER_ID}:{USER_ID}::{node.home}:/bin/sh\n")
            locks.write(f"{USER}:*:20000:0:99999:7:::\n")
        self.write_hosts(node, node.address)
        self.change_boot_id(node)
        if self.user == USER:
            for folder in (node.folder.parent, node.folder):
                folder.chmod(0o711)
            os.chown(node.home, USER_ID, USER_ID)

    def change_boot_id(self, node: Node) -> None:
        """Let a node be one that was started anew, once its sshd is restarted."""
        (node.folder / "boot_id").write_text(f"{uuid.uuid4()}\n")

    def write_hosts(self, node: Node, *addresses: str) -> None:
        """Write the addresses of the node's own name."""
        lines = ["127.0.0.1 localhost", *(f"{one} {socket.gethostname()}" for one in addresses)]
        (self.etc(node) / "hosts").write_text("\n".join(lines) + "\n")


def _name(values: Mapping[str, object]) -> dict[str, str]:
    return {f"SHIM_{name.upper()}": str(value) for name, value in values.items()}


def mount_tmpfs(folder: Path, options: str) -> str:
    """Return the command that puts an empty disk on a folder."""
    return f"mount -t tmpfs -o {options} tmpfs {folder}"


def agent_home(node: Node) -> Path:
    return node.home / AGENT_FOLDER


def tools_in(folder: Path, names: Iterable[str]) -> Path:
    """Return a folder with links to these programs of this PC alone."""
    folder.mkdir(exist_ok=True)
    for name in names:
        path = shutil.which(name, path=USER_PATH)
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(path or name)
    return folder


def system_tools() -> set[str]:
    """Return the names of all programs in the folders of the system."""
    return {one.name for folder in USER_PATH.split(":")[1:] for one in Path(folder).glob("*")}
