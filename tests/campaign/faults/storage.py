"""Faults of disks: full ones, and checkpoints that rot, are cut short or vanish."""

from __future__ import annotations

import contextlib
import errno
import os
import random
from pathlib import Path
from signal import SIGKILL
from typing import TYPE_CHECKING, Literal

from tests.campaign.faults.fault import Expectation, Fault
from tests.campaign.processes import find_part, send
from tests.cluster.namespaces import Node, run_tool

if TYPE_CHECKING:
    from tests.campaign.case import Case

DISK_BYTES = 64 << 20
"""Size of a disk that fails: enough for the checkpoints of a run."""
HARM = Literal["flip", "truncate", "delete"]


def fill(folder: Path) -> Path:
    """Fill the disk of a folder to the last byte; return the file that does."""
    filler = folder / "filler"
    with filler.open("ab", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                size //= 2
    return filler


class FullNode(Fault):
    name = "full-disk-node"
    does = "disk of a node full: checkpoints, logs and journals"

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self.lasts_s = draw.uniform(6.0, 12.0)

    @property
    def expectation(self) -> Expectation:
        return Expectation(
            named=(("{node}", "full"),), within_s=6.0, recovery="untouched", alarms=True
        )

    def do(self, case: Case) -> None:
        self._filler = fill(case.node.home)

    def undo(self, case: Case) -> None:
        self._filler.unlink()


class FullCheckpoints(FullNode):
    name = "full-disk-checkpoints"
    does = "disk of the checkpoints of a node full"

    def do(self, case: Case) -> None:
        site, node = case.site, case.node
        self._folder = site.run_folder(node, case.run_id) / "checkpoints"
        options = ["-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs"]
        site.in_node(node, "mount", *options, str(self._folder))

    def undo(self, case: Case) -> None:
        # Lazily: a save may be in it. The disk below has the older checkpoints again.
        case.site.in_node(case.node, "umount", "-l", str(self._folder))


class NoInodes(FullNode):
    name = "no-inodes-node"
    does = "disk of a node has room, but for no more files"

    @property
    def expectation(self) -> Expectation:
        return Expectation(
            named=(("{node}", "inodes"),), within_s=6.0, recovery="untouched", alarms=True
        )

    def do(self, case: Case) -> None:
        used = os.statvfs(case.node.home)
        self._remount(case, used.f_files - used.f_ffree)

    def undo(self, case: Case) -> None:
        self._remount(case, 0)  # no limit

    def _remount(self, case: Case, num_files: int) -> None:
        run_tool("mount", "-o", f"remount,nr_inodes={num_files}", str(case.node.home))


class DiskFails(Fault):
    name = "disk-fails"
    does = "disk with the runs of a node fails and becomes read-only; later it is exchanged"
    needs = "loop devices"
    is_at_start = True
    lasts_s = 160.0

    @property
    def expectation(self) -> Expectation:
        return Expectation(
            named=(("{node}", "left out", "read-only"),),
            within_s=100.0,  # its journals cannot say so: its rank is given up for one that hangs
            recovery="recovered",
            back_s=100.0,
            alarms=True,
        )

    def prepare(self, case: Case) -> None:
        site, node = case.site, case.node
        self._folder = site.agent_home(node) / "runs"
        image = node.folder / "disk.img"
        image.touch()
        os.truncate(image, DISK_BYTES)
        # Without a journal, which would be replayed at the end.
        run_tool("mkfs.ext4", "-q", "-F", "-O", "^has_journal", str(image))
        site.lose_power(node)
        self._folder.mkdir(exist_ok=True)
        run_tool("mount", "-o", "loop,errors=remount-ro", str(image), str(self._folder))
        self._device = run_tool("findmnt", "-no", "SOURCE", str(self._folder)).strip()
        site.cluster.heal(node)
        site.boot(node)

    def do(self, case: Case) -> None:
        Path("/sys/fs/ext4", Path(self._device).name, "trigger_fs_error").write_text("1")

    def undo(self, case: Case) -> None:
        site, node = case.site, case.node
        site.lose_power(node)
        run_tool("umount", "-l", str(self._folder))
        site.cluster.heal(node)
        site.boot(node)


class FullMaster(Fault):
    name = "full-disk-master"
    does = "disk of the master full: database and mirrors"

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self.lasts_s = draw.uniform(3.0, 10.0)

    @property
    def expectation(self) -> Expectation:
        return Expectation(named=(("full",), ("no space",)), within_s=6.0, alarms=True)

    def do(self, case: Case) -> None:
        self._filler = fill(case.site.master.home)

    def undo(self, case: Case) -> None:
        self._filler.unlink()


class Damage(Fault):
    """Harms one file of the newest checkpoint of one node and kills all ranks.

    A rank that survived would save at the loss, and the harmed checkpoint would not be needed.
    """

    harm: HARM
    of_manifest = False

    def __init__(self, draw: random.Random, max_cut_s: float) -> None:
        self._draw = draw
        self._file = ""

    @property
    def expectation(self) -> Expectation:
        named = (("{node}", "damaged"), ("{node}", "cannot be read"))
        return Expectation(named=named, within_s=20.0, recovery="recovered", alarms=True)

    @property
    def detail(self) -> str:
        return self._file

    def do(self, case: Case) -> None:
        holders = [node for node in case.site.nodes if self._list_checkpoints(case, node)]
        if case.node not in holders:  # of three nodes, one may have no copy
            case.node = holders[0]
        for node in case.site.nodes:
            send(find_part(case.site.cluster, node, "rank"), SIGKILL)
        newest = max(self._list_checkpoints(case, case.node))
        files = sorted(path for path in newest.iterdir() if path.is_file())
        rest = [path for path in files if path.name != "manifest.json"]
        path = newest / "manifest.json" if self.of_manifest else self._draw.choice(rest)
        self._file = path.name
        harm(path, self.harm, self._draw)

    def _list_checkpoints(self, case: Case, node: Node) -> list[Path]:
        return list((case.site.run_folder(node, case.run_id) / "checkpoints").glob("step-*"))


def harm(path: Path, how: HARM, draw: random.Random) -> None:
    """Flip a bit of a file, cut it short, or delete it."""
    if how == "delete":
        path.unlink()
        return
    size = path.stat().st_size
    if how == "truncate":
        os.truncate(path, draw.randrange(size))
        return
    with contextlib.closing(os.fdopen(os.open(path, os.O_RDWR), "r+b")) as file:
        at = draw.randrange(size)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << draw.randrange(8))]))


