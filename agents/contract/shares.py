r"""Network shares (NFS, SMB, SSHFS), as described by /proc/self/mountinfo and UNC paths.

No server is contacted. A share only suggests where the same files may be; a comparison of their
content decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agents.contract.names import check_text

NETWORK_FILE_SYSTEMS = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "sshfs", "fuse.sshfs"),
    *("afs", "ceph", "fuse.ceph-fuse", "glusterfs", "fuse.glusterfs", "lustre", "beegfs"),
)
"""Types of file systems on another computer."""
_NFS = ("nfs", "nfs4")
_SMB = ("cifs", "smb3", "smbfs")
_SSHFS = ("sshfs", "fuse.sshfs")
_WINDOWS = ("9p", "drvfs", "virtiofs")
"""Types by which WSL mounts drives of Windows."""
_ESCAPE = re.compile(r"\\([0-7]{3})")
_UNC_OPTION = re.compile(r"path=UNC(\\[^;,]+)", re.IGNORECASE)
_FIELDS_BEFORE_SEPARATOR = 6
_MOUNTINFO = Path("/proc/self/mountinfo")

ShareKind = Literal["nfs", "smb", "sshfs", "other"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """One line of mountinfo."""

    place: str
    """Folder that it is mounted on."""
    kind: str
    """Type of the file system, such as `nfs4`."""
    source: str
    """Mounted device or export, such as `nas:/models`."""
    root: str = "/"
    """Folder of the file system that is mounted."""
    options: str = ""
    """Options of the file system."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Folder on a server."""

    kind: ShareKind
    server: str
    path: str
    """Path on the server, with a leading slash; for SMB, it begins with the name of the share."""

    def check_foreign(self) -> None:
        check_text("server", self.server)
        check_text("path", self.path)

    @property
    def label(self) -> str:
        """Name in usual notation, such as `nas:/models` or `//nas/models`."""
        if self.kind == "smb":
            return f"//{self.server}{self.path}"
        return f"{self.server}:{self.path}" if self.server else self.path


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedPlace:
    """Files of a run that a node reads from a share."""

    path: str
    """File or folder on the node."""
    share: str
    """Name of the share, such as `nas:/models/tiny`, or a folder on a disk of the node."""

    def check_foreign(self) -> None:
        check_text("path", self.path)
        check_text("share", self.share)


