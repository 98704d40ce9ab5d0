"""Serve a node on this PC behind a real SSH server, for the demo and for tests.

`python -m app.nodes.transport.loopback --home DIR --authorized-key KEY.pub` serves one user on
127.0.0.1, needs neither root nor sshd, and prints `{"port": ..., "fingerprint": ...}` when it is
ready. Each command gets DIR as its home folder and a clean environment, as on another PC, plus the
node's tag, by which `power_cut` kills all processes of the node at once, as if its plug were
pulled.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import getpass
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import asyncssh

from agents.shared.files.full_disk import removing_half
from agents.shared.files.python_child import SAFE_FOLDER, python_environ, same_source
from app.errors import UserError
from app.nodes.transport.host_keys import fingerprint_of
from app.nodes.transport.loopback_session import CommandSession

TAG_VARIABLE = "RACKLESS_LOOPBACK_NODE"
_KEPT_VARIABLES = ("PATH", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
_START_TIMEOUT_S = 20.0
_HOST_KEY_NAME = ".loopback_host_key"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopbackNode:
    """A running loopback server in a separate process, which outlives its parent unless it was
    started with `--until-eof`.
    """

    home: Path
    address: str
    port: int
    fingerprint: str
    user: str
    process: asyncio.subprocess.Process


async def start_loopback(
    home: Path,
    authorized_key: Path,
    *,
    address: str = "127.0.0.1",
    port: int = 0,
    options: Sequence[str] = (),
) -> LoopbackNode:
    """Start a server in a separate process and wait until it accepts connections.

    It ends when this process does. `port` 0 lets the system choose.

    Raises:
        UserError: it does not start; the message quotes its last output.
    """
    tag = make_tag(home)
    place = ("--home", tag, "--address", address, "--port", str(port))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "app.nodes.transport.loopback", *place, "--until-eof"),
        *("--authorized-key", _full(authorized_key), *options),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # The tag marks the server itself; its commands get it from `clean_environ`.
        env={**python_environ(os.environ, *same_source()), TAG_VARIABLE: tag},
        cwd=SAFE_FOLDER,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), _START_TIMEOUT_S)
        ready = json.loads(line)
    except (TimeoutError, ValueError) as error:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise UserError(
            f"The SSH server for {home} did not start",
            f"Read its output: {sys.executable} -m app.nodes.transport.loopback {' '.join(place)}",
        ) from error
    return LoopbackNode(
        home=Path(tag),
        address=address,
        port=ready["port"],
        fingerprint=ready["fingerprint"],
        user=getpass.getuser(),
        process=process,
    )


def _full(path: Path) -> str:
    """Return the path for a server that works in another folder."""
    return str(path.absolute())


def make_tag(home: Path) -> str:
    """Return the tag of every process of the node: the absolute path of its home."""
    return os.path.realpath(home)


def find_processes(home: Path) -> Iterator[int]:
    """Yield the ids of all processes of the loopback node with this home, its server included."""
    mark = f"{TAG_VARIABLE}={make_tag(home)}".encode()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as environ:
                if mark in environ.read().split(b"\0"):
                    yield int(entry)


def power_cut(home: Path, *, deadline_s: float = 10.0) -> int:
    """Kill the node's server and all its descendants; return the number of killed processes.

    All are stopped before any is killed, so that none can react to the death of another.

    Raises:
        UserError: a process is left after `deadline_s`.
    """
    # Repeated until none is found: a process may fork between the listing and the stop.
    killed: set[int] = set()
    end_s = time.monotonic() + deadline_s
    while found := set(find_processes(home)):
        # By name, because Windows has neither signal, nor loopback nodes.
        for sign in (signal.Signals["SIGSTOP"], signal.Signals["SIGKILL"]):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sign)
        killed |= found
        if time.monotonic() > end_s:
            raise UserError(f"Processes of {home} do not die: {sorted(found)}", "Restart this PC")
        time.sleep(0.02)
    return len(killed)


class _Server(asyncssh.SSHServer):
    """SSH server that accepts one user with one key and runs commands."""

    def __init__(self, user: str, key: asyncssh.SSHKey, options: argparse.Namespace) -> None:
        self._user = user
        self._key = key
        self._options = options

    def begin_auth(self, username: str) -> bool:
        return True

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        return username == self._user and bool(key == self._key)

    def session_requested(self) -> CommandSession:
        options = self._options
        return CommandSession((options.shell, "-c"), clean_environ(options), str(options.home))


def clean_environ(options: argparse.Namespace) -> dict[str, str]:
    """Return the environment of a login on another PC: a few variables of this process, its own
    home.
    """
    environ = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    user = getpass.getuser()
    environ.update(HOME=str(options.home), USER=user, LOGNAME=user, SHELL=options.shell)
    environ[TAG_VARIABLE] = make_tag(options.home)
    if options.path is not None:
        environ["PATH"] = options.path
    return environ


async def serve(options: argparse.Namespace) -> None:
    """Serve until SIGTERM, SIGINT, or with `--until-eof` the end of stdin."""
    host_key = load_host_key(options.host_key or options.home / _HOST_KEY_NAME)
    allowed = asyncssh.read_public_key(options.authorized_key)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, ended.set)
    # The parent holds our stdin: its end, even by SIGKILL, is our end.
    if options.until_eof:
        loop.add_reader(0, lambda: None if os.read(0, 1024) else ended.set())
    listener = await asyncssh.listen(
        options.address,
        options.port,
        config=None,
        server_factory=lambda: _Server(getpass.getuser(), allowed, options),
        server_host_keys=[host_key],
        encoding=None,
        allow_pty=False,
        password_auth=False,
        kbdint_auth=False,
        gss_host=None,
        keepalive_interval=15,
    )
    ready = {"port": listener.get_port(), "fingerprint": fingerprint_of(host_key)}
    print(json.dumps(ready), flush=True)
    await ended.wait()
    loop.remove_reader(0)
    listener.close()
    await listener.wait_closed()


def load_host_key(path: Path) -> asyncssh.SSHKey:
    """Return the host key in `path`; generate it at the first start."""
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = asyncssh.generate_private_key("ssh-ed25519")
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with removing_half(path), os.fdopen(handle, "wb") as file:
            file.write(key.export_private_key())
    return asyncssh.read_private_key(path)


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m app.nodes.transport.loopback", description=__doc__
    )
    parser.add_argument("--home", type=Path, required=True, help="home folder of every command")
    parser.add_argument("--authorized-key", type=Path, required=True, help="public key let in")
    parser.add_argument("--host-key", type=Path, help="private host key (made when missing)")
    parser.add_argument("--address", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--shell", default="/bin/sh", help="login shell; runs -c COMMAND")
    parser.add_argument("--path", help="PATH of every command")
    parser.add_argument("--until-eof", action="store_true", help="end when stdin does")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    os.umask(0o077)  # its home holds keys and the node's files
    options = read_options(arguments)
    options.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    tag = make_tag(options.home)
    if os.environ.get(TAG_VARIABLE) != tag:
        # /proc/PID/environ shows the environment at exec time, so the tag needs a new exec.
        environ = {**python_environ(os.environ, *same_source()), TAG_VARIABLE: tag}
        argv = (sys.executable, "-m", "app.nodes.transport.loopback", *arguments)
        os.execve(sys.executable, argv, environ)
    try:
        asyncio.run(serve(options))
    except (OSError, asyncssh.KeyImportError) as error:
        print(f"The SSH server for {options.home} cannot start: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
