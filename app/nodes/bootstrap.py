"""Start the agent over an open connection, through the stdio of a single command.

A small shell script finds the archive by its hash, requests it if it is missing or altered,
verifies and renames it, and becomes `python3 -I ARCHIVE serve NONCE`. SSH, local and WSL nodes all
start this way. Output of the login shell before the first line with our nonce is skipped.

The script is passed as one argument through login shells of every kind (sh, fish, csh) and through
`wsl.exe`, which all parse quotes differently. So it has no quotes, backslashes, exclamation marks
or newlines: with `IFS=` and `set -f` the shell splits and globs nothing, and needs none of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from agents.contract import messages
from app.errors import NodeNotReady
from app.nodes.transport.connection import Connection
from app.nodes.transport.process import Process
from app.shell_words import posix_command

if TYPE_CHECKING:
    from app.nodes.archive import AgentArchive

STEP_TIMEOUT_S = 30.0
"""Maximum silence before the agent's hello, in seconds."""
MAX_NOISE_BYTES = 256 << 10
"""Maximum output of login scripts that is skipped, in bytes."""
ARCHIVES_KEPT = 3
"""Number of newest archives that stay on a node; masters of other versions may share it."""
AGENT_FOLDER = "~/.local/share/rackless-agent"
"""Home of the agent on a node, for messages; the script computes it itself."""
# Size of the portions of the archive; the deadline is renewed after each of them.
_PUSH_BYTES = 128 << 10
# Maximum length of a program's output that a message quotes, in characters.
_SHOWN_OUTPUT = 400

_UNSAFE_FOLDERS = {
    "owner": (
        "belongs to another user",
        "Move it away, or log in as its owner; this shows who that is: ls -ld {folder}",
    ),
    "open": (
        "can be written by other users",
        "Check its contents, then close it there: chmod 700 {folder}",
    ),
    "parent": (
        "is in a folder where other users can replace it",
        "Close that folder there, or name another place in RACKLESS_AGENT_HOME: "
        "chmod o-w {folder}/..",
    ),
}
"""Problem of a folder and the remedy, by the step at which the script failed."""

# `grep` takes the archive's name from stdin: in its arguments it would find itself.
SCRIPT = " ".join(
    (
        "set -f; IFS=; umask 077; nonce=$1; sum=$2; size=$3;",
        "fail() { echo RACKLESS-BOOT $nonce FAIL $1; echo $2; exit 1; };",
        "for tool in python3 sha256sum head; do",
        "command -v $tool >/dev/null || fail tool $tool; done;",
        "home=${RACKLESS_AGENT_HOME:-$HOME/.local/share/rackless-agent};",
        "dir=$home/agents; zip=$dir/$sum.zip; new=$dir/.$nonce.part; got=;",
        # What another user can write to may change between its check and its start, and is refused:
        # what lies in it already (an interpreter to use, a run's state) cannot be trusted either.
        "err=$(LC_ALL=C; export LC_ALL; mkdir -p $dir 2>&1) || fail folder $err;",
        "for own in $home $dir; do test -O $own || fail owner $own;",
        "test -z $(find $own/. -maxdepth 0 -perm /022) || fail open $own; done;",
        "test -z $(find $home/.. -maxdepth 0 -perm -002 -not -perm -1000) || fail parent $home;",
        "chmod go-rwx $home $dir 2>/dev/null;",
        # sha256sum prints the name of its input after the hash, hence the patterns with a star.
        "test -f $zip && got=$(sha256sum < $zip);",
        "case $got in $sum*) ;; *)",
        "err=$(LC_ALL=C; export LC_ALL; { : > $new; } 2>&1) || fail folder $err;",
        "echo RACKLESS-BOOT $nonce NEED;",
        # head takes no more than the archive: what follows on stdin belongs to the agent.
        "err=$(LC_ALL=C; export LC_ALL; { head -c $size > $new; } 2>&1)",
        "|| { rm -f $new; fail write $err; };",
        "got=$(sha256sum < $new);",
        "case $got in $sum*) ;; *) rm -f $new; fail hash $got;; esac;",
        "err=$(LC_ALL=C; export LC_ALL; mv -f $new $zip 2>&1)",
        "|| { rm -f $new; fail write $err; };",
        f"ls -t $dir | grep zip$ | tail -n +{ARCHIVES_KEPT + 1} | while read -r old; do",
        "echo $old | (set +f; grep -qsFf - /proc/[0-9]*/cmdline /proc/[0-9]*/environ);",
        # grep exits with 2 if it cannot read another user's process; a match gives 0 even then.
        "case $? in 1|2) rm -f $dir/$old;; esac; done;",
        # Left by broken pushes; a younger one may belong to a push in progress.
        "find $dir -name .*.part -mmin +60 -exec rm -f {} +;;",
        "esac;",
        # -I: neither PYTHONPATH nor the user's site-packages may shadow the agent's modules.
        "exec python3 -I $zip serve $nonce",
    )
)


