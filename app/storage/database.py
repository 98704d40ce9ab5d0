"""Open the database safely: verify its settings, move damaged files aside, migrate the schema.

The window and the command line may write at the same time. Below SQLite 3.51.3 two connections in
WAL mode can corrupt the file (the WAL-reset bug), so an older library gets the rollback journal
with `synchronous=EXTRA` instead; at the rate at which users start runs the cost is not measurable.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from agents.shared.files.full_disk import describe_full, removing_half
from app.errors import UserError
from app.filelock import locked
from app.paths import open_private, private_folder
from app.storage.migrations import MIGRATIONS

# First release with the fix of the WAL-reset bug.
SAFE_WAL_VERSION = (3, 51, 3)
# Transactions of Rackless take milliseconds; a longer lock means a backup or a hung process.
BUSY_TIMEOUT_S = 10.0


class Database:
    """Connection to the file, usable from any thread, for one transaction at a time."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        # Reentrant, so that the block of `write` may call `read`.
        self._lock = threading.RLock()
        self._path = path
        self.notice = ""
        """Message for the user about the opening, such as a damaged file moved aside."""

    def read(self, sql: str, args: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        with self._lock, self._translate_errors():
            return self._connection.execute(sql, args).fetchall()

    @contextlib.contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Run the block as one durable transaction; roll it back if the block raises.

        Raises:
            UserError: another program keeps the file locked, or the disk is full.
        """
        with self._lock, self._translate_errors():
            # IMMEDIATE takes the write lock now. A deferred transaction would read first, and its
            # write would fail with SQLITE_BUSY, without waiting, after a write by another process.
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                _roll_back(self._connection)
                raise

    def version_of_data(self) -> int:
        """Return a number that changes whenever another process writes."""
        return int(self.read("PRAGMA data_version")[0][0])

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise _as_user_error(error, self._path) from error


def open_database(path: Path, fill: Callable[[Database], None] = lambda database: None) -> Database:
    """Open, check and migrate the file; create it if missing; move it aside if damaged.

    Args:
        path: database file.
        fill: restores known data into a new file before another process sees it empty; it is
            repeated if a kill interrupted it.

    Raises:
        UserError: its folder cannot be written, or a newer version of Rackless wrote it.
    """
    try:
        private_folder(path.parent)
        # Only one process may move a damaged file aside or migrate the schema at a time.
        with locked(path.with_suffix(".lock")):
            database = _open_or_replace(path)
            if not database.read("SELECT 1 FROM facts WHERE key = 'filled'"):
                fill(database)
                with database.write() as connection:
                    connection.execute("INSERT INTO facts VALUES ('filled', '1')")
            return database
    except OSError as error:
        raise UserError(
            f"{path.parent} cannot be used for Rackless's own files: {error}.",
            "Free space or repair its permissions, or set RACKLESS_HOME to another folder.",
        ) from error


def _open_or_replace(path: Path) -> Database:
    try:
        return _open(path)
    # Before DatabaseError, its base class: a locked file or a full disk is no damage.
    except sqlite3.OperationalError as error:
        raise _as_user_error(error, path) from error
    except sqlite3.DatabaseError as error:
        moved_to = _move_aside(path)
        database = _open(path)
        database.notice = (
            f"{path} was damaged ({error}) and is now {moved_to.name}. "
            "A new one was created; runs are found again on their nodes."
        )
        return database


def _open(path: Path) -> Database:
    # Created before SQLite does, which would use the default mode; journals get the file's mode.
    open_private(path, "a").close()
    # isolation_level=None keeps Python from opening its own transactions in addition to `write`.
    # check_same_thread=False, since all threads share the connection, under a lock.
    connection = sqlite3.connect(
        path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    try:
        _configure(connection)
        database = Database(connection, path)
        backup = _migrate(connection, path)
        if backup is not None:
            database.notice = (
                f"{path.name} of an earlier version was converted; {backup} is a copy of the old "
                "file, which you can delete."
            )
        return database
    except BaseException:
        connection.close()
        raise


def _configure(connection: sqlite3.Connection) -> None:
    _check_health(connection)
    safe_wal = sqlite3.sqlite_version_info >= SAFE_WAL_VERSION
    settings = {
        "journal_mode": ("WAL", "wal") if safe_wal else ("DELETE", "delete"),
        "synchronous": ("FULL", 2) if safe_wal else ("EXTRA", 3),
        "foreign_keys": ("ON", 1),
    }
    for name, (value, expected) in settings.items():
        # SQLite silently ignores a pragma that it cannot apply, so the value is read back.
        connection.execute(f"PRAGMA {name} = {value}").fetchall()
        found = connection.execute(f"PRAGMA {name}").fetchone()[0]
        if found != expected:
            raise sqlite3.OperationalError(f"{name} is {found!r} instead of {expected!r}")


def _check_health(connection: sqlite3.Connection) -> None:
    # (1): the first problem is enough to move the file aside.
    problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if problem != "ok":
        raise sqlite3.DatabaseError(str(problem))
    if connection.execute("PRAGMA foreign_key_check").fetchone():
        raise sqlite3.DatabaseError("rows refer to missing rows")


def _migrate(connection: sqlite3.Connection, path: Path) -> Path | None:
    """Migrate the schema to this version; return the backup made before, or None.

    Raises:
        UserError: a newer version wrote the file.
    """
    schema = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if schema > len(MIGRATIONS):
        raise UserError(
            f"{path} was written by a newer Rackless (schema {schema}; this one knows "
            f"{len(MIGRATIONS)}). It was not touched.",
            "Install the newer version again, or set RACKLESS_HOME to another folder.",
        )
    backup = None
    if 0 < schema < len(MIGRATIONS):
        backup = path.with_name(f"{path.name}.schema-{schema}")
        _back_up(connection, backup)
    for step in range(schema, len(MIGRATIONS)):
        _apply(connection, step)
    return backup


def _apply(connection: sqlite3.Connection, step: int) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        for statement in MIGRATIONS[step]:
            connection.execute(statement)
        # Part of the transaction, so that a failed migration leaves the old version number.
        connection.execute(f"PRAGMA user_version = {step + 1}")
        _check_health(connection)
        connection.execute("COMMIT")
    except BaseException:
        _roll_back(connection)
        raise


def _roll_back(connection: sqlite3.Connection) -> None:
    """Roll back the transaction if it is still open."""
    # SQLite may have rolled it back itself, such as on a full disk.
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def _back_up(connection: sqlite3.Connection, path: Path) -> None:
    with removing_half(path):
        open_private(path, "a").close()
        copy = sqlite3.connect(path)
        try:
            # A plain copy of the file would miss the pages in the WAL.
            connection.backup(copy)
        finally:
            copy.close()


def _move_aside(path: Path) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    target = path.with_name(f"{path.name}.damaged-{stamp}")
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.damaged-{stamp}-{number}")
    path.replace(target)
    # SQLite would apply a remaining journal to the new file of the same name.
    for suffix in ("-journal", "-wal", "-shm"):
        journal = path.with_name(path.name + suffix)
        if journal.exists():
            journal.replace(target.with_name(target.name + suffix))
    return target


def _as_user_error(error: sqlite3.OperationalError, path: Path) -> UserError:
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        lack, advice = describe_full(path, f"on the disk with {path.parent}")
        lack = lack.replace("The disk", "The disk of this PC", 1)
        return UserError(f"{lack}: {path} cannot be written.", f"{advice}.")
    return UserError(
        f"{path} cannot be used: {error}.",
        "Close other programs that use it, free disk space, and check that the folder is writable "
        "and not on a network share.",
    )
