"""Edits of files by lines, and steps that say what they are."""

from __future__ import annotations

import pytest

from agents.contract.repair import FileEdit, RepairStep

HOSTS = "127.0.0.1\tlocalhost\n127.0.1.1\tpc1\n\n::1\tip6-localhost\n"


def test_what_matches_is_swapped_and_the_rest_stays() -> None:
    edit = FileEdit(path="/etc/hosts", swap=((r"^127\.0\.1\.1(?=\s+pc1$)", "10.0.0.5"),))
    after = edit.apply_to(HOSTS)
    assert after == HOSTS.replace("127.0.1.1", "10.0.0.5")
    assert edit.apply_to(after) == after


def test_lines_are_added_once_also_to_a_file_that_is_not_there() -> None:
    edit = FileEdit(path="/etc/fstab", add=("a b", "c d"))
    assert edit.apply_to(None) == "a b\nc d\n"
    assert edit.apply_to("x\nc d") == "x\nc d\na b\n"


def test_content_replaces_everything() -> None:
    assert FileEdit(path="/a", content="new\n").apply_to("old\n") == "new\n"


@pytest.mark.parametrize(
    ("path", "fields"),
    [("etc/hosts", {"content": "a"}), ("/a", {}), ("/a", {"content": "", "add": ("b",)})],
)
def test_an_edit_without_a_meaning_is_refused(path: str, fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=path):
        FileEdit(path=path, **fields)  # type: ignore[arg-type]


def test_a_step_is_a_command_or_an_edit() -> None:
    edit = FileEdit(path="/a", content="")
    for fields in ({}, {"run": ("true",), "edit": edit}):
        with pytest.raises(ValueError, match="Do it"):
            RepairStep(says="Do it", **fields)  # type: ignore[arg-type]
    assert RepairStep(says="Do it", edit=edit).can_undo
    assert not RepairStep(says="Do it", run=("true",)).can_undo
    assert RepairStep(says="Look", run=("true",), undo_note="it only reads").can_undo