class _Deadline(Protocol):
    def reschedule(self, when: float | None) -> None: ...


@dataclass(frozen=True, slots=True)
class StartedAgent:
    process: Process
    hello: messages.Hello
    rest: bytes
    """Bytes after the hello, which belong to the channel."""


async def start_agent(connection: Connection, archive: AgentArchive, where: str) -> StartedAgent:
    """Start the agent on the node; send the archive first if the node lacks it.

    Args:
        where: the node's name and address, for messages.

    Raises:
        NodeNotReady: it cannot be started there; the message says why and how to fix it.
        NodeUnreachable: the connection broke.
    """
    # Unguessable, so that nothing a login script prints can pass for our first line.
    nonce = secrets.token_hex(16)
    size = str(len(archive.data))
    argv = ("sh", "-c", SCRIPT, "rackless", nonce, archive.sha256, size)
    process = await connection.open(argv)
    try:
        async with asyncio.timeout(STEP_TIMEOUT_S) as deadline:
            # No limit on the whole start: a slow network may need minutes for the archive. Each
            # step has one.
            return await _Greeting(process, archive, nonce, where, deadline).receive()
    except TimeoutError as error:
        await process.close()
        raise NodeNotReady(
            f"{where} accepted the login, but its login shell did not start our command within "
            f"{STEP_TIMEOUT_S:.0f} s{_quoted(process.stderr_text())}",
            "Find what waits for input in ~/.bashrc or ~/.profile on that PC",
        ) from error
    except BaseException:
        await process.close()
        raise


class _Greeting:
    """Parser of a node's first output, up to the agent's hello."""

    def __init__(
        self, process: Process, archive: AgentArchive, nonce: str, where: str, deadline: _Deadline
    ) -> None:
        self._process = process
        self._archive = archive
        self._where = where
        self._deadline = deadline
        self._boot = f"RACKLESS-BOOT {nonce} ".encode()
        self._ready = f"RACKLESS {nonce}\n".encode()
        self._buffer = bytearray()
        self._pushed = False

    async def receive(self) -> StartedAgent:
        while self._ready not in self._buffer:
            word = self._take_boot_word()
            # Once only: a script that requests the archive again would loop.
            if word == b"NEED" and not self._pushed:
                self._pushed = True
                await self._push()
            elif word is not None and word.startswith(b"FAIL "):
                raise await self._failure(word[5:].decode("ascii", "replace"))
            elif not await self._read_more():
                raise await self._ended()
            elif len(self._buffer) > MAX_NOISE_BYTES:
                raise NodeNotReady(
                    f"The login scripts on {self._where} print more than "
                    f"{MAX_NOISE_BYTES >> 10} KiB before our command runs",
                    "Make ~/.bashrc and ~/.profile on that PC silent for remote commands",
                )
        del self._buffer[: self._buffer.index(self._ready) + len(self._ready)]
        return await self._read_hello()

    def _take_boot_word(self) -> bytes | None:
        start = self._buffer.find(self._boot)
        end = self._buffer.find(b"\n", start)
        if start < 0 or end < 0:
            return None
        word = bytes(self._buffer[start + len(self._boot) : end])
        del self._buffer[: end + 1]
        return word

    async def _read_more(self) -> bool:
        data = await self._process.read()
        self._progress()
        self._buffer += data
        return bool(data)

    async def _push(self) -> None:
        view = memoryview(self._archive.data)
        # A script that stops reading reports the reason on its stdout; show that, not our EPIPE.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for start in range(0, len(view), _PUSH_BYTES):
                await self._process.write(bytes(view[start : start + _PUSH_BYTES]))
                self._progress()

    def _progress(self) -> None:
        self._deadline.reschedule(asyncio.get_running_loop().time() + STEP_TIMEOUT_S)

    async def _read_hello(self) -> StartedAgent:
        while b"\n" not in self._buffer:
            if len(self._buffer) > messages.MAX_LINE_BYTES or not await self._read_more():
                raise await self._ended()
        # Bytes after the hello belong to the channel, which begins in the middle of the stream.
        line, _, rest = bytes(self._buffer).partition(b"\n")
        try:
            message = messages.decode(line)
            if isinstance(message, messages.Event) and message.kind == "hello":
                hello = messages.from_wire(messages.Hello, message.data)
                return StartedAgent(self._process, hello, rest)
        except messages.WireError as error:
            raise self._refusal(f"the agent's first line cannot be read: {error}") from error
        raise self._fatal(message)

    def _fatal(self, message: messages.Message) -> NodeNotReady:
        if isinstance(message, messages.Event) and message.kind == "fatal":
            with contextlib.suppress(messages.WireError):
                error = messages.from_wire(messages.RemoteError, message.data)
                return NodeNotReady(f"{self._where}: {error.message}", error.hint)
        return self._refusal("the agent's first message is not its hello")

    async def _failure(self, step: str) -> NodeNotReady:
        """Read the script's FAIL line and the text after it; return the error to raise."""
        while await self._read_more() and len(self._buffer) < MAX_NOISE_BYTES:
            pass
        detail = self._buffer.decode("utf-8", "replace").strip()[-_SHOWN_OUTPUT:]
        return explain_failure(step, detail, self._where)

    async def _ended(self) -> NodeNotReady:
        with contextlib.suppress(TimeoutError):
            # Output may end before the exit code arrives; without one the error is only less exact.
            async with asyncio.timeout(1.0):
                code = await self._process.wait()
                # An older wsl.exe writes UTF-16, whose zero bytes would garble the message.
                output = self._buffer.decode("utf-8", "replace").replace("\0", "").strip()
                text = self._process.stderr_text().replace("\0", "") or output
                return explain_end(code, text[-_SHOWN_OUTPUT:], self._where)
        return explain_end(None, self._process.stderr_text()[-_SHOWN_OUTPUT:], self._where)

    def _refusal(self, reason: str) -> NodeNotReady:
        stderr = self._process.stderr_text()[-_SHOWN_OUTPUT:]
        return NodeNotReady(
            f"The agent did not start on {self._where}: {reason}{_quoted(stderr)}",
            "Update that PC's python3: sudo apt-get install --only-upgrade python3",
        )


