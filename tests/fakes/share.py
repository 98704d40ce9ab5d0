"""A share of a network on this PC: a real mount of type fuse.sshfs, whose server can stand still.

The server is a program that reads a folder and speaks the protocol of /dev/fuse, read-only. The
kernel asks it about every name and every attribute, as with a server that others write to. Needs
root.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = "me@nas:/models"
_DEVICE = "/dev/fuse"
_MNT_DETACH = 2
_BUFFER_BYTES = 1 << 21
_MAX_READ_BYTES = 1 << 17

_HEADER = struct.Struct("<IIQQIIII")
_ANSWER = struct.Struct("<IiQ")
_ATTRIBUTES = struct.Struct("<6Q10I")
_ENTRY = struct.Struct("<4Q2I")
_INIT = struct.Struct("<4I2H2I2HI7I")
_DIRECTORY = struct.Struct("<2Q2I")
# Kinds of requests that have no answer: forget, interrupt, batch forget.
_UNANSWERED = (2, 36, 42)


def can_mount() -> bool:
    """Return whether this process may mount a share."""
    return os.geteuid() == 0 and os.access(_DEVICE, os.R_OK | os.W_OK)


@dataclass
class FakeShare:
    place: Path
    """Folder that it is mounted on."""
    server: subprocess.Popen[bytes]

    def freeze(self) -> None:
        """Let the server answer nothing any more, as one that was switched off."""
        os.kill(self.server.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.server.pid, signal.SIGCONT)


@contextlib.contextmanager
def mounted_share(folder: Path, place: Path, source: str = SOURCE) -> Iterator[FakeShare]:
    """Mount what is in `folder` at `place` inside the block, as a share that a server has."""
    place.mkdir(parents=True, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    device = os.open(_DEVICE, os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(source.encode(), os.fsencode(place), b"fuse.sshfs", 0, options):
        os.close(device)
        raise OSError(ctypes.get_errno(), "mounting a share", str(place))
    argv = [sys.executable, __file__, str(device), str(folder)]
    server = subprocess.Popen(argv, pass_fds=[device])
    os.close(device)
    try:
        place.stat()  # until it has started
        yield FakeShare(place, server)
    finally:
        # The server first: the mount would wait for one that stands still.
        server.kill()
        server.wait()
        libc.umount2(os.fsencode(place), _MNT_DETACH)


# ---------------------------------------------------------------- the server


class Server:
    """Answers the kernel about one folder."""

    def __init__(self, device: int, folder: Path) -> None:
        self._device = device
        self._paths = {1: folder}
        self._numbers = {folder: 1}

    def serve(self) -> None:
        """Answer until the share is unmounted."""
        while True:
            try:
                message = os.read(self._device, _BUFFER_BYTES)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue
                raise
            _, kind, unique, number, *_ = _HEADER.unpack_from(message)
            if kind in _UNANSWERED:
                continue
            try:
                path = self._paths.get(number, self._paths[1])  # the first request names none
                code, body = 0, self._answer(kind, path, message[_HEADER.size :])
            except OSError as error:
                code, body = -(error.errno or errno.EIO), b""
            head = _ANSWER.pack(_ANSWER.size + len(body), code, unique)
            with contextlib.suppress(FileNotFoundError):  # who asked was killed
                os.write(self._device, head + body)

    def _answer(self, kind: int, path: Path, body: bytes) -> bytes:
        match kind:
            case 26:  # init
                major, _, ahead, _ = struct.unpack_from("<4I", body)
                return _INIT.pack(
                    *(major, 31, ahead, 0, 16, 12, _MAX_READ_BYTES, 1, 32, 0, 0), *([0] * 7)
                )
            case 1:  # look up
                child = path / body.rstrip(b"\0").decode()
                attributes = _describe(child)
                return _ENTRY.pack(self._number(child), 0, 0, 0, 0, 0) + attributes
            case 3:  # attributes
                return struct.pack("<Q2I", 0, 0, 0) + _describe(path)
            case 5:  # target of a link
                return os.fsencode(os.readlink(path))
            case 14 | 27:  # open a file or folder
                path.stat()
                return struct.pack("<Q2I", 0, 0, 0)
            case 15:  # read
                _, offset, size = struct.unpack_from("<QQI", body)
                with path.open("rb") as file:
                    file.seek(offset)
                    return file.read(size)
            case 28:  # list
                _, offset, size = struct.unpack_from("<QQI", body)
                return self._list(path, offset, size)
            case 17:  # size of the file system
                sizes = (1 << 20, 1 << 19, 1 << 19, 0, 0, 4096, 255, 4096)
                return struct.pack("<5Q10I", *sizes, *[0] * 7)
            case 18 | 25 | 29:  # release, flush
                return b""
        raise OSError(errno.ENOSYS, "not served")

    def _number(self, path: Path) -> int:
        number = self._numbers.setdefault(path, len(self._numbers) + 1)
        self._paths[number] = path
        return number

    def _list(self, path: Path, offset: int, size: int) -> bytes:
        found = b""
        names = [".", "..", *sorted(os.listdir(path))]
        for place, name in enumerate(names[offset:], offset + 1):
            raw = os.fsencode(name)
            entry = _DIRECTORY.pack(self._number(path / name), place, len(raw), 0) + raw
            entry += bytes(-len(entry) % 8)
            if len(found) + len(entry) > size:
                break
            found += entry
        return found


def _describe(path: Path) -> bytes:
    found = path.lstat()
    times = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
    return _ATTRIBUTES.pack(
        found.st_ino,
        found.st_size,
        found.st_blocks,
        *(time_ns // 10**9 for time_ns in times),
        *(time_ns % 10**9 for time_ns in times),
        found.st_mode,
        found.st_nlink,
        found.st_uid,
        found.st_gid,
        found.st_rdev,
        4096,
        0,
    )


if __name__ == "__main__":
    Server(int(sys.argv[1]), Path(sys.argv[2])).serve()
