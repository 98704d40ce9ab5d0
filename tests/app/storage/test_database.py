"""The database opens safely: whatever lies there, nothing is lost and nobody is locked out."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from app.errors import StoreLost, UserError
from app.storage import database as database_module
from app.storage.database import SAFE_WAL_VERSION, Database, open_database
from app.storage.migrations import MIGRATIONS

WRITER = """
import sys, time
from pathlib import Path
from app.storage.database import open_database
database = open_database(Path(sys.argv[1]))
for number in range(int(sys.argv[3])):
    with database.write() as connection:
        connection.execute("INSERT INTO facts VALUES (?, ?)", (f"{sys.argv[2]}-{number}", "x"))
    time.sleep(0.001)  # SQLite's lock is not fair: a writer without a pause starves readers
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "rackless.sqlite3"


def pragma(path: Path, name: str) -> object:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(f"PRAGMA {name}").fetchone()[0]
    finally:
        connection.close()


def test_new_database_has_the_newest_schema_and_private_folder(path: Path) -> None:
    filled: list[Database] = []
    database = open_database(path, filled.append)
    assert filled == [database]
    database.close()
    assert pragma(path, "user_version") == len(MIGRATIONS)
    assert path.parent.stat().st_mode & 0o077 == 0
    open_database(path, filled.append).close()
    assert filled == [database]


def test_journal_mode_follows_the_library_version(path: Path) -> None:
    database = open_database(path)
    safe = sqlite3.sqlite_version_info >= SAFE_WAL_VERSION
    assert database.read("PRAGMA journal_mode") == [("wal" if safe else "delete",)]
    assert database.read("PRAGMA synchronous") == [(2 if safe else 3,)]
    assert database.read("PRAGMA foreign_keys") == [(1,)]


