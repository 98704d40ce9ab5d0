"""Drive the node's end of a transfer: feed its `receive` command, or read its `send` command.

Both are commands of the agent's archive on a connection of their own (agents/node/files.py). Login
scripts may print before our first line; nothing that a node sends is trusted.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import PurePosixPath
from typing import Any

from agents.contract.messages import WireError, from_wire, to_wire
from agents.contract.run import FileEntry
from app.errors import NodeUnreachable, UserError
from app.nodes.client import NodeClient
from app.nodes.transport.process import Process

# Bounds of what a node may send before we give up, in bytes.
_MAX_HEADER_BYTES = 16 << 20
_MAX_ANSWER_BYTES = 1 << 20
_CLOSE_GRACE_S = 5.0


class Receiver:
    """The `receive` command of a node, fed from here."""

    def __init__(self, name: str, process: Process, coming: Iterable[FileEntry]) -> None:
        self._name = name
        self._process = process
        self._coming = frozenset(entry.path for entry in coming)
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
        receiver = cls(client.name, await client.open_command("receive", destination), coming)
        header = {"files": to_wire(list(coming)), "manifest": to_wire(list(manifest))}
        await receiver.write(json.dumps(header).encode("ascii") + b"\n")
        return receiver

    async def __aenter__(self) -> Receiver:
        return self

    async def __aexit__(self, *error: object) -> None:
        # An interrupted receiver holds its lock until it has read what is already on the wire.
        await self._process.close(_CLOSE_GRACE_S)

    def wants(self, entry: FileEntry) -> bool:
        return entry.path in self._coming

    async def write(self, block: bytes) -> bool:
        """Send a block; return False if the node takes no more, and `finish` will raise the
        reason.
        """
        if not self._refused:
            try:
                await self._process.write(block)
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
        output = b""
        while data := await self._process.read():
            output = (output + data)[-_MAX_ANSWER_BYTES:]
        code = await self._process.wait()
        # From the end: login scripts may print before the answer.
        for line in reversed(output.splitlines()):
            with contextlib.suppress(ValueError):
                answer = json.loads(line)
                if isinstance(answer, dict) and "ok" in answer:
                    if answer["ok"]:
                        return str(answer.get("path", ""))
                    raise _refusal(self._name, answer)
        raise UserError(
            f"{self._name} ended the transfer with exit code {code}: "
            f"{self._process.stderr_text()[-400:] or 'it gave no reason'}",
            "Start it again: what is complete is not sent twice",
        )


class Sender:
    """The `send` command of a node, read here. Nothing that it sends is trusted."""

    def __init__(self, client: NodeClient, path: str) -> None:
        self._client = client
        self._path = path
        self._process: Process | None = None
        self._buffer = b""

    async def __aenter__(self) -> Sender:
        self._process = await self._client.open_command("send", self._path)
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._process is not None:
            await self._process.close()

    async def entries(self) -> tuple[FileEntry, ...]:
        """Read the list of files; skip what a login script printed before it."""
        while True:
            line = await self._line()
            with contextlib.suppress(ValueError):
                header = json.loads(line)
                if isinstance(header, dict) and "files" in header:
                    return self._check(header["files"])
                if isinstance(header, dict) and header.get("ok") is False:
                    raise _refusal(self._client.name, header)

    async def blocks(self, entry: FileEntry) -> AsyncIterator[bytes]:
        """Yield the bytes of the next file."""
        left = entry.size_bytes
        while left:
            if not self._buffer and not await self._more():
                raise self._broken(f"in {entry.path}")
            block, self._buffer = self._buffer[:left], self._buffer[left:]
            left -= len(block)
            yield block

    async def finish(self) -> None:
        """Check that the node has sent everything."""
        assert self._process is not None
        while await self._more():
            self._buffer = b""
        if await self._process.wait() not in (0, None):
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

    def _check(self, listed: Any) -> tuple[FileEntry, ...]:
        try:
            entries = tuple(from_wire(FileEntry, entry, "files") for entry in listed)
        except (WireError, TypeError) as error:
            raise self._broken(f"in the list of files ({error})") from error
        for entry in entries:
            if not is_safe_path(entry.path) or entry.size_bytes < 0:
                raise UserError(
                    f"{self._client.name} offers a file with the name {entry.path!r}",
                    "Nothing was written. Check that PC: its agent does not send such names",
                )
        return entries

    def _broken(self, where: str) -> UserError:
        said = self._process.stderr_text()[-400:] if self._process is not None else ""
        return UserError(
            f"The transfer of {self._path} from {self._client.name} broke off {where}"
            + (f": {said}" if said else ""),
            "Try again",
        )


def is_safe_path(path: str) -> bool:
    """Return whether a path from a node stays below the folder it is joined to, on any system.

    >>> [is_safe_path(p) for p in ("a/b.bin", "../a", "/a", "a//b", "c:x", "a\\\\b", "", "a/..")]
    [True, False, False, False, False, False, False, False]
    """
    parts = path.split("/")
    plain = all(part not in ("", ".", "..") for part in parts)
    return plain and not set(path) & set('\\:\0<>"|?*') and str(PurePosixPath(path)) == path


def _refusal(name: str, answer: dict[str, Any]) -> UserError:
    return UserError(f"{name}: {answer.get('message', '')}", str(answer.get("hint", "")))
