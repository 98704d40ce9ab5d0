"""Each file of a node is there once; what was altered is not handed on; deleting frees the disk."""

from __future__ import annotations

import errno
import hashlib
import io
import os
from pathlib import Path

import pytest

from agents.contract.chunks import CHUNK_BYTES, ChunkedFile, hash_chunks, list_chunks
from agents.contract.wire import WireError
from agents.node.file_store import FileStore
from tests.draws import random_bytes

DATA = b"weights" * 1000
SHA256 = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path)


def arrive(store: FileStore, data: bytes = DATA) -> ChunkedFile:
    file = hash_chunks(io.BytesIO(data))
    store.partial(file.sha256).write_bytes(data)
    store.take_partial(file)
    return file


def place(store: FileStore, folder: Path, name: str, sha256: str = SHA256) -> Path:
    folder.mkdir(exist_ok=True)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        store.place(sha256, name, handle)
    finally:
        os.close(handle)
    return folder / name


def test_a_file_has_one_content_whatever_its_names_and_is_listed(
    store: FileStore, tmp_path: Path
) -> None:
    arrive(store)
    one, two = place(store, tmp_path / "a", "x"), place(store, tmp_path / "b", "y")
    assert one.samefile(two)
    assert one.read_bytes() == DATA
    assert one.stat().st_mode & 0o777 == 0o400
    (found,) = store.files()
    assert (found.sha256, found.size_bytes, found.references) == (SHA256, len(DATA), 2)
    assert abs(found.used_s - one.stat().st_atime) < 1
    assert store.find(SHA256, len(DATA) + 1) is None


def test_an_altered_file_is_found_by_its_time_and_hashed_before_it_is_used(
    store: FileStore, tmp_path: Path
) -> None:
    arrive(store)
    one = place(store, tmp_path / "a", "x")
    os.utime(one)  # touched only: it is hashed, and kept
    assert store.find(SHA256, len(DATA)) is not None
    one.chmod(0o600)
    one.write_bytes(DATA[::-1])
    assert store.find(SHA256, len(DATA)) is None
    assert not list(store.files())
    assert one.exists()  # it belongs to the folder


def test_deleting_frees_a_file_once_no_folder_has_it(store: FileStore, tmp_path: Path) -> None:
    arrive(store)
    one, two = place(store, tmp_path / "a", "x"), place(store, tmp_path / "b", "y")
    store.release(tmp_path / "a")  # the other folder still has it
    assert len(list(store.files())) == 1
    one.unlink()
    store.release(tmp_path / "b")
    assert not list(store.files())
    arrive(store)
    assert (store.delete(SHA256), store.delete(SHA256)) == (len(DATA), 0)
    assert two.read_bytes() == DATA


def test_a_copy_is_made_where_the_file_system_has_no_hard_links(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrive(store)

    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "link", refuse)
    made = place(store, tmp_path / "a", "x")
    assert made.read_bytes() == DATA
    assert not made.samefile(store.path(SHA256))
    assert store.adopt("a" * 64, made) is False


def test_chunks_are_remembered_and_a_hash_that_is_none_is_no_path(store: FileStore) -> None:
    data = random_bytes(CHUNK_BYTES) + b"end"
    file = arrive(store, data)
    assert store.chunks(file.sha256, file.size_bytes) == file
    assert store.chunks(file.sha256, CHUNK_BYTES) != file
    assert store.chunks("b" * 64, CHUNK_BYTES + 1) is None
    assert [(c.offset, c.size_bytes) for c in list_chunks([file])] == [
        (0, CHUNK_BYTES),
        (CHUNK_BYTES, 3),
    ]
    for name in ("../x", "", "A" * 64):
        with pytest.raises(WireError):
            store.find(name, 1)
