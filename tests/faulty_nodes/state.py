"""Hash of what a repair may change on a node, to compare it before a repair and after its undo."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from tests.cluster.namespaces import Cluster, Node

# Read as root by the node's own sshd, which sees the node's mounts and devices.
_LIVE = (
    "cat /proc/sys/net/ipv4/ip_local_port_range; grep -s . /sys/class/net/*/mtu; "
    "stat -f -c %b /dev/shm; /sbin/ip -o link | grep -c xdp"
)


def hash_node(cluster: Cluster, node: Node, *folders: Path) -> str:
    """Return a hash over a node's ports, devices, mounts and the files below `folders`."""
    live = cluster.over_ssh(node, f"{_LIVE}; true")
    parts = [live, *(hash_tree(folder) for folder in folders)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def hash_tree(folder: Path) -> str:
    """Return a hash over names, modes, owners, and contents or targets below a folder."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        state = path.lstat()
        place = path.relative_to(folder)
        found.update(f"{place} {state.st_mode:o} {state.st_uid} {state.st_gid}\n".encode())
        if path.is_symlink():
            found.update(os.fsencode(os.readlink(path)))
        elif path.is_file() and state.st_size < 1 << 20:
            found.update(path.read_bytes())
        else:
            found.update(f"{state.st_size if path.is_file() else 0}".encode())
    return found.hexdigest()