def test_old_library_leaves_wal_mode_behind(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_database(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.close()
    monkeypatch.setattr(database_module, "SAFE_WAL_VERSION", (99, 0, 0))
    assert open_database(path).read("PRAGMA journal_mode") == [("delete",)]


@pytest.mark.parametrize("damage", ["text", "truncate", "flip"])
def test_damaged_file_is_moved_aside_and_a_new_one_made(path: Path, damage: str) -> None:
    database = open_database(path)
    with database.write() as connection:
        rows = [(f"key-{n}", "v" * 500) for n in range(200)]
        connection.executemany("INSERT INTO facts VALUES (?, ?)", rows)
    database.close()
    before = path.read_bytes()
    after = {
        "text": b"this is no database at all, but long enough to be read as one" * 20,
        "truncate": before[: len(before) // 2],
        "flip": before[:4096] + bytes(b ^ 0xFF for b in before[4096:]),
    }[damage]
    path.write_bytes(after)

    filled: list[Database] = []
    database = open_database(path, filled.append)

    assert filled == [database]
    assert database.read("SELECT * FROM facts WHERE key != 'filled'") == []
    assert "damaged" in database.notice
    kept = [file for file in path.parent.iterdir() if ".damaged-" in file.name]
    assert [file.read_bytes() for file in kept] == [after]


def test_two_damaged_files_in_one_second_are_both_kept(path: Path) -> None:
    path.parent.mkdir()
    for content in (b"first" * 300, b"second" * 300):
        path.write_bytes(content)
        open_database(path).close()
    kept = {file.read_bytes() for file in path.parent.glob("*.damaged-*")}
    assert kept == {b"first" * 300, b"second" * 300}


def test_newer_schema_is_refused_and_not_touched(path: Path) -> None:
    open_database(path).close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(UserError, match="written by a newer Rackless") as refused:
        open_database(path)
    assert "Install the newer version" in refused.value.hint
    assert path.read_bytes() == before


def test_migration_backs_up_first_and_keeps_the_rows(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = open_database(path)
    with database.write() as connection:
        connection.execute("INSERT INTO facts VALUES ('key', 'old')")
    database.close()
    added = (
        "CREATE TABLE later (x TEXT) STRICT",
        "INSERT INTO later SELECT value FROM facts WHERE key = 'key'",
    )
    monkeypatch.setattr(database_module, "MIGRATIONS", (*MIGRATIONS, added))

    database = open_database(path)

    assert database.read("SELECT x FROM later") == [("old",)]
    backup = path.with_name(f"{path.name}.schema-{len(MIGRATIONS)}")
    assert pragma(backup, "user_version") == len(MIGRATIONS)
    assert str(backup) in database.notice
    database.close()
    assert not open_database(path).notice, "said once"


@pytest.mark.parametrize("broken_at", [0, 1])
def test_migration_that_breaks_off_changes_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, broken_at: int
) -> None:
    open_database(path).close()
    step = ["CREATE TABLE later (x TEXT) STRICT", "CREATE INDEX i ON later (x)"]
    step[broken_at] = "CREATE NONSENSE"
    monkeypatch.setattr(database_module, "MIGRATIONS", (*MIGRATIONS, tuple(step)))
    with pytest.raises(UserError):
        open_database(path)
    monkeypatch.undo()
    filled: list[Database] = []
    database = open_database(path, filled.append)
    assert filled == []
    assert database.read("SELECT name FROM sqlite_master WHERE name = 'later'") == []


def test_write_is_all_or_nothing(path: Path) -> None:
    database = open_database(path)
    statements = ("INSERT INTO facts VALUES ('a', 'b')", "INSERT INTO nowhere VALUES (1)")
    with pytest.raises(UserError), database.write() as connection:
        [connection.execute(statement) for statement in statements]
    assert database.read("SELECT * FROM facts WHERE key != 'filled'") == []


def test_transaction_that_sqlite_ended_by_itself_hides_no_reason(path: Path) -> None:
    database = open_database(path)

    def fill_the_disk(connection: sqlite3.Connection) -> None:
        connection.execute("ROLLBACK")  # as SQLite does where a page could not be written
        raise sqlite3.OperationalError("database or disk is full")

    with pytest.raises(UserError, match="disk is full"), database.write() as connection:
        fill_the_disk(connection)


def test_a_full_disk_is_named_alone(path: Path) -> None:
    database = open_database(path)
    database._connection.execute("PRAGMA max_page_count = 1")  # no more than there are
    with pytest.raises(UserError) as refused, database.write() as connection:
        connection.execute("CREATE TABLE more (text)")
    assert refused.value.message == f"The disk of this PC is full: {path} cannot be written."
    assert refused.value.hint == f"Free some space on the disk with {path.parent}."


def test_commit_that_fails_leaves_no_transaction_open(path: Path) -> None:
    database = open_database(path)
    reader = sqlite3.connect(path)
    database._connection.execute("PRAGMA busy_timeout = 1")
    database._connection.execute("PRAGMA journal_mode = delete")
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM facts").fetchone()
    with pytest.raises(UserError, match="locked"), database.write() as connection:
        connection.execute("INSERT INTO facts VALUES ('late', 'x')")
    reader.close()
    with database.write() as connection:
        connection.execute("INSERT INTO facts VALUES ('later', 'x')")
    assert database.read("SELECT key FROM facts WHERE key LIKE 'late%'") == [("later",)]


def test_two_processes_write_at_once_and_lose_nothing(path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), name, "40"])
        for name in ("first", "second")
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    database = open_database(path)
    assert database.read("SELECT count(*) FROM facts WHERE key != 'filled'") == [(80,)]
    assert not database.notice


def test_killed_writer_leaves_whole_transactions(path: Path) -> None:
    open_database(path).close()
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path), "w", "100000"])
    database = open_database(path)
    while database.read("SELECT count(*) FROM facts")[0][0] < 5:
        assert writer.poll() is None
    writer.kill()
    writer.wait()
    database = open_database(path)
    assert not database.notice
    assert database.read("SELECT count(*) FROM facts")[0][0] >= 5


def test_version_of_data_rises_when_another_connection_writes(path: Path) -> None:
    ours, other = open_database(path), open_database(path)
    before = ours.version_of_data()
    with ours.write() as connection:
        connection.execute("INSERT INTO facts VALUES ('mine', '')")
    assert ours.version_of_data() == before
    with other.write() as connection:
        connection.execute("INSERT INTO facts VALUES ('theirs', '')")
    assert ours.version_of_data() != before


def test_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be used") as refused:
        open_database(tmp_path / "file" / "rackless.sqlite3")
    assert "RACKLESS_HOME" in refused.value.hint


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot be used"):
        open_database(tmp_path / "home" / "rackless.sqlite3")


