"""Open the database safely: verify its settings, move damaged files aside, migrate the schema.

A process that stays open also has to notice when its file is not the database any more: SQLite goes
on with a file that was moved or deleted, and another process then works on a new one.

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
from app.errors import StoreLost, UserError
from app.filelock import locked
from app.paths import open_private, private_folder
from app.storage.migrations import MIGRATIONS

# First release with the fix of the WAL-reset bug.
SAFE_WAL_VERSION = (3, 51, 3)
# Transactions of Rackless take milliseconds; a longer lock means a backup or a hung process.
BUSY_TIMEOUT_S = 10.0
_NEW_TRIES, _NEW_PAUSE_S = 4, 0.5
_RESTART = "Start it again: it then opens, or restores, the database at that place."
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
# The first byte of an extended code is the primary one.
_PRIMARY = 0xFF


class Database:
    """Connection to the file, usable from any thread, for one transaction at a time."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        # Reentrant, so that the block of `write` may call `read`.
        self._lock = threading.RLock()
        self._path = path
        self._file = _identify(path)
        self.notice = ""
        """Message for the user about the opening, such as a damaged file moved aside."""

    def read(self, sql: str, args: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        with self._lock, self._translate_errors():
            self.require_present()
            return self._connection.execute(sql, args).fetchall()

    @contextlib.contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Run the block as one durable transaction; roll it back if the block raises.

        Raises:
            UserError: another program keeps the file locked, or the disk is full.
        """
        with self._lock, self._translate_errors():
            self.require_present()
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

    def require_present(self) -> None:
        """Check that the opened file still lies at its path.

        Done before each use: SQLite finds a journal by the path alone, so this process would apply
        that of a new database to the file that was moved, and delete it.

        Raises:
            StoreLost: it was moved, deleted or replaced.
        """
        found = _identify(self._path)
        if found is None:
            raise StoreLost(
                f"{self._path} was moved or deleted while this process used it",
                f"{_RESTART} If you moved the folder, set RACKLESS_HOME to its new place.",
                where=str(self._path),
            )
        if found != self._file:
            raise StoreLost(
                f"{self._path} was replaced by another file while this process used it",
                _RESTART,
                where=str(self._path),
            )

    def require_intact(self) -> None:
        """Read the whole file through a connection of its own, which has nothing cached.

        Raises:
            StoreLost: it is damaged, or no database of this version any more.
        """
        self.require_present()
        try:
            with contextlib.closing(
                sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True)
            ) as fresh:
                _check_health(fresh)
                schema = int(fresh.execute("PRAGMA user_version").fetchone()[0])
        except sqlite3.OperationalError:
            return  # it is busy, which says nothing about damage
        except sqlite3.DatabaseError as error:
            raise _lost(self._path, error) from error
        if schema != len(MIGRATIONS):
            raise _lost(self._path, sqlite3.DatabaseError("it was emptied or converted"))

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            if _is_damage(error):
                raise _lost(self._path, error) from error
            if not isinstance(error, sqlite3.OperationalError):
                raise
            self.require_present()  # SQLite calls a moved file read-only
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
    is_missing = not path.exists()
    try:
        if not is_missing and path.stat().st_size == 0:
            raise sqlite3.DatabaseError("it is empty: 0 bytes")
        database = _open(path)
        if is_missing and (traces := _find_traces(path)):
            database.notice = (
                f"{path} was missing, although {traces} is there, so a new one was created; "
                "runs are found again on their nodes. If you have a copy of the old one, end all "
                "Rackless processes and put it there."
            )
        return database
    # Before DatabaseError, its base class: a locked file or a full disk is no damage.
    except sqlite3.OperationalError as error:
        raise _as_user_error(error, path) from error
    except sqlite3.DatabaseError as error:
        moved_to = _move_aside(path)
        database = _open_new(path)
        database.notice = (
            f"{path} was damaged ({error}) and is now {moved_to.name}. "
            "A new one was created; runs are found again on their nodes. Nothing to do, unless "
            "you have an intact copy."
        )
        return database


def _open_new(path: Path) -> Database:
    """Open a file in place of a damaged one, which another process may still use for a moment."""
    for _ in range(_NEW_TRIES):
        with contextlib.suppress(sqlite3.OperationalError):
            return _open(path)
        time.sleep(_NEW_PAUSE_S)
    return _open(path)


def _find_traces(path: Path) -> str:
    """Return a file or folder next to the database that shows that there was one, or ''."""
    runs, nodes = path.parent / "runs", path.parent / "nodes.json"
    if nodes.exists():
        return nodes.name
    return "runs" if runs.is_dir() and any(runs.iterdir()) else ""


def _identify(path: Path) -> tuple[int, int] | None:
    """Return device and number of a file, or None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(code, int) and code & _PRIMARY in _DAMAGE


def _lost(path: Path, error: sqlite3.DatabaseError) -> StoreLost:
    return StoreLost(
        f"{path} was damaged while this process used it: {error}", _RESTART, where=str(path)
    )


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
    if schema == 0 and connection.execute("SELECT 1 FROM sqlite_schema").fetchone():
        raise sqlite3.DatabaseError("it is the database of another program")
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
