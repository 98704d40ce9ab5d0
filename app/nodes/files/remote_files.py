"""Drive the node's end of a transfer: write to its `receive` command, or read from its `send`
command.

Both are commands of the agent's archive on a separate connection (agents/node/files.py). Login
scripts may print before our first line; nothing that a node sends is trusted.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import PurePosixPath
from typing import Any

from agents.contract.json_text import read_said
from agents.contract.messages import WireError, from_wire, to_wire
from agents.contract.names import MAX_PATH_CHARACTERS, is_code, is_reserved
from agents.contract.run import FileEntry
from agents.contract.wire import ForeignValueError
from app.errors import NodeUnreachable, UserError
from app.nodes.client import NodeClient
from app.nodes.transport.process import Process
from app.text import one_line

# Limits of what a node may send, in bytes.
_MAX_HEADER_BYTES = 16 << 20
_MAX_ANSWER_BYTES = 1 << 20
_MAX_NOISE_BYTES = 256 << 10
# Maximum length of a node's error message and of its hint, in characters.
_MAX_SAID = 2000
MAX_FILES = 20_000
"""Maximum number of files of one folder; the largest models have a few hundred."""
MAX_NAME_BYTES = 255
"""Maximum length of a file name; file systems allow no longer ones."""
HEADER_TIMEOUT_S = 4 * 3600.0
"""Maximum duration of hashing the files on the node, in seconds: a terabyte from a slow disk."""
STALL_S, STALL_BYTES = 120.0, 1 << 20
"""Maximum time for this many bytes, in seconds; at that speed a model would take a month."""
STORE_TIMEOUT_S = 1800.0
"""Maximum duration of storing a block, or the last ones, on the node, in seconds."""
# Characters that Windows forbids in file names, as the strictest of the supported systems.
_FORBIDDEN = frozenset('\\:<>"|?*')
_CLOSE_GRACE_S = 5.0


class Receiver:
    """The `receive` command of a node, driven from here."""

    def __init__(self, name: str, process: Process) -> None:
        self._name = name
        self._process = process
        self._refused = False
        self._lost: NodeUnreachable | None = None

    @classmethod
    async def open(
        cls,
        client: NodeClient,
        destination: str,
        coming: Sequence[FileEntry],
        manifest: Sequence[FileEntry],
    ) -> Receiver:
        receiver = cls(client.name, await client.open_command("receive", destination))
        header = {"files": to_wire(list(coming)), "manifest": to_wire(list(manifest))}
        await receiver.write(json.dumps(header).encode("ascii") + b"\n")
        return receiver

    async def __aenter__(self) -> Receiver:
        return self

    async def __aexit__(self, *error: object) -> None:
        # An interrupted receiver holds its lock until it has read what is already on the wire.
        await self._process.close(_CLOSE_GRACE_S)

    async def write(self, block: bytes) -> bool:
        """Send a block; return False if the node takes no more, and `finish` will raise the
        reason.
        """
        if not self._refused:
            try:
                async with asyncio.timeout(STORE_TIMEOUT_S):
                    await self._process.write(block)
            except TimeoutError:
                self._refused, self._lost = True, _too_slow(self._name, "take a block")
            except OSError:
                # Its reason is on the command's stdout, which `finish` reads.
                self._refused = True
            except NodeUnreachable as error:
                self._refused, self._lost = True, error
        return not self._refused

    async def finish(self) -> str:
        """Return the folder on the node once everything is stored there.

        Raises:
            UserError: it is not stored, with the node's own reason.
            NodeUnreachable: the connection broke.
        """
        if self._lost is not None:
            raise self._lost
        self._process.write_eof()
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                output = await self._read_answer()
                code = await self._process.wait()
        except TimeoutError as error:
            raise _too_slow(self._name, "confirm that everything is stored") from error
        # From the end: login scripts may print before the answer.
        for line in reversed(output.splitlines()):
            answer = read_said(line)
            if answer.get("ok"):
                return str(answer.get("path", ""))
            if "ok" in answer:
                raise _refusal(self._name, answer)
        raise UserError(
            f"{self._name} ended the transfer with exit code {code}: "
            f"{self._process.stderr_text()[-400:] or 'it gave no reason'}",
            "Start it again: what is complete is not sent twice",
        )

    async def _read_answer(self) -> bytes:
        output = b""
        while data := await self._process.read():
            output = (output + data)[-_MAX_ANSWER_BYTES:]
        return output


class Sender:
    """The `send` command of a node, read here; nothing that it sends is trusted."""

    def __init__(self, client: NodeClient, path: str) -> None:
        self._client = client
        self._path = path
        self._process: Process | None = None
        self._buffer = b""
        # Time for the bytes since the last STALL_BYTES; the time of our own disk does not count.
        self._waited_s = 0.0
        self._arrived_bytes = 0

    async def __aenter__(self) -> Sender:
        self._process = await self._client.open_command("send", self._path)
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._process is not None:
            await self._process.close()

    async def entries(self) -> tuple[FileEntry, ...]:
        """Read the list of files; skip output of login scripts before it.

        Raises:
            UserError: the list is invalid or missing.
        """
        left_bytes = _MAX_NOISE_BYTES
        try:
            # The node hashes everything first.
            async with asyncio.timeout(HEADER_TIMEOUT_S):
                while left_bytes > 0:
                    line = await self._line()
                    header = read_said(line)
                    if "files" in header:
                        return self._check(header["files"])
                    if header.get("ok") is False:
                        raise _refusal(self._client.name, header)
                    left_bytes -= len(line) + 1
        except TimeoutError as error:
            raise _too_slow(self._client.name, "list the files") from error
        raise self._broken("before the list of files")

    async def blocks(self, entry: FileEntry) -> AsyncIterator[bytes]:
        """Yield the bytes of the next file."""
        left = entry.size_bytes
        while left:
            if not self._buffer and not await self._more_in_time():
                raise self._broken(f"in {entry.path}")
            block, self._buffer = self._buffer[:left], self._buffer[left:]
            left -= len(block)
            yield block

    async def finish(self) -> None:
        """Check that the node has sent everything and nothing more."""
        assert self._process is not None
        if self._buffer or await self._more_in_time():
            raise self._broken("at its end, as it sent more than it had listed")
        try:
            async with asyncio.timeout(STALL_S):
                code = await self._process.wait()
        except TimeoutError as error:
            raise _too_slow(self._client.name, "end the transfer") from error
        if code not in (0, None):
            raise self._broken("at its end")

    async def _line(self) -> bytes:
        while b"\n" not in self._buffer:
            if len(self._buffer) > _MAX_HEADER_BYTES or not await self._more():
                raise self._broken("before the list of files")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    async def _more(self) -> bool:
        assert self._process is not None
        data = await self._process.read()
        self._buffer = self._buffer + data if self._buffer else data
        return bool(data)

    async def _more_in_time(self) -> bool:
        """Wait for bytes; only the node's time counts, not that of our disk."""
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(STALL_S - self._waited_s):
                is_more = await self._more()
        except TimeoutError as error:
            raise _too_slow(self._client.name, f"send {STALL_BYTES >> 10} KiB") from error
        self._waited_s += time.monotonic() - began_s
        self._arrived_bytes += len(self._buffer)
        if self._arrived_bytes >= STALL_BYTES:
            self._waited_s, self._arrived_bytes = 0.0, 0
        return is_more

    def _check(self, listed: Any) -> tuple[FileEntry, ...]:
        if not isinstance(listed, list):
            raise self._broken("in the list of files: it is not a list")
        try:
            entries = tuple(from_wire(FileEntry, entry, "files") for entry in listed)
        except ForeignValueError as error:
            raise refuse_names(self._client.name, str(error)) from error
        except WireError as error:
            raise self._broken(f"in the list of files ({error})") from error
        check_entries(self._client.name, entries)
        return entries

    def _broken(self, where: str) -> UserError:
        said = self._process.stderr_text()[-400:] if self._process is not None else ""
        return UserError(
            f"The transfer of {self._path} from {self._client.name} broke off {where}"
            + (f": {said}" if said else ""),
            "Try again",
        )


