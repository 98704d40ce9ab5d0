"""Repairs applied to real files and commands: preview, apply, record, undo, and what is refused."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from agents.children import Children
from agents.contract.repair import (
    Change,
    FileEdit,
    Probe,
    RepairOrder,
    RepairStep,
    StepPreview,
    UndoOrder,
)
from agents.errors import ExpectedError
from agents.node import administrator, change_log, edited_file
from agents.node.administrator import Administrator
from agents.node.change_log import ChangeLog
from agents.node.repair import apply, preview, undo
from agents.state import Home
from tests.fakes.sudo import write_sudo

PASSWORD = "correct horse 7"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    (tmp_path / "home").mkdir()
    return Home(tmp_path / "home")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Folder of the files that repairs edit."""
    (tmp_path / "etc").mkdir()
    return tmp_path / "etc"


def us() -> Administrator:
    return Administrator(Children())


def user_with_sudo(
    monkeypatch: pytest.MonkeyPatch, folder: Path, typed: str = "", **sudo: Any
) -> Administrator:
    """Return an administrator who is no root and finds a fake sudo."""
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    bin_folder = write_sudo(folder / "bin", **sudo)
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    return Administrator(Children(), typed.encode())


def do(
    home: Home,
    *steps: RepairStep,
    shown: tuple[StepPreview, ...] = (),
    admin: Administrator | None = None,
) -> Change:
    expected = tuple(one.sha256 for one in shown) or ("",) * len(steps)
    order = RepairOrder(repair="r", title="R", by="anna@desk", steps=steps, expected=expected)
    return apply(home, order, admin or us(), lambda said: None)


def take_back(home: Home, *numbers: int) -> list[Change]:
    return undo(home, UndoOrder(numbers=numbers), us(), lambda said: None)


def edit(path: Path, **fields: Any) -> RepairStep:
    return RepairStep(
        says=f"Edit {path.name}", as_root=False, edit=FileEdit(path=str(path), **fields)
    )


def run(*argv: str, **fields: Any) -> RepairStep:
    return RepairStep(says=f"Run {argv[0]}", as_root=False, run=argv, **fields)


def touch(path: Path) -> RepairStep:
    """A step that makes a file, and knows that it did."""
    there = Probe(argv=("cat", str(path)), shows="")
    return run("touch", str(path), undo=("rm", str(path)), done=there)


