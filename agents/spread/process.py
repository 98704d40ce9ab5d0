"""One node's part of a transfer: the command `spread`, which runs during the master's connection.

The main thread reads the master's messages, and chunks if the master cannot reach this node's port
and has to send them through SSH. Other threads fetch from another node, serve nodes that fetch from
here, receive chunks from the master at the port, move complete files into the store, and report
progress. The process ends with the connection, and its port closes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from agents.contract import spread as messages
from agents.contract.chunks import ChunkedFile, hash_chunks
from agents.contract.run import FileEntry
from agents.contract.wire import WireError
from agents.election.channel import Peer, PeerError
from agents.errors import ExpectedError, explain_os_error
from agents.node.file_store import FileStore
from agents.node.files import list_files, split_destination, split_path
from agents.rendezvous.interfaces import find_route
from agents.shared.files.folder_files import open_regular
from agents.spread.holdings import DamagedChunk, Holdings
from agents.spread.peers import fetch, listen, receive_chunk, receive_frames
from agents.state import Home

REPORT_S = 0.25
"""Time between two reports of progress, in seconds."""
SYNC_S = 1.0
"""Time between two syncs of a file that is arriving, in seconds."""


def spread(home: Home, source: BinaryIO, out: BinaryIO) -> int:
    """Take part in one transfer until `source` ends; return the exit code."""
    speaker = _Speaker(out)
    # First, because the master chooses routes by the addresses of all nodes.
    speaker.say(messages.SpreadHello(address=_own_address()))
    try:
        job = messages.read_line(source.readline(messages.MAX_LINE_BYTES))
        if not isinstance(job, messages.SpreadJob):
            raise WireError("a transfer must begin with its job")
        store = FileStore(home.path)
        if job.root is not None:
            folder = _read_folder(home, store, job)
            _Part(job, folder.holdings, store, speaker).run(source, folder.entries)
            return 0
        with Holdings.of_store(store, job.files) as holdings:
            _Part(job, holdings, store, speaker).run(source)
        return 0
    except ExpectedError as error:
        speaker.say(messages.SpreadFailed(message=error.message, hint=error.hint))
    except (WireError, DamagedChunk, PeerError) as error:
        speaker.say(
            messages.SpreadFailed(
                message=f"The transfer cannot continue: {error}.", hint="Try again"
            )
        )
    except EOFError:
        return 1  # the connection to the master broke within a chunk
    # Drain the input: otherwise the master would block on writing and never read the reason.
    while source.read(1 << 20):
        pass
    return 1


def _own_address() -> str:
    """Return this node's end of the master's SSH connection, or an empty string without one."""
    parts = os.environ.get("SSH_CONNECTION", "").split()
    return parts[2] if len(parts) == 4 else ""


@dataclass(frozen=True)
class _Folder:
    """Files that this node sends."""

    entries: tuple[FileEntry, ...]
    holdings: Holdings


def _read_folder(home: Home, store: FileStore, job: messages.SpreadJob) -> _Folder:
    """Hash the files to send.

    Raises:
        ExpectedError: one of them is missing or cannot be read.
    """
    root = home.path.joinpath(*split_destination(job.root or ""))
    present = {path.relative_to(root).as_posix(): path for path in list_files(home, root)}
    entries: list[FileEntry] = []
    files: dict[ChunkedFile, Path] = {}
    for name, path in present.items():
        split_path(name, "The file name")
        try:
            with open_regular(path, root) as file:
                found = hash_chunks(file)
            store.keep_chunks(found)
        except OSError as error:
            raise explain_os_error(error, f"reading {path}") from error
        files.setdefault(found, path)  # files with the same content are sent once
        entries.append(FileEntry(path=name, size_bytes=found.size_bytes, sha256=found.sha256))
    if not entries:
        raise ExpectedError(f"There is nothing to send at {root} on this node.")
    return _Folder(tuple(entries), Holdings.of_files(tuple(files.values()), tuple(files)))


class _Speaker:
    """Writer of messages and chunks to the master; thread-safe."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._lock = threading.Lock()

    def say(self, message: messages.Message, data: bytes = b"") -> None:
        with self._lock:
            try:
                self._out.write(messages.to_line(message) + data)
                self._out.flush()
            except OSError:
                return  # the master is gone; the main thread sees the end of its input