class Flip(Damage):
    name, does, harm = "checkpoint-bit-flip", "a bit of a checkpoint flips, all ranks die", "flip"


class Truncate(Damage):
    name, does = "checkpoint-truncated", "a file of a checkpoint is cut short, all ranks die"
    harm = "truncate"


class Delete(Damage):
    name, does = "checkpoint-file-deleted", "a file of a checkpoint vanishes, all ranks die"
    harm = "delete"


class ManifestFlip(Flip):
    name, does = "manifest-bit-flip", "a bit of a manifest flips, all ranks die"
    of_manifest = True


class ManifestTruncate(Truncate):
    name, does = "manifest-truncated", "a manifest is cut short, all ranks die"
    of_manifest = True


class ManifestDelete(Delete):
    name, does = "manifest-deleted", "a manifest vanishes, all ranks die"
    of_manifest = True

    @property
    def expectation(self) -> Expectation:
        # A folder without a manifest is no checkpoint; the other node's copy is taken.
        return Expectation(recovery="recovered", alarms=True)


KINDS = (
    FullNode,
    FullCheckpoints,
    NoInodes,
    DiskFails,
    FullMaster,
    Flip,
    Truncate,
    Delete,
    ManifestFlip,
    ManifestTruncate,
    ManifestDelete,
)