def check_entries(name: str, entries: Sequence[FileEntry]) -> None:
    """Check the files that a node lists, before any of their names becomes a path.

    Raises:
        UserError: there are too many, or their names collide on some system.
    """
    if len(entries) > MAX_FILES:
        raise UserError(
            f"{name} lists {len(entries):,} files; a folder may have {MAX_FILES:,}",
            "Nothing was written. Check that PC",
        )
    for entry in entries:
        if not is_safe_path(entry.path):
            raise refuse_names(name, f"{entry.path!a}")
        if is_code(entry.path):
            raise UserError(
                f"{name} offers {entry.path!a}, which is code, a pickle or a notebook",
                "Nothing was written. Remove that file there: Rackless copies none from nodes",
            )
    clash = find_clash(entry.path for entry in entries)
    if clash:
        raise refuse_names(name, f"{clash!a}, which another one has too")


def refuse_names(name: str, file: str) -> UserError:
    """Return the error for a file name that our agent never sends."""
    return UserError(
        f"{name} offers a file with the name {file}",
        "Nothing was written. Check that PC: its agent does not send such names",
    )


def is_safe_path(path: str) -> bool:
    """Return True if a path from a node stays below the folder it is joined to, on any system.

    >>> [is_safe_path(p) for p in ("a/b.bin", "../a", "/a", "a//b", "c:x", "a\\\\b", "", "a/..")]
    [True, False, False, False, False, False, False, False]
    >>> [is_safe_path(p) for p in ("nul.txt", "a/con", "a.", "a /b", "a\\x1b[2J", "\\u202ea")]
    [False, False, False, False, False, False]
    """
    if len(path) > MAX_PATH_CHARACTERS or not path.isprintable():
        return False
    parts = path.split("/")
    plain = all(part not in ("", ".", "..") and _is_file_name(part) for part in parts)
    return plain and not set(path) & _FORBIDDEN and str(PurePosixPath(path)) == path


def _is_file_name(part: str) -> bool:
    # Windows drops trailing dots and spaces, and opens devices by reserved names.
    is_plain = part == part.rstrip(". ") and not is_reserved(part)
    return is_plain and len(part.encode("utf-8", "replace")) <= MAX_NAME_BYTES


def find_clash(paths: Iterable[str]) -> str:
    """Return a path that cannot coexist with another one, or "" if all can.

    >>> find_clash(["a", "b/c"]), find_clash(["a", "A"]), find_clash(["a/b", "a"])
    ('', 'A', 'a')
    """
    files: set[str] = set()
    folders: set[str] = set()
    for path in paths:
        # Windows and macOS ignore case in names.
        name = path.casefold()
        above = [str(folder) for folder in PurePosixPath(name).parents][:-1]
        if name in files or name in folders or files.intersection(above):
            return path
        files.add(name)
        folders.update(above)
    return ""


def _refusal(name: str, answer: dict[str, Any]) -> UserError:
    message, hint = str(answer.get("message", "")), str(answer.get("hint", ""))
    return UserError(f"{name}: {one_line(message[:_MAX_SAID])}", one_line(hint[:_MAX_SAID]))


def _too_slow(name: str, what: str) -> NodeUnreachable:
    return NodeUnreachable(
        f"{name} takes too long to {what}",
        "Check its load and its network, then start the transfer again",
    )