def hash_of(folder: Path) -> str:
    """Return one hash over names, modes, owners and contents below a folder."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        state = path.lstat()
        found.update(f"{path} {state.st_mode} {state.st_uid} {state.st_gid}\n".encode())
        found.update(path.read_bytes() if path.is_file() else b"")
    return found.hexdigest()


def test_undoing_everything_leaves_the_files_as_they_were(home: Home, place: Path) -> None:
    hosts, link, own = place / "hosts", place / "link", place / "own.conf"
    hosts.write_bytes(b"127.0.1.1\tpc1\r\n\n# odd \x0c line\n")
    hosts.chmod(0o664)
    link.symlink_to(hosts)
    before = hash_of(place)
    first = edit(hosts, swap=(("127.0.1.1\tpc1\r?", "10.0.0.5 pc1"),))
    do(home, first, edit(own, content="a = 1\n", mode=0o600))
    do(home, edit(link, add=("10.0.0.6 pc2",)), touch(place / "made"))
    assert hosts.read_bytes() == b"10.0.0.5 pc1\n\n# odd \x0c line\n10.0.0.6 pc2\n"
    assert (own.stat().st_mode & 0o777, hosts.stat().st_mode & 0o777) == (0o600, 0o664)
    assert link.is_symlink()
    undone = take_back(home)
    assert [one.number for one in undone] == [2, 1]
    assert all(one.undone_s is not None and not one.undo_problem for one in undone)
    assert hash_of(place) == before
    assert take_back(home) == []


def test_a_second_time_changes_nothing(home: Home, place: Path) -> None:
    steps = (edit(place / "a", content="x\n"), touch(place / "made"))
    do(home, *steps)
    before = hash_of(place)
    again = do(home, *steps)
    assert [one.state for one in again.steps] == ["in place", "in place"]
    assert not again.did_something
    assert [one.state for one in preview(steps, us()).steps] == ["in place", "in place"]
    assert hash_of(place) == before
    # What was there before is not taken away with the second one, either.
    take_back(home, again.number)
    assert hash_of(place) == before


def test_a_preview_shows_the_text_before_and_after_and_changes_nothing(place: Path) -> None:
    (place / "a").write_text("one\n", encoding="utf-8")
    before = hash_of(place)
    steps = (edit(place / "a", add=("two",)), run("false"), edit(place / "none" / "b", content="x"))
    changed, command, blocked = preview(steps, us()).steps
    assert (changed.state, changed.before, changed.after) == ("needed", "one\n", "one\ntwo\n")
    assert command.state == "needed"
    assert blocked.state == "blocked"
    assert "no folder" in blocked.problem
    assert hash_of(place) == before


def test_a_file_that_changed_since_it_was_shown_is_left_alone(home: Home, place: Path) -> None:
    file = place / "a"
    file.write_text("one\n", encoding="utf-8")
    step = edit(file, add=("two",))
    shown = preview((step,), us()).steps
    file.write_text("other\n", encoding="utf-8")
    change = do(home, step, run("touch", str(place / "made")), shown=shown)
    assert "has changed since it was shown" in change.problem
    assert [one.state for one in change.steps] == ["failed", "pending"]
    assert file.read_text() == "other\n"
    assert not (place / "made").exists()


def test_a_file_that_changes_while_it_is_written_is_left_alone(
    home: Home, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = place / "a"
    file.write_text("one\n", encoding="utf-8")
    real = edited_file._do

    def meddle(admin: Administrator, argv: list[str], as_root: bool) -> None:
        real(admin, argv, as_root)
        if argv[0] == "sync":
            file.write_text("somebody else\n", encoding="utf-8")

    monkeypatch.setattr(edited_file, "_do", meddle)
    change = do(home, edit(file, add=("two",)))
    assert "changed by another program or user" in change.problem
    assert [path.name for path in place.iterdir()] == ["a"]
    assert file.read_text() == "somebody else\n"
    assert not [path for path in home.path.iterdir() if path.name != "changes"]


def test_undo_leaves_a_file_alone_that_somebody_edited_later(home: Home, place: Path) -> None:
    file = place / "a"
    first = do(home, touch(place / "made"), edit(file, content="ours\n"))
    file.write_text("theirs\n", encoding="utf-8")
    (undone,) = take_back(home, first.number)
    assert undone.undone_s is None
    assert f"{file} was changed after this repair" in undone.undo_problem
    assert file.read_text() == "theirs\n"
    # Earlier steps may be needed by what stays.
    assert (place / "made").exists()
    file.write_text("ours\n", encoding="utf-8")
    (undone,) = take_back(home, first.number)
    assert undone.undone_s is not None
    assert list(place.iterdir()) == []


def test_a_failed_step_ends_the_repair_and_the_rest_can_be_undone(home: Home, place: Path) -> None:
    bad = run("sh", "-c", "echo no luck; exit 3", undo=("touch", str(place / "wrong")))
    change = do(home, touch(place / "made"), bad, run("touch", str(place / "later")))
    assert [one.state for one in change.steps] == ["done", "failed", "pending"]
    assert change.steps[1].exit_code == 3
    assert change.problem == "Run sh: no luck (exit code 3)."
    (undone,) = take_back(home)
    assert undone.undone_s is not None
    assert list(place.iterdir()) == []


def test_a_file_that_its_program_refuses_is_put_back(home: Home, place: Path) -> None:
    file = place / "a"
    file.write_text("good\n", encoding="utf-8")
    check = ("sh", "-c", f"grep -q good {file} || {{ echo bad line; exit 1; }}")
    change = do(home, edit(file, content="evil\n", activate=check))
    assert "bad line" in change.problem
    assert "is as it was" in change.problem
    assert file.read_text() == "good\n"
    assert take_back(home) == []


def test_an_interrupted_edit_can_be_undone(home: Home, place: Path) -> None:
    file = place / "a"
    file.write_text("one\n", encoding="utf-8")

    def die(said: str) -> None:
        if said == "written":
            raise KeyboardInterrupt

    step = edit(file, content="two\n", activate=("echo", "written"))
    order = RepairOrder(repair="r", title="R", by="me", steps=(step,), expected=("",))
    with pytest.raises(KeyboardInterrupt):
        apply(home, order, us(), die)
    (left,) = ChangeLog(home).all()
    assert (left.ended_s, left.steps[0].state, file.read_text()) == (None, "running", "two\n")
    take_back(home)
    assert file.read_text() == "one\n"


def test_what_cannot_be_taken_back_is_said(home: Home, place: Path) -> None:
    do(home, touch(place / "made"), run("true"), run("true", undo_note="it only reads"))
    (undone,) = take_back(home)
    assert undone.undo_problem == "'Run true' cannot be taken back."
    assert [one.undone for one in undone.steps] == ["yes", "impossible", "not needed"]
    assert undone.undone_s is not None
    stays = do(home, run("true"))
    assert take_back(home)[0].undone_s is None
    # It is said once, and again only of a change that is named.
    assert take_back(home) == []
    assert "cannot be taken back" in take_back(home, stays.number)[0].undo_problem


def test_an_unknown_change_and_a_second_repair_at_once_are_refused(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_log, "_LOCK_S", 0.1)
    with pytest.raises(ExpectedError, match="no change 7"):
        take_back(home, 7)
    with ChangeLog(home).owned(), pytest.raises(ExpectedError, match="Another repair"):
        do(home, run("true"))


def test_a_step_that_takes_too_long_fails(home: Home) -> None:
    change = do(home, run("sleep", "60", timeout_s=0.2))
    assert "no end after 0.2 s" in change.problem


@pytest.mark.parametrize("password", ["", PASSWORD])
def test_sudo_gets_the_password_and_nothing_else_does(
    home: Home, place: Path, monkeypatch: pytest.MonkeyPatch, password: str
) -> None:
    admin = user_with_sudo(monkeypatch, place.parent, password, password=password)
    assert admin.way == ("password" if password else "passwordless")
    show = ("sh", "-c", f"cat; tr '\\0' '\\n' < /proc/self/environ; cat {place}/said")
    (place / "said").write_text(f"so it is {PASSWORD}", encoding="utf-8")
    file = place / "a"
    file.write_text("one\n", encoding="utf-8")
    steps = (
        RepairStep(says="Show", run=show),
        RepairStep(says="Edit", edit=FileEdit(path=str(file), content="two\n")),
    )
    heard: list[str] = []
    order = RepairOrder(repair="r", title="R", by="me", steps=steps, expected=("", ""))
    change = apply(home, order, admin, heard.append)
    assert change.problem == ""
    assert file.read_text() == "two\n"
    if password:
        record = (home.path / "changes" / "1.json").read_text()
        assert "***" in record
        assert not any(password in text for text in (record, *heard))


def test_a_wrong_password_and_a_user_without_rights_change_nothing(
    home: Home, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = RepairStep(says="Make", run=("touch", str(place / "made")))
    wrong = user_with_sudo(monkeypatch, place.parent, "wrong", password=PASSWORD)
    with pytest.raises(ExpectedError, match="did not take the password"):
        do(home, step, admin=wrong)
    barred = user_with_sudo(monkeypatch, place.parent, PASSWORD, password=PASSWORD, refused=True)
    with pytest.raises(ExpectedError, match="may not use sudo"):
        do(home, step, admin=barred)
    monkeypatch.setenv("PATH", str(place))
    with pytest.raises(ExpectedError, match="no sudo"):
        do(home, step, admin=Administrator(Children()))
    assert not (place / "made").exists()
    assert ChangeLog(home).all() == []


def test_a_sudo_that_hangs_is_said(
    home: Home, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = RepairStep(says="Make", run=("touch", str(place / "made")))
    admin = user_with_sudo(monkeypatch, place.parent, PASSWORD, password=PASSWORD, pause_s=30)
    for name in ("_ASK_S", "_SPARE_S"):
        monkeypatch.setattr(administrator, name, 0.1)
    with pytest.raises(ExpectedError, match="does not answer"):
        do(home, step, admin=admin)
    assert ChangeLog(home).all() == []


def test_files_that_only_an_administrator_reads(
    home: Home, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = place / "secret"
    text = "".join(f"line {number} \u00e4\r\n" for number in range(900))
    file.write_bytes(text.encode())
    file.chmod(0o640)

    def closed(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(edited_file, "_read_as_user", closed)
    admin = user_with_sudo(monkeypatch, place.parent, "a", password="a")
    step = RepairStep(says="Edit", edit=FileEdit(path=str(file), add=("more",)))
    assert preview((step,), admin).steps[0].state == "not known"
    change = do(home, step, admin=admin)
    assert change.problem == ""
    assert file.read_bytes().decode() == text + "more\n"
    assert file.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("content", [b"\xff\xfe", b"x" * ((128 << 10) + 1)])
def test_files_that_are_no_short_texts_are_refused(home: Home, place: Path, content: bytes) -> None:
    (place / "a").write_bytes(content)
    change = do(home, edit(place / "a", add=("b",)))
    assert change.steps[0].state == "failed"
    assert (place / "a").read_bytes() == content
    os.mkfifo(place / "pipe")
    assert "is not a file" in do(home, edit(place / "pipe", add=("b",))).problem
