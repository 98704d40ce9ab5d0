"""The plan beside the form: it follows typing, and only the newest question's answer counts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QLabel

from app.core.action import Report
from app.core.runs import StartRun
from app.errors import LeftOutRows, UserError
from app.events import RunSnapshot
from app.flows.new_run_answers import NO, YES
from app.gui.charts.layer_strip import LayerStrip
from app.gui.new_run import live_count, live_plan
from app.gui.new_run.data_dialog import DataDialog
from app.gui.new_run.new_run_dialog import NewRunDialog
from app.gui.new_run.plan_view import MemoryBar
from app.presentation.model_text import describe_limits, describe_parts
from tests.fakes.cluster import make_preview
from tests.fakes.plans import (
    make_comparison,
    make_plan_of_all,
    make_plan_of_mixture,
    make_plan_of_stages,
)
from tests.gui.stage import Stage, find_dialog, open_dialog, press

RUN = "support-chat-7f3a"


@pytest.fixture
def dialog(busy: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[NewRunDialog]:
    monkeypatch.setattr(live_plan, "REST_MS", 60)
    monkeypatch.setattr(live_count, "REST_MS", 60)
    busy.window.dialogs.ask_new_run()
    dialog = open_dialog(NewRunDialog)
    assert isinstance(dialog, NewRunDialog)
    yield dialog
    dialog.reject()


def headline(dialog: NewRunDialog) -> str:
    return dialog.outlook.plan.headline.text()


def test_the_plan_follows_the_answers(busy: Stage, dialog: NewRunDialog) -> None:
    assert headline(dialog) == "Choose a model to see its plan."
    QTest.keyClicks(dialog.form.fields["model"].input, "org/m")
    busy.wait_for(lambda: headline(dialog).startswith("Data parallel on alpha, beta and gamma"))
    texts = [label.text() for label in dialog.outlook.plan.findChildren(QLabel)]
    assert "gamma: RTX 4070 Laptop GPU, 14 %" in texts
    assert any("Measure gamma's laptop GPU" in text for text in texts)
    bars = dialog.outlook.plan.findChildren(MemoryBar)
    assert [bar.isVisibleTo(dialog.outlook.plan) for bar in bars] == [True] * 4
    assert "activations 5.4 GiB" in bars[0].accessibleName()
    assert all(ask_remote is False for _, ask_remote in busy.called("runs.plan"))
    asked = busy.called("runs.plan")[-1][0]
    assert (asked.model, asked.data.train) == ("org/m", "the data")  # type: ignore[attr-defined]


def test_only_the_newest_question_counts_while_one_is_asked(
    busy: Stage, dialog: NewRunDialog
) -> None:
    gate = busy.core.plan_gate = asyncio.Event()
    QTest.keyClicks(dialog.form.fields["model"].input, "org/model")
    busy.wait_for(lambda: len(busy.called("runs.plan")) > 0)
    busy.settle(0.05)
    assert len(busy.called("runs.plan")) == 1
    busy.core.on_loop(gate.set)
    busy.wait_for(lambda: headline(dialog).startswith("Data parallel"))
    models = [spec.model for spec, _ in busy.called("runs.plan")]  # type: ignore[attr-defined]
    assert models == ["o", "org/model"]


def test_an_unknown_model_is_looked_up_once_the_hands_rest(
    busy: Stage, dialog: NewRunDialog
) -> None:
    busy.core.plan_answer = UserError("the hub gives no config of org/m", "Give a folder.")
    QTest.keyClicks(dialog.form.fields["model"].input, "org/m")
    busy.wait_for(lambda: headline(dialog) == "The hub gives no config of org/m.")
    assert dialog.outlook.plan.problem.text() == "Give a folder."
    assert [far for _, far in busy.called("runs.plan")].count(True) == 1
    busy.core.plan_answer = make_plan_of_all()
    QTest.keyClicks(dialog.form.fields["model"].input, "x")
    busy.wait_for(lambda: headline(dialog).startswith("Data parallel"))
    assert not dialog.outlook.plan.problem.isVisible()


def test_what_does_not_fit_is_told_with_what_would_help(busy: Stage, dialog: NewRunDialog) -> None:
    busy.core.plan_answer = make_plan_of_all(fits=False)
    QTest.keyClicks(dialog.form.fields["model"].input, "org/m")
    busy.wait_for(lambda: headline(dialog).startswith("No plan fits these settings"))
    assert "of the 6.0 GiB of gamma" in headline(dialog)
    texts = [label.text() for label in dialog.outlook.plan.findChildren(QLabel)]
    assert any(text.startswith("Does not fit: ") for text in texts)
    assert any(text.startswith("Shorten sequences to 1,024 tokens") for text in texts)
    # Each change is one click away: the first offer is 4 bits.
    assert dialog.answers()["adapter.kind"] == "lora"
    busy.core.plan_answer = make_plan_of_all()
    press(dialog.outlook.plan, "Apply")
    assert dialog.answers()["adapter.kind"] == "qlora"
    busy.wait_for(lambda: headline(dialog).startswith("Data parallel"))


def test_plan_and_preview_name_the_same_parts(busy: Stage, dialog: NewRunDialog) -> None:
    busy.core.plan_answer = plan = make_plan_of_mixture()
    QTest.keyClicks(dialog.form.fields["model"].input, "org/m")
    QTest.keyClicks(dialog.form.fields["data.train"].input, "org/data")
    view = dialog.outlook.plan
    busy.wait_for(view.parts_note.isVisible)
    shown = [label.text() for label in view.findChildren(QLabel) if label.isVisible()]
    named = [*describe_parts(plan.parts), describe_limits(plan.limits)[0].text]
    assert set(named) <= set(shown)
    assert "Qwen3-MoE, 30.5 billion parameters, 8 of 128 experts per token" in shown

    # The preview is of all answers, not of those alone that the data needs.
    dialog.form.fields["adapter.rank"].set_answer("8")
    dialog.outlook.look.click()
    preview = open_dialog(DataDialog)
    busy.wait_for(lambda: "get no adapter" in preview.view.toPlainText())
    lines = preview.view.toPlainText().splitlines()
    assert set(named) <= set(lines)
    assert busy.called("runs.list_caveats")[0][0].adapter.rank == 8  # type: ignore[attr-defined]
    preview.reject()

    press(view.parts_note, "Apply")
    answers = dialog.answers()
    assert (answers["adapter.experts"], answers["adapter.dora"]) == (YES, NO)
    assert float(answers["adapter.dropout"]) == 0.0
    busy.core.plan_answer = replace(plan, parts=())
    QTest.keyClicks(dialog.form.fields["model"].input, "x")
    busy.wait_for(lambda: not view.parts_note.isVisible())


def test_stages_are_drawn_where_gpus_hold_parts_of_the_model(
    busy: Stage, dialog: NewRunDialog
) -> None:
    plan = dialog.outlook.plan
    busy.core.plan_answer = make_plan_of_stages()
    QTest.keyClicks(dialog.form.fields["model"].input, "org/m")
    busy.wait_for(lambda: headline(dialog).startswith("Pipeline on alpha, beta and gamma"))
    strips = [one for one in plan.findChildren(LayerStrip) if one.isVisibleTo(plan)]
    assert [one.accessibleName() for one in strips] == [
        "alpha: RTX 5070 Ti: layers 1 to 28 of 80, 6 in flight",
        "beta cuda:0: RTX 3090: layers 29 to 50 of 80, 4 in flight",
        "beta cuda:1: RTX 3090: layers 51 to 71 of 80, 3 in flight",
        "gamma: RTX 4070 Laptop GPU: layers 72 to 80 of 80",
    ]
    texts = [label.text() for label in plan.findChildren(QLabel)]
    assert "Bubble 7 % of a step, busiest link in use for 21 % of a step" in texts
    streamed = make_plan_of_stages().others[0]
    busy.core.plan_answer = replace(make_plan_of_stages(), chosen=streamed, others=())
    QTest.keyClicks(dialog.form.fields["model"].input, "x")
    busy.wait_for(
        lambda: strips[3].accessibleName().endswith("all 80 layers, 71 of them from the SSD")
    )
    busy.core.plan_answer = make_plan_of_all()
    QTest.keyClicks(dialog.form.fields["model"].input, "x")
    busy.wait_for(lambda: not any(one.isVisibleTo(plan) for one in strips))


def test_a_runs_page_shows_its_stages_beside_what_they_measured(busy: Stage) -> None:
    busy.core.comparison_map[RUN] = make_comparison(make_plan_of_stages())
    busy.window.open_run(RUN)
    page = busy.window.run_page()
    tab = page.tabs.indexOf(page.stages)
    busy.wait_for(lambda: page.tabs.isTabVisible(tab))
    assert page.stages.summary.text() == (
        "Planned: bubble 7 % of a step, busiest link in use for 21 % of a step"
    )
    assert (
        page.stages.lines[0]
        .text()
        .startswith(
            "alpha: RTX 5070 Ti, layers 1 to 28 of 80, 6 in flight, planned 14.3 GiB of 16.0 GiB"
        )
    )
    busy.wait_for(lambda: "training takes" in page.stages.lines[0].text())
    # A run in which every GPU has all layers has no such tab.
    busy.window.open_run("recipes-a0d2")
    busy.wait_for(lambda: not page.tabs.isTabVisible(tab))


def test_a_wrong_answer_says_why_there_is_no_plan(busy: Stage, dialog: NewRunDialog) -> None:
    QTest.keyClicks(dialog.form.fields["model"].input, "org/m")
    dialog.form.fields["adapter.rank"].input.selectAll()
    QTest.keyClicks(dialog.form.fields["adapter.rank"].input, "0")
    busy.wait_for(lambda: headline(dialog) == "Correct the marked fields to see the plan.")


def test_a_runs_page_holds_the_forecast_against_what_was_measured(busy: Stage) -> None:
    busy.window.open_run(RUN)
    page = busy.window.run_page()
    page.tabs.setCurrentWidget(page.forecast)
    busy.wait_for(lambda: bool(page.forecast.model.rows()))
    rows = {row.what: row for row in page.forecast.model.rows()}
    assert (rows["Step"].foretold, rows["Step"].measured, rows["Step"].error) == (
        "13 s", "13 s", "-3.1 %",
    )  # fmt: skip
    assert rows["gamma cuda:0: memory"].error == "+1.5 %"
    busy.window.open_run("recipes-a0d2")
    busy.wait_for(lambda: page.forecast.note.text().startswith("No forecast"))
    assert not page.forecast.model.rows()


def test_measure_tells_what_a_card_reached(busy: Stage) -> None:
    busy.window.go_to("nodes")
    busy.window.nodes.table.select("alpha")
    press(busy.window.nodes, "Measure")
    busy.wait_for(lambda: "81 TFLOP/s" in busy.window.nodes.banner.message())
    busy.wait_for(
        lambda: (
            "81 TFLOP/s, memory 790 GB/s, to the PC 25 GB/s"
            in [label.text() for label in busy.window.nodes.details.findChildren(QLabel)]
        )
    )
    busy.core.failure = UserError("Node alpha is already busy: run x uses GPU 0.", "Wait for it.")
    QTest.keyClick(busy.window, Qt.Key.Key_Escape)
    press(busy.window.nodes, "Measure")
    busy.wait_for(lambda: "already busy" in busy.window.nodes.banner.message())


def notes(dialog: NewRunDialog) -> list[str]:
    labels = dialog.outlook.left_out.findChildren(QLabel)
    return [label.text() for label in labels if label.isVisibleTo(dialog)]


def test_rows_that_would_be_lost_stand_above_the_plan(busy: Stage, dialog: NewRunDialog) -> None:
    busy.core.count_answer = make_preview()
    QTest.keyClicks(dialog.form.fields["model"].input, "org/m")
    QTest.keyClicks(dialog.form.fields["data.train"].input, "chats.jsonl")
    busy.wait_for(lambda: bool(notes(dialog)))
    assert notes(dialog)[-1] == (
        "Of the 3 rows of chats.jsonl, 1 is left out (33 %): row 2: not valid JSON."
    )
    assert dialog.outlook.counted.isHidden()
    assert busy.called("library.count_left_out")[-1][0].data.train == "chats.jsonl"  # type: ignore[attr-defined]


def test_few_lost_rows_stand_below_it(busy: Stage, dialog: NewRunDialog) -> None:
    QTest.keyClicks(dialog.form.fields["model"].input, "org/m")
    QTest.keyClicks(dialog.form.fields["data.train"].input, "chats.jsonl")
    busy.wait_for(lambda: not dialog.outlook.counted.isHidden())
    assert notes(dialog) == []


def test_a_start_that_loses_rows_asks_first(busy: Stage, dialog: NewRunDialog) -> None:
    said = "of the 3 rows of chats.jsonl, 1 is left out (33 %): row 2: not valid JSON"
    QTest.keyClicks(dialog.form.fields["model"].input, "org/m")
    QTest.keyClicks(dialog.form.fields["data.train"].input, "chats.jsonl")
    starts = busy.core.answers[StartRun]

    async def ask_first(action: StartRun, report: Report) -> RunSnapshot:
        if not action.accept_left_out:
            raise LeftOutRows(said, "-", "Start without this row")
        return await starts(action, report)  # type: ignore[no-any-return]

    busy.core.answers[StartRun] = ask_first
    press(dialog, "Start")
    busy.wait_for(lambda: "Nothing was started" in dialog.banner.message())
    assert said in dialog.banner.message()
    assert busy.called("runs.start") == []
    press(dialog.banner, "Start without this row")
    busy.wait_for(lambda: find_dialog(NewRunDialog) is None)
    assert [accepts for _, accepts in busy.called("runs.start")] == [True]


def purchase_text(dialog: NewRunDialog) -> str:
    texts = [label.text() for label in dialog.outlook.plan.findChildren(QLabel)]
    return next(text for text in texts if "Planning purchases" in text or "a free slot" in text)


def test_what_to_buy_is_planned_when_its_section_opens(busy: Stage, dialog: NewRunDialog) -> None:
    view = dialog.outlook.plan
    QTest.keyClicks(dialog.form.fields["model"].input, "org/m")
    busy.wait_for(lambda: view.purchases.isVisibleTo(view))
    assert not [call for call in busy.core.calls if call[0] == "plans.upgrades"]

    press(view, "What to buy")

    busy.wait_for(lambda: "RTX 3090 in a free slot of alpha\n" in purchase_text(dialog))
    text = purchase_text(dialog)
    assert text.index("2.5 Gb/s") < text.index("RTX 3090") < text.index("Another PC")
    assert "(+1,060, 163 for each 100) for 650 EUR; needs 3 slots and 350 W more" in text
    assert "Prices are guesses of 2026-11-28" in text
    # What gains nothing is no purchase to recommend.
    assert "more RAM" not in text
    # Another model has other purchases: the section closes until it is opened for that one.
    QTest.keyClicks(dialog.form.fields["model"].input, "x")
    busy.wait_for(lambda: not view.purchases.is_open())


def test_purchases_that_cannot_be_planned_say_why(busy: Stage, dialog: NewRunDialog) -> None:
    view = dialog.outlook.plan
    busy.core.upgrades_answer = UserError("the price list prices.csv has no rows")
    QTest.keyClicks(dialog.form.fields["model"].input, "org/m")
    busy.wait_for(lambda: view.purchases.isVisibleTo(view))

    press(view, "What to buy")

    def is_told() -> bool:
        labels = view.findChildren(QLabel)
        return any(one.text() == "The price list prices.csv has no rows." for one in labels)

    busy.wait_for(is_told)