def test_nobody_sees_a_new_file_before_it_is_filled(path: Path) -> None:
    begun, found = threading.Event(), []

    def fill(database: Database) -> None:
        begun.set()
        time.sleep(0.3)
        with database.write() as connection:
            connection.execute("INSERT INTO facts VALUES ('nodes', 'alpha')")

    def look() -> None:
        begun.wait()
        database = open_database(path, fill)
        found.extend(database.read("SELECT value FROM facts WHERE key = 'nodes'"))
        database.close()

    other = threading.Thread(target=look)
    other.start()
    open_database(path, fill).close()
    other.join()
    assert found == [("alpha",)]


def test_filling_that_was_broken_off_is_done_again(path: Path) -> None:
    filled = []

    def break_off(database: Database) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_database(path, break_off)
    for _ in range(2):
        open_database(path, filled.append).close()
    assert len(filled) == 1


# ---------------------------------------------------------------- told, never silently empty


def test_an_empty_file_is_told_and_kept(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    filled: list[Database] = []
    database = open_database(path, filled.append)
    assert "it is empty: 0 bytes" in database.notice
    assert filled == [database]
    assert len(list(path.parent.glob("*.damaged-*"))) == 1


@pytest.mark.parametrize("trace", ["nodes.json", "runs/r-1"])
def test_a_missing_file_of_a_used_home_is_told(path: Path, trace: str) -> None:
    (path.parent / trace).mkdir(parents=True)
    assert "was missing" in open_database(path).notice
    assert open_database(path).notice == "", "once"


def test_a_new_home_has_nothing_to_tell(path: Path) -> None:
    assert open_database(path).notice == ""


def test_the_database_of_another_program_is_not_written_to(path: Path) -> None:
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.commit()
    connection.close()
    before = path.read_bytes()
    assert "of another program" in open_database(path).notice
    (kept,) = path.parent.glob("*.damaged-*")
    assert kept.read_bytes() == before


# ---------------------------------------------------------------- lost while it is open


def lose(path: Path, how: str) -> None:
    if how == "deleted":
        path.unlink()
    elif how == "moved home":
        path.parent.rename(path.parent.with_name("elsewhere"))
    elif how == "replaced":
        other = path.with_name("other")
        open_database(other).close()
        other.replace(path)
    elif how == "damaged":
        with open(path, "r+b") as file:
            file.seek(4096)
            file.write(os.urandom(16384))
    elif how == "no database":
        path.write_bytes(b"no database " * 4096)
    else:
        os.truncate(path, 0)


LOSSES = ["deleted", "moved home", "replaced", "damaged", "no database", "emptied"]


@pytest.mark.parametrize("how", LOSSES)
def test_a_store_that_is_lost_while_it_is_open_is_noticed(path: Path, how: str) -> None:
    database = open_database(path)
    database.require_intact()
    lose(path, how)
    with pytest.raises(StoreLost) as lost:
        database.require_intact()
    assert str(path) in lost.value.message
    assert "Start it again" in lost.value.hint
    database.close()


def test_a_store_that_is_busy_is_not_lost(path: Path) -> None:
    database, other = open_database(path), sqlite3.connect(path)
    other.execute("BEGIN EXCLUSIVE")
    database.require_present()
    database.require_intact()
    other.close()
    database.close()


def test_a_query_of_a_damaged_file_names_the_loss(path: Path) -> None:
    database = open_database(path)
    connection = sqlite3.connect(path)
    connection.execute("INSERT INTO facts VALUES ('a', 'b')")
    connection.commit()  # so that the first one forgets its cached pages
    connection.close()
    lose(path, "damaged")
    with pytest.raises(StoreLost, match="was damaged while this process used it"):
        read_all(database)
    database.close()


def read_all(database: Database) -> None:
    for table in ("facts", "runs", "attempts", "nodes", "deleted_runs"):
        database.read(f"SELECT * FROM {table}")


def test_a_file_that_was_moved_is_neither_read_nor_written(path: Path) -> None:
    """SQLite would take the journal of the new database for that of the moved file."""
    database = open_database(path)
    path.rename(path.with_name("elsewhere"))
    open_database(path).close()
    with pytest.raises(StoreLost, match="was replaced"):
        database.read("SELECT * FROM facts")
    with pytest.raises(StoreLost, match="was replaced"), database.write():
        pass
    database.close()