class _Part:
    """This node's part of a transfer once its present chunks are known."""

    def __init__(
        self, job: messages.SpreadJob, holdings: Holdings, store: FileStore, speaker: _Speaker
    ) -> None:
        self._job = job
        self._holdings = holdings
        self._store = store
        self._speaker = speaker
        self._pool = ThreadPoolExecutor(1)  # one thread, because hashes need the blocks in order
        self._fetch_from: messages.FetchFrom | None = None
        self._directed = threading.Condition()

    def run(self, source: BinaryIO, entries: tuple[FileEntry, ...] = ()) -> None:
        """Work until the master closes its end.

        Args:
            source: stream from the master.
            entries: files that this node sends.

        Raises:
            ExpectedError: this node's disk refuses.
            WireError: the master sent a malformed message.
            DamagedChunk: a chunk from the master does not match its hash.
        """
        address, port = self._listen()
        ready = messages.SpreadReady(
            address=address,
            port=port,
            held=self._holdings.held(),
            files=tuple(self._holdings.files) if entries else (),
            entries=entries,
        )
        self._speaker.say(ready)
        for work in (self._fetch_all, self._store_all, self._report):
            threading.Thread(target=self._guarded, args=(work,), daemon=True).start()
        while line := source.readline(messages.MAX_LINE_BYTES):
            message = messages.read_line(line)
            if isinstance(message, messages.FetchFrom):
                with self._directed:
                    self._fetch_from = message
                    self._directed.notify()
            elif isinstance(message, messages.GiveChunk):
                self._give(message.chunk)
            elif isinstance(message, messages.ChunkHeader):
                size_bytes = message.size_bytes
                receive_chunk(self._holdings, message.chunk, size_bytes, source, self._pool)

    def _listen(self) -> tuple[str, int]:
        if not self._job.credential:
            return "", 0
        # The address on the route to the other nodes may differ from that of the SSH connection.
        address = find_route(self._job.toward) if self._job.toward else _own_address()
        try:
            listener = listen(
                address or "", self._job.credential, self._holdings, self._take_offered
            )
            return address or "", listener.port
        except (OSError, ValueError):
            return address or "", 0  # other nodes fetch from elsewhere

    def _give(self, number: int) -> None:
        if not 0 <= number < len(self._holdings.chunks):
            raise WireError(f"there is no chunk {number}")
        try:
            data = self._holdings.read(number)
        except OSError as error:
            raise explain_os_error(error, "reading a file to send") from error
        self._speaker.say(messages.ChunkHeader(chunk=number, size_bytes=len(data)), data)

    def _take_offered(self, stream: BinaryIO) -> None:
        """Receive chunks from the master; if this fails, the master continues through SSH."""
        before = self._holdings.received_bytes
        try:
            receive_frames(stream, self._holdings, self._pool, lambda: False)
        except ExpectedError as error:
            self._speaker.say(messages.SpreadFailed(message=error.message, hint=error.hint))
        except (PeerError, DamagedChunk, OSError, EOFError) as error:
            # An empty address stands for the master itself.
            had_begun = self._holdings.received_bytes > before
            self._say_lost("", 0, str(error), had_begun=had_begun)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except ExpectedError as error:
            self._speaker.say(messages.SpreadFailed(message=error.message, hint=error.hint))
        except OSError as error:
            explained = explain_os_error(error, f"storing files in {self._store.root}")
            self._speaker.say(messages.SpreadFailed(message=explained.message, hint=explained.hint))

    def _fetch_all(self) -> None:
        """Fetch from the node that the master names; after a loss, from the next one named."""
        while not self._holdings.is_complete():
            with self._directed:
                self._directed.wait_for(lambda: self._fetch_from is not None)
                place = self._fetch_from
            assert place is not None
            before = self._holdings.received_bytes
            # Names of nodes are known to the master only; the address serves as the name.
            peer = Peer(place.address, place.address, place.port, self._job.credential)
            try:
                fetch(peer, self._holdings, self._pool, lambda: self._fetch_from is not place)  # noqa: B023
            except (PeerError, DamagedChunk) as error:
                has_begun = self._holdings.received_bytes > before
                self._report_lost(place, str(error), had_begun=has_begun)

    def _report_lost(self, place: messages.FetchFrom, reason: str, *, had_begun: bool) -> None:
        with self._directed:
            if self._fetch_from is not place:
                return  # the master has named another node meanwhile
            self._fetch_from = None
        self._say_lost(place.address, place.port, reason, had_begun=had_begun)

    def _say_lost(self, address: str, port: int, reason: str, *, had_begun: bool) -> None:
        held = self._holdings.held()
        self._speaker.say(
            messages.SourceLost(
                address=address, port=port, reason=reason, had_begun=had_begun, held=held
            )
        )

    def _store_all(self) -> None:
        for index, file in enumerate(self._holdings.files if self._job.root is None else ()):
            # Sync every second, so that the last sync need not write gigabytes.
            while not self._holdings.wait_complete(index, SYNC_S):
                self._holdings.sync(index)
            # A file may have been stored already when the transfer began.
            if self._store.find(file.sha256, file.size_bytes) is None:
                self._store.take_partial(file)
        self._say_progress(stored=True)

    def _report(self) -> None:
        while True:
            time.sleep(REPORT_S)
            self._say_progress(stored=False)

    def _say_progress(self, *, stored: bool) -> None:
        held, received = self._holdings.held_bytes(), self._holdings.received_bytes
        self._speaker.say(
            messages.SpreadProgress(held_bytes=held, received_bytes=received, stored=stored)
        )
