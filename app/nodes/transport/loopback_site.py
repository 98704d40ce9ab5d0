"""Several loopback nodes in one folder, started and ended together, for the demo.

The folder is locked while a site is open, so that two demos never share nodes. Remaining processes
of an earlier site, even of one that was killed, are ended before the start.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from app.errors import UserError
from app.filelock import read_holder, try_held
from app.nodes.node import SshAddress
from app.nodes.transport.loopback import LoopbackNode, load_host_key, power_cut, start_loopback
from app.paths import private_folder


class LoopbackSite:
    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder = folder
        self._names = tuple(names)
        self._lock: int | None = None
        self.nodes: tuple[LoopbackNode, ...] = ()

    def open(self) -> None:
        """Lock the folder and end remaining processes in it; blocks briefly.

        Raises:
            UserError: another site holds the folder, or this system has no /proc.
        """
        if not Path("/proc/self/environ").exists():
            raise UserError(
                "nodes on loopback need Linux", "On Windows, run the same command inside WSL2."
            )
        private_folder(self._folder)
        path = self._folder / "site.lock"
        self._lock = try_held(path)
        if self._lock is None:
            by = read_holder(path) or "another process"
            raise UserError(
                f"the demo is running already, by {by}", "Close it first, then start it again."
            )
        self._end_processes()

    async def start(self) -> None:
        """Start a server for each name, all with one login key.

        Raises:
            UserError: a server does not start.
        """
        # Each node believes that it has all cores; their threads would compete for them.
        threads = max(1, (os.cpu_count() or 1) // len(self._names))
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        public = await asyncio.to_thread(self._make_login_key)
        self.nodes = tuple(
            await asyncio.gather(
                *(start_loopback(self._folder / name, public) for name in self._names)
            )
        )

    async def restart(self, node: LoopbackNode) -> None:
        """Restart the server of a node after a power cut, at its old address.

        Raises:
            UserError: it does not start.
        """
        public = (self._folder / "login_key").with_suffix(".pub")
        await node.process.wait()
        again = await start_loopback(node.home, public, port=node.port)
        self.nodes = tuple(again if one is node else one for one in self.nodes)

    def address(self, node: LoopbackNode) -> SshAddress:
        return SshAddress(
            host=node.address, port=node.port, user=node.user, key=self._folder / "login_key"
        )

    async def end(self) -> None:
        """End every process of every node, on the event loop that started them."""
        await asyncio.to_thread(self._end_processes)
        for node in self.nodes:
            await node.process.wait()
        self.nodes = ()

    def close(self) -> None:
        """End all processes of all nodes and unlock the folder; blocks briefly."""
        if self._lock is not None:
            self._end_processes()
            os.close(self._lock)
            self._lock = None

    def _make_login_key(self) -> Path:
        private = self._folder / "login_key"
        public = private.with_suffix(".pub")
        public.write_bytes(load_host_key(private).export_public_key())
        return public

    def _end_processes(self) -> None:
        for home in self._folder.iterdir():
            if home.is_dir():
                power_cut(home)
