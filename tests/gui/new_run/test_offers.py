"""What a refusal of data offers is taken with a click: in form, preview and Data page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QLabel

from agents.contract.spec import DataSpec, RunSpec
from app.core.data import ListDataRows
from app.core.library import CountLeftOut, PreviewData
from app.core.runs import StartRun
from app.errors import UserError
from app.gui.new_run.data_dialog import DataDialog
from app.gui.new_run.new_run_dialog import NewRunDialog
from tests.gui.stage import Stage, open_dialog, press

REFUSED = UserError("qa.jsonl has no usable row", "Set data.columns: [instruction=q, output=a]")
WORDS = "Read the column 'q' as question and the column 'a' as answer."


@pytest.fixture
def dialog(busy: Stage) -> Iterator[NewRunDialog]:
    async def refuse(*args: object) -> None:
        raise REFUSED

    for action in (CountLeftOut, PreviewData, StartRun, ListDataRows):
        busy.core.answers[action] = refuse
    busy.window.dialogs.ask_new_run()
    dialog = open_dialog(NewRunDialog)
    QTest.keyClicks(dialog.form.fields["model"].input, "org/m")
    QTest.keyClicks(dialog.form.fields["data.train"].input, "org/data")
    yield dialog
    dialog.reject()


def is_taken(dialog: NewRunDialog) -> bool:
    return dialog.answers()["data.columns"] == "instruction=q, output=a"


def test_the_form_offers_a_mapping_with_the_refusal(busy: Stage, dialog: NewRunDialog) -> None:
    offers = dialog.outlook.offers
    busy.wait_for(offers.isVisible)
    assert offers._lines[0]._text.text() == WORDS
    texts = [label.text() for label in dialog.outlook.left_out.findChildren(QLabel)]
    assert {"The data cannot be used yet", "qa.jsonl has no usable row."} <= set(texts)
    press(offers, "Apply")
    assert is_taken(dialog)


def test_the_preview_takes_a_mapping_and_reads_again(busy: Stage, dialog: NewRunDialog) -> None:
    read: list[DataSpec] = []

    async def refuse(action: PreviewData, *args: object) -> None:
        read.append(action.spec.data)
        raise REFUSED

    busy.core.answers[PreviewData] = refuse
    press(dialog, "Preview data\u2026")
    shown = open_dialog(DataDialog)
    busy.wait_for(lambda: WORDS in shown.banner.message())
    assert "data.columns" not in shown.banner.message()
    shown.banner._action.click()
    assert is_taken(dialog)
    busy.wait_for(lambda: len(read) > 1)
    assert read[1].columns == ("instruction=q", "output=a")
    shown.accept()


def test_a_start_that_is_refused_offers_a_mapping(busy: Stage, dialog: NewRunDialog) -> None:
    press(dialog, "Start")
    busy.wait_for(lambda: WORDS in dialog.banner.message())
    dialog.banner._action.click()
    assert is_taken(dialog)
    assert dialog.banner.message() == ""


def test_the_data_page_takes_a_mapping(busy: Stage, dialog: NewRunDialog) -> None:
    busy.window.open_data(RunSpec(model="-", data=DataSpec(train="/data/qa.jsonl")))
    page = busy.window.data_page()
    busy.wait_for(lambda: WORDS in page.banner.message())
    page.banner._action.click()
    assert page._source is not None
    assert page._source.columns == ("instruction=q", "output=a")