def explain_failure(step: str, detail: str, where: str) -> NodeNotReady:
    """Return the error for the step at which the script failed, with the system's own message."""
    if step == "tool":
        package = {"python3": "python3"}.get(detail, "coreutils")
        return NodeNotReady(
            f"There is no {detail} on {where}",
            f"Install it on that PC: sudo apt-get install {package}",
        )
    if step == "hash":
        return NodeNotReady(
            f"The agent arrived damaged on {where}",
            "Try again; if it happens again, check that PC's memory and disk",
        )
    if step in _UNSAFE_FOLDERS:
        problem, hint = _UNSAFE_FOLDERS[step]
        return NodeNotReady(
            f"The agent's folder {detail} on {where} {problem}, so nothing in it is run",
            hint.format(folder=posix_command(detail)),
        )
    if "No space left" in detail or "quota" in detail.lower():
        return NodeNotReady(
            f"The disk on {where} is full: the agent could not be stored in {AGENT_FOLDER}",
            "Free some space there, or delete small files if only inodes are used up; these show "
            "it: df -h ~; df -i ~",
        )
    if "Read-only" in detail or "Permission denied" in detail:
        return NodeNotReady(
            f"The home folder on {where} cannot be written: {detail}",
            f"Give the user that we log in as the right to write to {AGENT_FOLDER}; "
            "this shows how the disk is mounted: findmnt -T ~",
        )
    return NodeNotReady(
        f"The agent could not be stored in {AGENT_FOLDER} on {where}: {detail}",
        f"Check that folder there: ls -la {AGENT_FOLDER}",
    )


def explain_end(code: int | None, output: str, where: str) -> NodeNotReady:
    """Return the error for a command that ended before the agent's hello."""
    if "WSL_E_DISTRO_NOT_FOUND" in output:
        return NodeNotReady(
            f"{where}: this PC has no WSL distro of that name", "List their names: wsl --list"
        )
    if code == 127 and "python3" in output:
        return explain_failure("tool", "python3", where)
    status = "" if code is None else f" with exit code {code}"
    return NodeNotReady(
        f"The command on {where} ended{status} before the agent started{_quoted(output)}",
        "Make sure that the user may run commands there: its login shell must not be nologin, and "
        "~/.bashrc must not end the shell",
    )


def _quoted(output: str) -> str:
    return f". Its last output: {output}" if output else ""
