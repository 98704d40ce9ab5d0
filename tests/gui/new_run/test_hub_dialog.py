"""The search of the hub: the newest search counts, and what is refused or missing is said."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest

from app.core import hub
from app.errors import UserError
from app.gui.new_run import hub_dialog
from app.gui.new_run.hub_dialog import HubDialog
from app.gui.new_run.hub_results import describe_fit
from app.gui.new_run.new_run_dialog import NewRunDialog
from app.hub.hub_item import HubItem, HubResults
from tests.gui.stage import Stage, find_dialog, open_dialog, press

QWEN, LLAMA = "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B-Instruct"


@pytest.fixture
def form(busy: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[NewRunDialog]:
    monkeypatch.setattr(hub_dialog, "REST_MS", 20)
    busy.window.dialogs.ask_new_run()
    form = open_dialog(NewRunDialog)
    yield form
    form.reject()


@pytest.fixture
def dialog(busy: Stage, form: NewRunDialog) -> Iterator[HubDialog]:
    form.find_on_hub("model")
    dialog = open_dialog(HubDialog)
    busy.wait_for(lambda: bool(dialog.table.rows.rows()))
    yield dialog
    dialog.reject()


def names(dialog: HubDialog) -> list[str]:
    return [row.item.name for row in dialog.table.rows.rows()]


def test_a_model_is_found_and_used(busy: Stage, form: NewRunDialog, dialog: HubDialog) -> None:
    assert busy.called("hub.search") == [("model", "", hub_dialog.PAGE_ITEMS)]
    QTest.keyClicks(dialog.words, "qwen3")
    busy.wait_for(lambda: names(dialog) == [QWEN, "Qwen/Qwen3-32B"])
    assert len(busy.called("hub.search")) == 2  # once for all the letters
    busy.wait_for(lambda: dialog.table.rows.row(1).fit is not None)
    assert describe_fit(dialog.table.rows.row(0)).text == "QLoRA on all three PCs"
    dialog.table.select(QWEN)
    assert dialog.name.text() == QWEN
    assert "on this PC already" in dialog.about.text()
    press(dialog, "Use this model")
    assert form.form.fields["model"].answer() == QWEN
    assert form.form.fields["model"].was_touched


def test_an_earlier_search_never_replaces_a_later_one(busy: Stage, dialog: HubDialog) -> None:
    slow = busy.core.hub_gates["llama"] = asyncio.Event()
    dialog.words.setText("llama")
    busy.wait_for(lambda: len(busy.called("hub.search")) == 2)
    dialog.words.setText("smol")
    busy.wait_for(lambda: names(dialog) == ["HuggingFaceTB/SmolLM2-135M"])
    busy.core.on_loop(slow.set)
    busy.settle(0.05)
    assert names(dialog) == ["HuggingFaceTB/SmolLM2-135M"]


def test_the_window_answers_while_the_hub_does_not(busy: Stage, dialog: HubDialog) -> None:
    busy.core.hub_gates["never"] = asyncio.Event()
    dialog.words.setText("never")
    busy.wait_for(lambda: dialog.summary.text().startswith("Searching"))
    dialog.table.select(LLAMA)  # the results of before can still be used
    assert dialog.use.isEnabled()
    dialog.reject()
    assert find_dialog(HubDialog) is None


def test_a_gated_model_without_a_token_says_what_is_missing(busy: Stage, dialog: HubDialog) -> None:
    dialog.table.select(LLAMA)
    busy.wait_for(lambda: "token of that account kept in Settings" in dialog.about.text())
    assert "its licence has to be accepted on its page" in dialog.about.text()


def test_more_are_shown_on_demand(busy: Stage, form: NewRunDialog) -> None:
    items = tuple(HubItem(kind="data", name=f"org/rows-{n}") for n in range(3))
    busy.core.hub_answer = HubResults(items=items, has_more=True)
    form.find_on_hub("data.eval")
    dialog = open_dialog(HubDialog)
    busy.wait_for(lambda: dialog.more.isVisible())
    assert dialog.summary.text() == "The 3 data sets with most downloads"
    dialog.table.select("org/rows-2")
    press(dialog, "More")
    busy.wait_for(lambda: len(busy.called("hub.search")) == 2 and dialog.more.isVisible())
    assert busy.called("hub.search")[-1] == ("data", "", 2 * hub_dialog.PAGE_ITEMS)
    row = dialog.table.selected()
    assert row is not None
    assert row.item.name == "org/rows-2"
    press(dialog, "Use this data set")
    assert form.form.fields["data.eval"].answer() == "org/rows-2"


def test_a_refusal_can_be_tried_again(busy: Stage, dialog: HubDialog) -> None:
    busy.core.hub_answer = UserError("the hub answers no more requests", "Wait 55 s.")
    dialog.words.setText("x")
    busy.wait_for(lambda: "no more requests Wait 55 s." in dialog.banner.message())
    assert names(dialog) == []
    assert not dialog.use.isEnabled()
    assert not dialog.fetch.isEnabled()
    busy.core.hub_answer = None
    dialog.words.setText("")
    press(dialog, "Try again")
    busy.wait_for(lambda: QWEN in names(dialog))
    assert dialog.banner.message() == ""


def test_offline_the_cache_is_shown(busy: Stage, dialog: HubDialog) -> None:
    cached = HubItem(kind="model", name="org/here", is_cached=True)
    busy.core.hub_answer = HubResults(items=(cached,), problem="The hub cannot be reached: off")
    dialog.words.setText("here")
    busy.wait_for(lambda: names(dialog) == ["org/here"])
    assert "cannot be reached" in dialog.banner.message()


def test_a_download_is_shown_cancelled_and_continued(busy: Stage, dialog: HubDialog) -> None:
    gate = busy.core.fetch_gate = asyncio.Event()
    dialog.table.select(QWEN)
    dialog.place.setCurrentIndex(dialog.place.findData("beta"))
    press(dialog, "Download")
    busy.wait_for(lambda: "34 %" in dialog.progress.message())
    assert not dialog.fetch.isEnabled()
    assert busy.bridge.closing_notes()[0].startswith(f"The download of {QWEN} stops.")
    press(dialog.progress, "Cancel")
    assert "the next download continues it" in dialog.progress.message()
    press(dialog, "Download")
    busy.wait_for(lambda: len(busy.called("hub.fetch")) == 2)
    busy.core.on_loop(gate.set)
    busy.wait_for(lambda: f"{QWEN} is on beta" in dialog.progress.message())
    assert busy.called("hub.fetch") == [("model", QWEN, "beta")] * 2
    assert dialog.fetch.isEnabled()


def test_a_download_that_fails_says_why(busy: Stage, dialog: HubDialog) -> None:
    async def refuse(action: hub.FetchFromHub, report: object) -> None:
        raise UserError("this PC: The disk has 2 GiB free, and it needs 15", "Free some space.")

    busy.core.answers[hub.FetchFromHub] = refuse
    dialog.table.select(QWEN)
    press(dialog, "Download")
    busy.wait_for(lambda: "The disk has 2 GiB free" in dialog.progress.message())
    assert dialog.fetch.isEnabled()


def test_the_dialog_can_be_used_by_keys(busy: Stage, form: NewRunDialog, dialog: HubDialog) -> None:
    dialog.table.setFocus()
    dialog.table.select(LLAMA)
    QTest.keyClick(dialog.table, Qt.Key.Key_Return)
    assert form.form.fields["model"].answer() == LLAMA