def read_mounts() -> tuple[Mount, ...]:
    """Return the mounts of this PC; Windows has no such table, so it gives an empty tuple."""
    try:
        return parse_mounts(_MOUNTINFO.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ()


def parse_mounts(text: str) -> tuple[Mount, ...]:
    r"""Return the mounts of /proc/self/mountinfo, skipping lines of another form.

    >>> parse_mounts(r"36 25 0:32 / /mnt/my\040nas rw - nfs4 nas:/m rw,vers=4.2")[0].place
    '/mnt/my nas'
    """
    found = []
    for line in text.splitlines():
        fields = line.split(" ")
        try:
            # Optional fields precede a lone dash, so the later fields have no fixed position.
            middle = fields.index("-", _FIELDS_BEFORE_SEPARATOR)
            kind, source = fields[middle + 1 : middle + 3]
        except ValueError:
            continue
        found.append(
            Mount(
                place=_unescape(fields[4]),
                kind=kind,
                source=_unescape(source),
                root=_unescape(fields[3]),
                options=_unescape(" ".join(fields[middle + 3 :])),
            )
        )
    return tuple(found)


def _unescape(text: str) -> str:
    # The kernel escapes blanks and backslashes, but no bytes beyond ASCII.
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def find_mount(path: str, mounts: Sequence[Mount]) -> Mount | None:
    """Return the mount of an absolute path without links, or None if it is not known."""
    best: Mount | None = None
    for mount in mounts:
        # Of several mounts on one folder, the last one is on top, hence `>=`.
        if _rest(path, mount.place) is not None and len(mount.place) >= len(
            best.place if best else ""
        ):
            best = mount
    return best


def find_share(path: str, mounts: Sequence[Mount]) -> Share | None:
    """Return the server folder of an absolute path without links, or None if it is on this PC."""
    mount = find_mount(path, mounts)
    share = read_share(mount) if mount is not None else None
    if mount is None or share is None:
        return None
    return Share(
        kind=share.kind, server=share.server, path=_join(share.path, _rest(path, mount.place) or "")
    )


def read_share(mount: Mount) -> Share | None:
    r"""Return the server folder that is mounted, or None if it is a disk of this PC.

    A drive of Windows in WSL counts as a disk of this PC, since its letter does not name a server.

    >>> read_share(Mount(place="/mnt/nas", kind="nfs4", source="nas.local:/volume1/models")).label
    'nas.local:/volume1/models'
    >>> read_share(Mount(place="/mnt/nas", kind="cifs", source="//nas/models", root="/llama")).label
    '//nas/models/llama'
    >>> read_share(Mount(place="/mnt/c", kind="9p", source="C:\\", options="aname=drvfs;path=C:\\"))
    """
    if mount.kind in _WINDOWS:
        # drvfs of a network drive names the UNC path in its options, or is mounted by it.
        named = _UNC_OPTION.search(mount.options)
        share = read_unc("\\" + named[1]) if named else read_unc(mount.source)
        return share and _below(share, mount.root)
    if mount.kind in _SMB:
        share = read_unc(mount.source)
        return share and _below(share, mount.root)
    if mount.kind in _NFS:
        server, separator, path = mount.source.partition(":/")
        # The source names the mounted folder, even if it is only a part of the export.
        return Share(kind="nfs", server=server.strip("[]"), path=f"/{path}") if separator else None
    if mount.kind in _SSHFS:
        # `user@host:path`; without a path, sshfs mounts the home folder.
        server, _, path = mount.source.rpartition("@")[2].partition(":")
        return _below(Share(kind="sshfs", server=server, path=path or "~"), mount.root)
    if mount.kind in NETWORK_FILE_SYSTEMS:
        return _below(Share(kind="other", server="", path=mount.source), mount.root)
    return None


def read_unc(text: str) -> Share | None:
    r"""Return the share that a path of Windows names, or None.

    >>> [found and found.label for found in map(read_unc, (
    ...     r"\\NAS\models\llama", r"\\?\UNC\nas\models", "//nas/models/", r"Z:\models", r"\\nas",
    ...     r"\\wsl.localhost\Ubuntu\home", r"\\?\C:\models"))]
    ['//NAS/models/llama', '//nas/models', '//nas/models', None, None, None, None]
    """
    plain = text.replace("/", "\\")
    # The prefix of paths beyond 260 characters.
    if plain[:8].upper() == "\\\\?\\UNC\\":
        plain = "\\\\" + plain[8:]
    if not plain.startswith("\\\\"):
        return None
    server, *parts = [part for part in plain.split("\\") if part] or [""]
    # `?` and `.` are devices of this PC, and `wsl.localhost` is its own WSL.
    if not parts or server in ("?", ".") or server.lower() in ("wsl.localhost", "wsl$"):
        return None
    return Share(kind="smb", server=server, path="/" + "/".join(parts))


def find_places(wanted: Share, mounts: Sequence[Mount]) -> tuple[str, ...]:
    """Return the candidate paths here of a server's folder or file, given the mounts.

    Servers have several names (`nas`, `nas.local`, an address), so mounts of another server name
    count, too, after those with the same name.
    """
    found: list[tuple[bool, str]] = []
    for mount in mounts:
        share = read_share(mount)
        rest = _rest_of_share(wanted, share) if share is not None else None
        if share is not None and rest is not None:
            is_other = not _is_same_server(wanted.server, share.server)
            found.append((is_other, _join(mount.place, rest)))
    return tuple(dict.fromkeys(place for _, place in sorted(found, key=lambda place: place[0])))


def _rest_of_share(wanted: Share, share: Share) -> str | None:
    if share.kind != wanted.kind:
        return None
    if share.kind != "smb":
        return _rest(wanted.path, share.path)
    # Windows ignores case, and so does a NAS that serves it.
    parts, top = wanted.path.split("/"), share.path.rstrip("/").split("/")
    is_below = [part.casefold() for part in parts[: len(top)]] == [part.casefold() for part in top]
    return "/".join(parts[len(top) :]) if is_below else None


def _is_same_server(first: str, second: str) -> bool:
    first, second = first.casefold(), second.casefold()
    return first == second or first.split(".")[0] == second.split(".")[0]


def _below(share: Share, root: str) -> Share:
    # If a part of a share is mounted, some kernels name it both in the source and in the root.
    if root == "/" or share.path.endswith(root):
        return share
    return Share(kind=share.kind, server=share.server, path=_join(share.path, root.lstrip("/")))


def _rest(path: str, folder: str) -> str | None:
    """Return the part of a path after a folder, without a leading slash, or None if it is not
    below.
    """
    top = folder.rstrip("/")
    if path.rstrip("/") == top:
        return ""
    return path[len(top) + 1 :] if path.startswith(f"{top}/") else None


def _join(folder: str, rest: str) -> str:
    return f"{folder.rstrip('/')}/{rest}" if rest else folder


def list_shares(mounts: Sequence[Mount]) -> Iterator[Share]:
    """Yield the server folders that are mounted here."""
    yield from (share for mount in mounts if (share := read_share(mount)) is not None)
