"""One window per home: a second start brings the first window forward and exits.

A lock file decides who is first; it names process and boot, so that a crash leaves no lock behind.
The first instance listens on a local socket in the same folder. If it does not answer (the file
system has no sockets, or it hangs), the second opens its own window: the store allows several
masters, and no user is locked out.
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
"""Maximum length of a socket path that we use; Linux allows 107 characters, others 103."""
ANSWER_TIMEOUT_S = 3.0
"""Maximum wait for the first instance, in seconds; it listens only after its first frame."""
RETRY_S = 0.1
_ASK, _ANSWER = b"show\n", b"shown\n"


class SingleInstance(QObject):
    wanted = Signal()
    """Rackless was started again."""

    def __init__(self, home: Path) -> None:
        super().__init__()
        self._home = home
        private_folder(home)  # before the lock, which needs the folder
        self._lock = QLockFile(str(home / LOCK_NAME))
        self._lock.setStaleLockTime(0)  # stale when its process is gone, at any age
        self.is_first = self._lock.tryLock(0)
        self._server: QLocalServer | None = None
        self._callers: list[QLocalSocket] = []

    def listen(self) -> None:
        """Listen for further starts; does nothing unless this instance is the first."""
        if not self.is_first:
            return
        from PySide6.QtNetwork import QLocalServer

        self._server = QLocalServer(self)
        # Other users of this PC must not bring the window forward.
        self._server.setSocketOptions(QLocalServer.SocketOption.UserAccessOption)
        self._server.newConnection.connect(self._accept)
        QLocalServer.removeServer(server_name(self._home))  # left by a crash: we hold the lock
        self._server.listen(server_name(self._home))

    def show_first(self, timeout_s: float = ANSWER_TIMEOUT_S) -> bool:
        """Ask the first instance to show its window; return whether it did."""
        from PySide6.QtNetwork import QLocalSocket

        end_s = time.monotonic() + timeout_s
        while True:
            socket = QLocalSocket()
            socket.connectToServer(server_name(self._home))
            if socket.waitForConnected(500):
                socket.write(_ASK)
                left_ms = max(round((end_s - time.monotonic()) * 1000), 1)
                return (
                    socket.waitForReadyRead(left_ms) and bytes(socket.readAll().data()) == _ANSWER
                )
            # The first instance may still be starting: it listens only after its first frame.
            if time.monotonic() > end_s:
                return False
            time.sleep(RETRY_S)

    def end(self) -> None:
        """Release lock and socket."""
        if self._server is not None:
            self._server.close()
        if self.is_first:
            self._lock.unlock()

    def _accept(self) -> None:
        while self._server is not None and self._server.hasPendingConnections():
            socket = self._server.nextPendingConnection()
            socket.readyRead.connect(self._answer)
            self._callers.append(socket)
        # A request may have arrived before its signal was connected.
        self._answer()

    def _answer(self) -> None:
        """Answer pending requests, and drop closed connections."""
        for caller in tuple(self._callers):
            if bytes(caller.readAll().data()) == _ASK:
                self.wanted.emit()
                caller.write(_ANSWER)
            if caller.state() == caller.LocalSocketState.UnconnectedState:
                self._callers.remove(caller)
                caller.deleteLater()


def server_name(home: Path) -> str:
    """Return the path of the socket below the private home, or a name derived from the home."""
    path = str(home / SOCKET_NAME)
    if sys.platform != "win32" and len(path) <= MAX_PATH_CHARS:
        return path
    return "rackless-" + hashlib.sha256(str(home).encode()).hexdigest()[:24]
