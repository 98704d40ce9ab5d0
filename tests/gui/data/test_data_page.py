"""The Data page lists, filters, searches and shows rows, and hands a mapping to a new run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QLabel

from agents.contract.data import SourceSpec
from agents.contract.spec import DataSpec, RunSpec
from app.core.data import ListDataRows, ReadDataFigures
from app.errors import UserError
from app.events import RunChanged
from app.gui.data.data_page import DataPage
from app.gui.data.rows_pane import ROWS_PER_PAGE
from app.gui.new_run.new_run_dialog import NewRunDialog
from tests.fakes.rows import FIGURES
from tests.gui.stage import Stage, find_dialog, open_dialog, press

RUN = "support-chat-7f3a"
SPEC = RunSpec(model="/models/m", data=DataSpec(train="/data/chats.jsonl"))


@pytest.fixture
def page(busy: Stage) -> DataPage:
    busy.window.open_data(SPEC)
    page = busy.window.data_page()
    busy.wait_for(lambda: bool(page.list.rows.rows()) and bool(page.columns.boxes))
    return page


def asked(busy: Stage) -> ListDataRows:
    """Return the newest request for rows."""
    (action,) = busy.called("data.rows")[-1]
    assert isinstance(action, ListDataRows)
    return action


def test_an_empty_page_says_what_it_is_for(busy: Stage) -> None:
    busy.window.go_to("data")
    page = busy.window.data_page()
    assert page.stack.currentIndex() == 0
    assert not page.use.isEnabled()
    press(page, "Open")
    assert "Choose a file or a folder" in page.banner.message()


def test_rows_come_with_their_numbers(busy: Stage, page: DataPage) -> None:
    assert len(page.list.rows.rows()) == ROWS_PER_PAGE
    assert page.list.place.text() == "1 to 200 of 12,480"
    assert page.summary.text().startswith("chats.jsonl \u00b7 12,480 rows \u00b7 34 left out")
    texts = [label.text() for label in page.numbers.findChildren(QLabel)]
    assert "44 % of the tokens" in texts
    assert "the conversation has no answer of the assistant" in texts
    assert "3,480 rows, 1,210,200 tokens, 5 left out" in texts
    assert "257-512 tokens: 1,720 rows" in page.numbers.histogram.accessibleName()
    assert asked(busy).source.spec == SPEC


def test_the_first_row_is_shown_as_learned(busy: Stage, page: DataPage) -> None:
    busy.wait_for(lambda: "Marked text" in page.row.learned.toPlainText())
    assert "<|im_start|>assistant" in page.row.learned.toPlainText()
    assert '"topic": "support"' in page.row.raw.toPlainText()
    page.list.table.select(3)
    busy.wait_for(lambda: "no answer of the assistant" in page.row.learned.toPlainText())
    assert "left out" in page.row.title.text()


def test_rows_are_filtered_and_searched(busy: Stage, page: DataPage) -> None:
    page.list.filter.setCurrentIndex(page.list.filter.findData("left_out"))
    busy.wait_for(lambda: [row.place for row in page.list.rows.rows()] == [3])
    page.list.filter.setCurrentIndex(0)
    QTest.keyClicks(page.list.search, "INVOICE")
    busy.wait_for(lambda: bool(page.list.rows.rows()) and page.list.rows.rows()[0].place == 2)
    assert (asked(busy).search, asked(busy).which) == ("INVOICE", "all")
    QTest.keyClicks(page.list.search, " nowhere")
    busy.wait_for(lambda: not page.list.rows.rows())
    assert page.list.place.text() == "No such rows"
    assert page.row.learned.toPlainText().startswith("Choose a row")


def test_pages_lead_to_later_rows(busy: Stage, page: DataPage) -> None:
    assert not page.list.earlier.isEnabled()
    page.list.later.click()
    busy.wait_for(lambda: page.list.rows.rows()[0].place == ROWS_PER_PAGE + 1)
    assert page.list.earlier.isEnabled()
    page.list.go_to.setValue(51)
    page.list.go_to.editingFinished.emit()
    busy.wait_for(lambda: page.list.rows.rows()[0].place == 51)
    assert page.list.place.text() == "51 to 250 of 12,480"


def test_numbers_grow_while_rows_are_read(busy: Stage) -> None:
    busy.core.data.figures = replace(FIGURES, num_rows=90, share=0.25, is_whole=False)
    busy.window.open_data(SPEC)
    page = busy.window.data_page()
    busy.wait_for(lambda: "The first 90 rows (25 % of the data)" in page.summary.text())
    assert page.list.place.text() == "1 to 90 of 90 so far"
    busy.core.data.figures = FIGURES
    busy.wait_for(lambda: "12,480 rows" in page.summary.text())
    busy.wait_for(lambda: page.list.place.text() == "1 to 200 of 12,480")


def test_a_mapping_is_read_at_once_and_goes_into_a_new_run(busy: Stage, page: DataPage) -> None:
    box = page.columns.boxes["topic"]
    box.setCurrentIndex(box.findData("instruction"))
    busy.wait_for(lambda: asked(busy).source.spec.data.columns == ("instruction=topic",))
    busy.wait_for(lambda: page.columns.boxes["topic"].currentText() == "Question")
    press(page, "Use in a new run")
    dialog = open_dialog(NewRunDialog)
    answers = dialog.answers()
    assert answers["data.train"] == "/data/chats.jsonl"
    assert answers["data.columns"] == "instruction=topic"
    assert answers["model"] == "/models/m"
    dialog.reject()


def test_the_preview_of_a_new_run_leads_here(busy: Stage) -> None:
    busy.window.dialogs.ask_new_run()
    dialog = open_dialog(NewRunDialog)
    QTest.keyClicks(dialog.form.fields["model"].input, "org/m")
    QTest.keyClicks(dialog.form.fields["data.train"].input, "/data/a.jsonl")
    press(dialog, "Preview data\u2026")
    busy.wait_for(lambda: bool(busy.called("library.preview")))
    press(dialog, "Look through all rows")
    busy.wait_for(lambda: busy.window.stack.currentWidget() is busy.window.data_page())
    assert find_dialog(NewRunDialog) is None
    assert busy.window.data_page().bar.data.text() == "/data/a.jsonl"
    assert busy.window.state.draft["data.train"] == "/data/a.jsonl"


def test_all_sources_of_a_run_are_shown_one_at_a_time(busy: Stage) -> None:
    sources = (
        SourceSpec(path="/data/a.jsonl"),
        SourceSpec(path="org/b", split="train_sft", columns=("instruction=q",)),
    )
    data = DataSpec(train="/data/a.jsonl", sources=sources, eval="/data/held-out.jsonl")
    run = replace(busy.core.run_map[RUN], spec=replace(SPEC, data=data))
    busy.core.on_loop(busy.core.events.publish, RunChanged(run=run))
    busy.wait_for(lambda: busy.cluster.runs[RUN].spec == run.spec)
    busy.window.open_run(RUN)
    run_page = busy.window.run_page()
    run_page.tabs.setCurrentIndex(4)
    press(run_page, "Look through all rows")
    page = busy.window.data_page()
    busy.wait_for(lambda: bool(page.columns.boxes))
    names = [page.sources.itemText(place) for place in range(page.sources.count())]
    assert names == ["a.jsonl", "org/b (train_sft)", "Evaluation: held-out.jsonl"]
    page.sources.setCurrentIndex(1)
    page.sources.activated.emit(1)
    busy.wait_for(lambda: asked(busy).source.name == "org/b")
    assert page.bar.data.text() == "org/b"
    busy.wait_for(lambda: bool(page.columns.boxes))
    box = page.columns.boxes["topic"]
    box.setCurrentIndex(box.findData("output"))
    busy.wait_for(lambda: asked(busy).source.columns == ("output=topic",))
    found = asked(busy).source
    assert found.spec.data.sources[0] == sources[0]
    page.sources.activated.emit(2)
    busy.wait_for(lambda: asked(busy).source.part == "eval")
    assert asked(busy).source.name == "/data/held-out.jsonl"
    press(page, "Use in a new run")
    dialog = open_dialog(NewRunDialog)
    assert "output=topic" in dialog.answers()["data.sources"]
    dialog.reject()


def test_opening_the_same_data_once_more_reads_it_again(busy: Stage, page: DataPage) -> None:
    before = asked(busy).source
    press(page, "Open")
    busy.wait_for(lambda: asked(busy).source != before)
    assert (asked(busy).source.name, page.sources.isVisible()) == (before.name, False)


def test_data_that_cannot_be_read_is_told(busy: Stage) -> None:
    async def refuse(*args: object) -> None:
        raise UserError("chats.jsonl does not exist", "Check the path.")

    busy.core.answers[ListDataRows] = busy.core.answers[ReadDataFigures] = refuse
    busy.window.open_data(SPEC)
    busy.wait_for(lambda: "does not exist" in busy.window.data_page().banner.message())
