"""Files arrive whole or not at all, never outside their place, and are not sent twice."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.contract.run import FileEntry
from agents.contract.wire import to_wire
from agents.errors import ExpectedError
from agents.node.file_store import FileStore
from agents.node.files import (
    job_folder,
    read_bundle_status,
    receive,
    remove_abandoned,
    remove_half_made,
    remove_job_folders,
    send,
    split_destination,
    split_path,
)
from agents.state import Home
from tests.agents.small_disk import fill, small_disk

REPOSITORY = Path(__file__).parents[3]
CONTENTS = {"config.json": b"{}", "weights/part-1.bin": b"\x01" * 300_000, "empty": b""}
HOSTILE_NAMES = [
    "../escape",
    "a/../../escape",
    "/etc/passwd",
    "",
    ".",
    "..",
    "a//b",
    "a/",
    "/",
    "a/./b",
    "a\0b",
    "a\nb",
    "a\\..\\b",
    "C:\\x",
    ".partial-x",
    ".half-1",
    "x" * 300,
    "/".join(["d"] * 600),
    "\ud800",
]


def entry(name: str, data: bytes) -> FileEntry:
    return FileEntry(path=name, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


ENTRIES = tuple(entry(name, data) for name, data in CONTENTS.items())


def stream(
    contents: dict[str, bytes], manifest: tuple[FileEntry, ...] = ENTRIES, **header: Any
) -> io.BytesIO:
    files = [entry(name, data) for name, data in contents.items()]
    line = json.dumps({"files": to_wire(files), "manifest": to_wire(manifest), **header})
    return io.BytesIO(line.encode() + b"\n" + b"".join(contents.values()))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def home(tmp_path: Path) -> Home:
    (tmp_path / "home").mkdir()
    return Home(tmp_path / "home")


def test_bundle_arrives_whole_under_its_name(home: Home) -> None:
    path = receive(home, "models/tiny-01", stream(CONTENTS))
    assert path == str(home.path / "models" / "tiny-01")
    assert snapshot(home.path / "models") == {
        f"tiny-01/{name}": data for name, data in CONTENTS.items()
    }
    assert {p.name for p in home.path.iterdir()} == {"models", "store"}
    status = read_bundle_status(home, "models/tiny-01", ENTRIES)
    assert status.complete
    assert status.missing == ()
    assert os.stat(path).st_mode & 0o077 == 0


def test_nothing_there_yet_means_all_missing(home: Home) -> None:
    status = read_bundle_status(home, "data/x", ENTRIES)
    assert not status.complete
    assert status.missing == tuple(CONTENTS)


@pytest.mark.parametrize("kept_bytes", [0, 1, 2, 1000, 300_001])
def test_broken_off_transfer_goes_on_by_file(home: Home, kept_bytes: int) -> None:
    source = stream(CONTENTS)
    line = source.readline()
    cut = io.BytesIO(line + source.read(kept_bytes))
    with pytest.raises(ExpectedError) as caught:
        receive(home, "models/tiny", cut)
    assert "The transfer broke off in " in caught.value.message
    assert not (home.path / "models" / "tiny").exists()
    status = read_bundle_status(home, "models/tiny", ENTRIES)
    assert not status.complete
    finished = [e.path for e in ENTRIES if e.path not in status.missing]
    assert finished == (["config.json"] if kept_bytes >= 2 else [])
    assert all(".half-" not in name for name in snapshot(home.path))
    receive(home, "models/tiny", stream({name: CONTENTS[name] for name in status.missing}))
    assert snapshot(home.path / "models") == {f"tiny/{n}": data for n, data in CONTENTS.items()}


def test_damaged_file_is_refused(home: Home) -> None:
    source = stream(CONTENTS)
    data = bytearray(source.getvalue())
    data[-5] ^= 1
    with pytest.raises(ExpectedError, match=r"weights/part-1.bin arrived damaged"):
        receive(home, "models/tiny", io.BytesIO(bytes(data)))
    assert read_bundle_status(home, "models/tiny", ENTRIES).missing == (
        "weights/part-1.bin",
        "empty",
    )


def test_file_of_another_size_counts_as_missing(home: Home) -> None:
    receive(home, "data/x", stream({"a": b"12345"}, (entry("a", b"12345"),)))
    status = read_bundle_status(home, "data/x", (entry("a", b"123456"),))
    assert status.missing == ("a",)
    assert not status.complete


def test_a_file_deleted_from_a_finished_bundle_is_placed_again_without_sending(home: Home) -> None:
    receive(home, "models/tiny", stream(CONTENTS))
    (home.path / "models/tiny/config.json").unlink()
    status = read_bundle_status(home, "models/tiny", ENTRIES)
    assert (status.complete, status.missing) == (False, ())
    receive(home, "models/tiny", stream({}))
    assert read_bundle_status(home, "models/tiny", ENTRIES).complete


def test_what_is_here_under_another_name_is_not_sent_and_kept_once(home: Home) -> None:
    receive(home, "models/tiny", stream(CONTENTS))
    renamed = {f"sub/{name}": data for name, data in CONTENTS.items()}
    manifest = tuple(entry(name, data) for name, data in renamed.items())
    assert read_bundle_status(home, "models/other", manifest).missing == ()
    receive(home, "models/other", stream({}, manifest))
    assert snapshot(home.path / "models/other") == renamed
    one, other = (home.path / f"models/{n}/weights/part-1.bin" for n in ("tiny", "other/sub"))
    assert one.samefile(other)
    # What somebody wrote into in the meantime is not handed on under its old name.
    one.chmod(0o600)
    one.write_bytes(b"\x02" * 300_000)
    assert read_bundle_status(home, "models/third", manifest).missing == ("sub/weights/part-1.bin",)


def test_files_of_runs_leave_the_store(home: Home) -> None:
    receive(home, "runs/r/checkpoints/step", stream(CONTENTS))
    assert not list(FileStore(home.path).files())
    receive(home, "models/tiny", stream(CONTENTS))
    (part,) = (e for e in ENTRIES if e.size_bytes == 300_000)
    assert FileStore(home.path).find(part.sha256, part.size_bytes)
    receive(home, "runs/r/checkpoints/other", stream({}))
    assert len(list(FileStore(home.path).files())) == len(ENTRIES)


def test_bundle_that_stays_incomplete_gets_no_name(home: Home) -> None:
    with pytest.raises(ExpectedError, match="2 files are missing, such as"):
        receive(home, "models/tiny", stream({"empty": b""}))
    assert not (home.path / "models" / "tiny").exists()


def test_receiving_twice_is_harmless(home: Home) -> None:
    receive(home, "models/tiny", stream(CONTENTS))
    receive(home, "models/tiny", stream(CONTENTS))
    assert snapshot(home.path / "models" / "tiny") == CONTENTS


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_hostile_file_names_are_refused_before_anything_is_written(home: Home, name: str) -> None:
    bad = {"path": name, "size_bytes": 1, "sha256": "0" * 64}
    for files, manifest in (([bad], []), ([], [bad])):
        source = io.BytesIO(json.dumps({"files": files, "manifest": manifest}).encode() + b"\nx")
        with pytest.raises(ExpectedError, match="The file name"):
            receive(home, "models/tiny", source)
    with pytest.raises(ExpectedError):
        read_bundle_status(
            home, "models/tiny", (FileEntry(path=name, size_bytes=1, sha256="0" * 64),)
        )
    assert list(home.path.parent.rglob("*")) == [home.path]


@pytest.mark.parametrize(
    "destination",
    [*HOSTILE_NAMES, "models", "agents/x", "environments/x", "telemetry/x", "models/../leases"],
)
def test_hostile_destinations_are_refused(home: Home, destination: str) -> None:
    with pytest.raises(ExpectedError):
        receive(home, destination, stream(CONTENTS))
    with pytest.raises(ExpectedError):
        read_bundle_status(home, destination, ENTRIES)
    with pytest.raises(ExpectedError):
        send(home, destination, io.BytesIO())
    assert list(home.path.parent.rglob("*")) == [home.path]


@pytest.mark.parametrize("place", ["models", "models/tiny", "models/.partial-tiny"])
def test_symlink_on_the_way_is_not_followed(home: Home, place: str) -> None:
    outside = home.path.parent / "outside"
    outside.mkdir()
    link = home.path / place
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(outside)
    with pytest.raises(ExpectedError):
        receive(home, "models/tiny", stream(CONTENTS))
    assert snapshot(outside) == {}


def test_symlink_inside_a_bundle_is_not_followed(home: Home) -> None:
    outside = home.path.parent / "outside"
    outside.mkdir()
    inner = home.path / "models" / ".partial-tiny"
    inner.mkdir(parents=True)
    (inner / "weights").symlink_to(outside)
    (inner / "config.json").symlink_to(outside / "config.json")
    with pytest.raises(ExpectedError):
        receive(home, "models/tiny", stream(CONTENTS))
    assert snapshot(outside) == {}


def test_negative_size_is_refused(home: Home) -> None:
    bad = {"path": "a", "size_bytes": -1, "sha256": "0" * 64}
    with pytest.raises(ExpectedError, match="has a size of -1"):
        receive(home, "data/x", stream({}, (), files=[bad]))


@pytest.mark.parametrize("line", [b"", b"\n", b"{}\n", b"[]\n", b'{"files": 3, "manifest": []}\n'])
def test_header_that_says_nothing_is_refused(home: Home, line: bytes) -> None:
    with pytest.raises(ExpectedError, match="The transfer cannot be read"):
        receive(home, "data/x", io.BytesIO(line))


def test_more_than_the_disk_holds_is_refused_before_the_first_byte(home: Home) -> None:
    huge = {"path": "a", "size_bytes": 1 << 60, "sha256": "0" * 64}
    with pytest.raises(ExpectedError, match="The disk of this node is too full"):
        receive(home, "data/x", stream({}, (), files=[huge]))
    assert list(home.path.iterdir()) == []


def test_disk_that_fills_up_removes_the_half_file(tmp_path: Path, monkeypatch: Any) -> None:
    with small_disk(tmp_path / "small", 1 << 20) as disk:
        home = Home(disk / "home")
        home.path.mkdir()
        fill(disk, leave_bytes=100_000)
        monkeypatch.setattr("agents.node.files._require_room", lambda home, coming: None)
        with pytest.raises(ExpectedError) as caught:
            receive(home, "models/tiny", stream(CONTENTS))
        assert caught.value.message == "The disk is full: storing weights/part-1.bin."
        assert caught.value.hint == "Free some space on this node and try again"
        left = [name for name in snapshot(home.path / "models") if ".lock" not in name]
        assert left == [".partial-tiny/config.json"]


def test_send_brings_back_what_came(home: Home, tmp_path: Path) -> None:
    receive(home, "models/tiny", stream(CONTENTS))
    out = io.BytesIO()
    send(home, "models/tiny", out)
    out.seek(0)
    header = json.loads(out.readline())
    assert {e["path"] for e in header["files"]} == set(CONTENTS)
    for item in header["files"]:
        data = out.read(item["size_bytes"])
        assert data == CONTENTS[item["path"]]
        assert hashlib.sha256(data).hexdigest() == item["sha256"]
    assert out.read() == b""


def test_one_file_can_be_sent(home: Home) -> None:
    receive(home, "models/tiny", stream(CONTENTS))
    out = io.BytesIO()
    send(home, "models/tiny/config.json", out)
    assert out.getvalue().endswith(b"\n{}")
    assert json.loads(out.getvalue().split(b"\n")[0])["files"][0]["path"] == "config.json"


def test_send_follows_no_symlink(home: Home) -> None:
    (home.path / "models").mkdir()
    (home.path / "models" / "out").symlink_to("/etc")
    with pytest.raises(ExpectedError, match="is a symbolic link"):
        send(home, "models/out", io.BytesIO())
    (home.path / "models" / "tiny").mkdir()
    (home.path / "models" / "tiny" / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(ExpectedError, match=r"tiny/passwd leads out of .*, to /etc/passwd"):
        send(home, "models/tiny", io.BytesIO())


def test_command_prints_one_line_and_an_exit_code(home: Home) -> None:
    environ = {**os.environ, "RACKLESS_AGENT_HOME": str(home.path), "PYTHONPATH": str(REPOSITORY)}

    def run(*arguments: str, data: bytes = b"") -> tuple[int, bytes]:
        command = [sys.executable, "-m", "agents", *arguments]
        done = subprocess.run(command, input=data, capture_output=True, env=environ, check=False)
        return done.returncode, done.stdout

    code, output = run("receive", "models/tiny", data=stream(CONTENTS).getvalue())
    assert code == 0
    assert json.loads(output) == {"ok": True, "path": str(home.path / "models" / "tiny")}
    code, output = run("receive", "models/../x", data=stream(CONTENTS).getvalue())
    assert code == 1
    assert json.loads(output)["ok"] is False
    assert "models/../x" in json.loads(output)["message"]
    code, output = run("send", "models/tiny")
    assert code == 0
    assert output.endswith(b"".join(CONTENTS[name] for name in sorted(CONTENTS)))
    code, output = run("send", "models/none")
    assert code == 1
    assert "There is nothing to send" in json.loads(output)["message"]
    assert run("dance")[0] == 2


def test_what_a_killed_job_left_beside_exports_goes_and_all_else_stays(home: Home) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    exports = home.runs / "run-1" / "exports"
    left = (".partial-nf4-8", ".partial-.reference-merged-8-ab", ".deleted-nf4-8")
    stays = (f".partial-awq-8-{os.getpid()}", "nf4-8", f".partial-come-{ended.pid}", ".partial-8")
    for sweep in (lambda: remove_abandoned(exports / "gguf-8"), lambda: remove_half_made(home)):
        for name in (*stays, *(f"{name}-{ended.pid}" for name in left)):
            (exports / name / "inner").mkdir(parents=True, exist_ok=True)
        (exports / f".partial-come-{ended.pid}.lock").touch()  # a bundle, of which more will come
        sweep()
        names = {path.name for path in exports.iterdir() if path.is_dir()}
        assert names == set(stays)


def test_a_jobs_folder_is_kept_as_long_as_its_agent_lives(home: Home) -> None:
    with job_folder(home) as folder:
        (folder / "job.json").touch()
        dead = folder.with_name(f".job-x-{1 << 30}")
        dead.mkdir()
        remove_job_folders(home)
        assert list(home.path.iterdir()) == [folder]
    assert list(home.path.iterdir()) == []


@given(st.text(max_size=40))
def test_allowed_path_never_leaves_its_folder(text: str) -> None:
    try:
        parts = split_path(text, "The file name")
    except ExpectedError:
        return
    resolved = os.path.normpath(os.path.join("/root/of/it", *parts))
    assert resolved.startswith("/root/of/it/")
    assert "/".join(parts) == text


@given(st.text(max_size=40))
def test_allowed_destination_is_below_a_root(text: str) -> None:
    try:
        parts = split_destination(text)
    except ExpectedError:
        return
    assert parts[0] in ("models", "data", "runs")
    assert len(parts) > 1
