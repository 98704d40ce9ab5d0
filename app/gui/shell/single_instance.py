"""One window per home: a second start brings the first window forward and ends.

A lock file says who is first; it holds the process and the boot, so that it binds nobody after a
crash. The first listens on a local socket beside it. Where the first does not answer (its socket
cannot be made on this disk, or it hangs), the second opens a window of its own: the store bears
several masters, and nobody is locked out.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QLockFile, QObject, Signal

from app.paths import private_folder

if TYPE_CHECKING:
    from PySide6.QtNetwork import QLocalServer, QLocalSocket

LOCK_NAME, SOCKET_NAME = "window.lock", "window.sock"
MAX_PATH_CHARS = 100
"""A socket's path may have 107 characters on Linux, 103 elsewhere."""
PATIENCE_S = 3.0
"""The first may be starting itself; it listens after its first frame."""
RETRY_S = 0.1
_ASK, _ANSWER = b"show\n", b"shown\n"


class SingleInstance(QObject):
    wanted = Signal()
    """Somebody started Rackless again."""

    def __init__(self, home: Path) -> None:
        super().__init__()
        self._home = home
        private_folder(home)
        self._lock = QLockFile(str(home / LOCK_NAME))
        self._lock.setStaleLockTime(0)  # it is stale when its process is gone, however old
        self.is_first = self._lock.tryLock(0)
        self._server: QLocalServer | None = None
        self._callers: list[QLocalSocket] = []

    def listen(self) -> None:
        """Hear further starts from now on; only the first has a say here."""
        if not self.is_first:
            return
        from PySide6.QtNetwork import QLocalServer

        self._server = QLocalServer(self)
        self._server.setSocketOptions(QLocalServer.SocketOption.UserAccessOption)
        self._server.newConnection.connect(self._accept)
        QLocalServer.removeServer(server_name(self._home))  # left by a crash: the lock is ours
        self._server.listen(server_name(self._home))

    def show_first(self, patience_s: float = PATIENCE_S) -> bool:
        """Ask the first to come forward; tell whether it did."""
        from PySide6.QtNetwork import QLocalSocket

        end_s = time.monotonic() + patience_s
        while True:
            socket = QLocalSocket()
            socket.connectToServer(server_name(self._home))
            if socket.waitForConnected(500):
                socket.write(_ASK)
                left_ms = max(round((end_s - time.monotonic()) * 1000), 1)
                return (
                    socket.waitForReadyRead(left_ms) and bytes(socket.readAll().data()) == _ANSWER
                )
            if time.monotonic() > end_s:
                return False
            time.sleep(RETRY_S)

    def end(self) -> None:
        """Let the next start be the first."""
        if self._server is not None:
            self._server.close()
        if self.is_first:
            self._lock.unlock()

    def _accept(self) -> None:
        while self._server is not None and self._server.hasPendingConnections():
            socket = self._server.nextPendingConnection()
            socket.readyRead.connect(self._answer)
            self._callers.append(socket)
        self._answer()

    def _answer(self) -> None:
        """Answer whoever asks, and forget who is gone."""
        for caller in tuple(self._callers):
            if bytes(caller.readAll().data()) == _ASK:
                self.wanted.emit()
                caller.write(_ANSWER)
            if caller.state() == caller.LocalSocketState.UnconnectedState:
                self._callers.remove(caller)
                caller.deleteLater()


def server_name(home: Path) -> str:
    """Return the socket's path below the home, which is private; else a name of this home."""
    path = str(home / SOCKET_NAME)
    if sys.platform != "win32" and len(path) <= MAX_PATH_CHARS:
        return path
    return "rackless-" + hashlib.sha256(str(home).encode()).hexdigest()[:24]
