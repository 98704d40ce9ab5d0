"""Replace a text file as an administrator, atomically and with its mode and owner.

The new text is written to a file in the same folder, which is renamed over the old one. All steps
are ordinary commands, so that sudo logs them and an administrator can read what was run.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agents.contract.repair import ABSENT, MAX_EDITED_BYTES, QUICK_STEP_S
from agents.errors import ExpectedError, explain_os_error
from agents.node.administrator import Administrator
from agents.state import Home, write_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class FileState:
    """Text, mode and owner of a file."""

    text: str | None
    """Text, or None if the file does not exist."""
    mode: int | None = None
    owner: int = 0
    group: int = 0

    @property
    def sha256(self) -> str:
        """Hash of the text, or ABSENT if the file does not exist."""
        return ABSENT if self.text is None else hash_text(self.text)


def hash_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


class HiddenFile(ExpectedError):
    """Raised when only an administrator can read a file."""


def read_file(path: str, admin: Administrator | None) -> FileState:
    """Return the current state of a file.

    Args:
        path: path with links resolved.
        admin: reader of files that this user may not read, or None.

    Raises:
        HiddenFile: this user may not read it, and `admin` is None.
        ExpectedError: it cannot be read, is not text, or is too large.
    """
    try:
        return _read_as_user(path)
    except FileNotFoundError:
        return FileState(text=None)
    except PermissionError as error:
        if admin is None:
            raise HiddenFile(f"Only an administrator can read {path}.") from error
    except OSError as error:
        raise explain_os_error(error, f"reading {path}") from error
    return _read_as_root(path, admin)


def write_file(
    path: str,
    state: FileState,
    before: FileState,
    admin: Administrator,
    home: Home,
    *,
    as_root: bool,
) -> None:
    """Give a file the text, mode and owner of `state`; a text of None removes it.

    Args:
        path: path with links resolved.
        state: new state.
        before: expected current state.
        admin: runner of the commands.
        home: home of the agent, for the draft.
        as_root: True if the file needs administrator rights.

    Raises:
        ExpectedError: the file has changed since, or cannot be written; it is unchanged then.
    """
    if state.text is None:
        _require_same(path, before, admin if as_root else None)
        _do(admin, ["rm", "-f", "--", path], as_root)
        return
    mark = secrets.token_hex(4)
    draft = home.path / f".edit.{mark}"
    # In the same folder, because a rename is atomic only within a file system.
    sibling = f"{os.path.dirname(path)}/.rackless.{mark}"
    mode, owner, group = f"{state.mode or 0o644:o}", str(state.owner), str(state.group)
    # A private draft, because the text would be visible to other users as an argument.
    write_bytes(draft, state.text.encode("utf-8"))
    try:
        _do(
            admin,
            ["install", "-m", mode, "-o", owner, "-g", group, "--", str(draft), sibling],
            as_root,
        )
        try:
            _do(admin, ["sync", "--", sibling], as_root)
            # As late as possible: a change between this check and the rename would be lost.
            _require_same(path, before, admin if as_root else None)
            _do(admin, ["mv", "-f", "-T", "--", sibling, path], as_root)
        except BaseException:
            admin.run(["rm", "-f", "--", sibling], as_root=as_root, timeout_s=QUICK_STEP_S)
            raise
    finally:
        Path(draft).unlink(missing_ok=True)


def _require_same(path: str, before: FileState, admin: Administrator | None) -> None:
    if read_file(path, admin) != before:
        raise ExpectedError(
            f"{path} was changed by another program or user in the meantime; it was left alone.",
            "See what changed, then check again",
        )


def _do(admin: Administrator, argv: Sequence[str], as_root: bool) -> None:
    code, lines = admin.run(argv, as_root=as_root, timeout_s=QUICK_STEP_S)
    if code:
        said = admin.clean(lines[-1]) if lines else f"exit code {code}"
        raise ExpectedError(f"The file could not be written: {said}.")


def _read_as_user(path: str) -> FileState:
    # O_NONBLOCK: opening a named pipe in place of the file would otherwise wait forever.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        _require_plain(path, stat.S_ISREG(found.st_mode), found.st_size)
        # One byte more than allowed, in case the file has grown since fstat.
        data = os.read(file, MAX_EDITED_BYTES + 1)
    finally:
        os.close(file)
    return FileState(
        text=_decode(path, data),
        mode=stat.S_IMODE(found.st_mode),
        owner=found.st_uid,
        group=found.st_gid,
    )


def _read_as_root(path: str, admin: Administrator) -> FileState:
    code, lines = admin.run(
        ["stat", "-c", "%f %s %u %g", "--", path], as_root=True, timeout_s=QUICK_STEP_S
    )
    if code:
        # stat has one exit code for all errors; the locale is English.
        if lines and "No such file" in lines[-1]:
            return FileState(text=None)
        said = admin.clean(lines[-1]) if lines else f"exit code {code}"
        raise ExpectedError(f"{path} cannot be read: {said}.")
    # %f is the raw mode in hexadecimal, with the type of the file.
    raw_mode, size, owner, group = lines[-1].split()
    _require_plain(path, stat.S_ISREG(int(raw_mode, 16)), int(size))
    # base64, because output is split into decoded lines, which would lose line ends and bytes.
    coded: list[str] = []
    code, lines = admin.run(
        ["base64", "--", path], as_root=True, timeout_s=QUICK_STEP_S, on_line=coded.append
    )
    try:
        data = base64.b64decode("".join(coded), validate=True)
    except binascii.Error as error:
        raise ExpectedError(f"{path} cannot be read: {admin.clean(coded[-1])}.") from error
    return FileState(
        text=_decode(path, data),
        mode=stat.S_IMODE(int(raw_mode, 16)),
        owner=int(owner),
        group=int(group),
    )


def _require_plain(path: str, is_file: bool, size: int) -> None:
    if not is_file:
        raise ExpectedError(f"{path} is not a file.", "See what it is: ls -ld " + path)
    if size > MAX_EDITED_BYTES:
        raise ExpectedError(
            f"{path} has {size} bytes; at most {MAX_EDITED_BYTES} are edited.", "Edit it on that PC"
        )


def _decode(path: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ExpectedError(f"{path} is not text in UTF-8.", "Edit it on that PC") from error
