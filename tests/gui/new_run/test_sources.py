"""The list of further training data in the form: adding, editing and removing a source."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from agents.contract.data import SourceSpec
from app.flows.new_run_answers import to_spec
from app.gui.forms.answer_field import AnswerField
from app.gui.new_run.new_run_dialog import NewRunDialog
from tests.gui.stage import Stage, open_dialog


@pytest.fixture
def dialog(busy: Stage) -> Iterator[NewRunDialog]:
    busy.window.dialogs.ask_new_run()
    dialog = open_dialog(NewRunDialog)
    assert isinstance(dialog, NewRunDialog)
    yield dialog
    dialog.reject()


@pytest.fixture
def field(dialog: NewRunDialog) -> AnswerField:
    return dialog.form.fields["data.sources"]


def test_one_source_needs_no_list(field: AnswerField) -> None:
    assert (field.answer(), field.input.rows) == ("", [])
    field.set_answer(json.dumps([{"path": "a", "weight": 1.0, "format": None, "columns": []}]))
    assert (field.answer(), field.input.rows) == ("", [])


def test_a_source_is_added_edited_and_removed(dialog: NewRunDialog, field: AnswerField) -> None:
    edits = []
    field.edited.connect(lambda: edits.append(field.answer()))
    field.input.add.click()
    first, second = field.input.rows
    assert not first.remove.isEnabled()
    for line, text in ((second.path, "more.csv"), (second.weight, "0,5"), (first.weight, "2")):
        line.setText(text)
        line.textEdited.emit(text)  # as typing does
    answers = {**dialog.answers(), "model": "m", "data.train": "a.jsonl"}
    assert to_spec(answers).data.sources == (
        SourceSpec(path="a.jsonl", weight=2.0),
        SourceSpec(path="more.csv", weight=0.5),
    )
    assert len(edits) == 4
    second.remove.click()
    assert (field.answer(), field.input.rows) == ("", [])


def test_what_the_list_does_not_edit_is_kept(field: AnswerField) -> None:
    sources = [{"path": "-"}, {"path": "b", "split": "test", "max_rows": 1, "weight": 3.0}]
    field.set_answer(json.dumps(sources))
    assert json.loads(field.answer()) == sources
    assert field.input.rows[1].weight.text() == "3"


def test_a_new_form_proposes_to_hold_rows_out(dialog: NewRunDialog) -> None:
    assert dialog.answers()["data.eval"] == "auto"
