"""Runs: the table, a run's page, new run, stop, resume, delete, logs."""

import asyncio
import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PySide6.QtCore import QPoint, QPointF, Qt
from PySide6.QtGui import QWheelEvent
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QLabel, QPushButton

from app.core.runs import FindCheckpoints
from app.errors import UsageError, UserError
from app.events import (
    Certificate,
    EvaluationRecord,
    FoundRun,
    PhaseProgress,
    RunChanged,
    RunEvent,
    StepRecord,
)
from app.flows.new_run import list_questions
from app.flows.new_run_answers import to_spec, usual_answers
from app.gui.charts.curves import Curves
from app.gui.charts.frame import choose_ticks, format_tick
from app.gui.charts.limits import Limits
from app.gui.charts.plot import Plot
from app.gui.export.export_wizard import ExportWizard
from app.gui.new_run.data_dialog import DataDialog
from app.gui.new_run.new_run_dialog import NewRunDialog
from app.gui.new_run.run_file_dialog import RunFileDialog
from app.gui.runs.resume_dialog import ResumeDialog, describe_choice
from app.gui.runs.run_actions import can_resume, can_stop
from app.gui.runs.runs_page import RunsPage
from app.gui.tables.run_columns import rank_columns
from app.text import show_loss
from tests.fakes.cluster import make_preview
from tests.fakes.core import NOW_S, SPEC, make_steps, past_interruptions, running_run
from tests.gui.stage import answer_question, find_dialog, open_dialog, press

RUN = "support-chat-7f3a"


@pytest.fixture
def page(busy):
    busy.window.open_run(RUN)
    page = busy.window.run_page()
    busy.wait_for(lambda: page.charts.loss.curves.attempts == [1, 2] and page.checkpoints.rows())
    return page


def test_what_a_run_learns_is_shown_once_it_is_known(busy, page):
    assert "once the first rank" in page.data.view.toPlainText()
    busy.core.preview_map[RUN] = make_preview()
    text = "any words"
    event = RunEvent(run_id=RUN, time_s=NOW_S, kind="started", severity="info", text=text)
    busy.core.on_loop(busy.core.put_event, event)
    busy.wait_for(lambda: "alpaca" in page.data.view.toPlainText())
    shown = page.data.view.toPlainText()
    assert "row 2: not valid JSON" in shown
    assert "Ho" in shown
    assert "background-color" in page.data.view.toHtml()


def test_the_story_of_a_recovery_grows_with_its_events(busy, page):
    assert page.recovery.texts() == []
    assert page.progress.interruptions.isHidden()
    busy.core.interruption_map[RUN] = past_interruptions()[:1]
    event = RunEvent(run_id=RUN, time_s=NOW_S, kind="recovery", severity="info", text="any words")
    busy.core.on_loop(busy.core.put_event, event)
    busy.wait_for(page.recovery.texts)
    assert [text.partition(":")[0] for text in page.recovery.texts()] == [
        "Last step", "Loss noticed", "Resumed", "Training again",
    ]  # fmt: skip
    assert page.progress.interruptions.text().startswith("Interrupted once; 29 s lost")
    busy.window.open_run("poems-11c0")
    busy.wait_for(lambda: not page.recovery.texts() and page.progress.interruptions.isHidden())


def test_a_start_counts_down_says_when_it_is_late_and_leaves_without_a_jump(busy, page):
    line = page.progress.line
    assert not line.is_starting
    heights = {page.progress.height()}
    tuning = PhaseProgress(phase="tuning", expected_s=40.0, time_s=NOW_S, node="beta")

    def show(progress):
        run = replace(busy.core.run_map[RUN], starting=progress)
        busy.core.on_loop(busy.core.events.publish, RunChanged(run=run))
        busy.wait_for(lambda: line.is_starting == (progress is not None))
        busy.settle(0.05)
        heights.add(page.progress.height())

    show(tuning)
    assert line.text.text().startswith("Trying settings on beta: about 40 s left; the next start")
    seen = []
    for later_s in (10.0, 39.8, 60.0):
        # Not the window's clock: its nodes would be silent then.
        line._read_clock = lambda later_s=later_s: NOW_S + later_s
        line.count()
        seen.append((line.text.text().split(": ")[1].split(";")[0], line.phase_bar.isVisible()))
    # A bar would be full, and the phase is not over.
    late = "1 min so far, longer than the 40 s expected"
    assert seen == [("about 30 s left", True), ("almost done", True), (late, False)]
    show(replace(tuning, phase="training", expected_s=None, time_s=NOW_S - 12.0))
    assert line.text.text() == "Training the first step on beta: 12 s so far"
    show(None)
    assert line.bar.isVisible()
    assert len(heights) == 1
    assert not line._timer.isActive()


@pytest.fixture
def new_run(busy):
    QTest.keyClick(busy.window, Qt.Key.Key_N, Qt.KeyboardModifier.ControlModifier)
    dialog = open_dialog(NewRunDialog)
    yield dialog
    if find_dialog(NewRunDialog) is dialog:
        dialog.reject()


# ---------------------------------------------------------------- table


def test_rows_change_in_place_and_deeds_fit_the_state(busy):
    QTest.keyClick(busy.window, Qt.Key.Key_3, Qt.KeyboardModifier.ControlModifier)
    page = busy.window.runs
    page.table.select(RUN)
    assert page._buttons["stop"].isEnabled()
    assert not page._buttons["resume"].isEnabled()
    assert not page._buttons["delete"].isEnabled()
    busy.core.on_loop(busy.core.put_run, running_run(500))
    busy.wait_for(lambda: page.table.selected().step == 500)
    page.table.select("poems-11c0")
    assert page._buttons["resume"].isEnabled()
    assert page._buttons["delete"].isEnabled()
    assert not page._buttons["stop"].isEnabled()


@pytest.mark.parametrize(
    ("changes", "may_stop"),
    [
        ({"state": "created"}, True),  # files are sent
        ({"state": "launching"}, True),
        ({"state": "running"}, True),
        ({"state": "stopping"}, True),  # at once, without the checkpoint
        ({"state": "failed", "is_recovering": True}, True),
        ({"state": "stopped", "is_resuming": True}, True),
        ({"state": "stopped"}, False),
        ({"state": "done"}, False),
    ],
)
def test_a_run_can_be_stopped_in_every_phase(changes, may_stop):
    run = replace(running_run(5), **changes)
    assert can_stop(run) is may_stop
    assert not (run.is_resuming and can_resume(run)), "not twice at once"


def test_enter_opens_the_selected_run_and_escape_leads_back(busy):
    busy.window.go_to("runs")
    busy.window.runs.table.select("recipes-a0d2")
    QTest.keyClick(busy.window.runs.table, Qt.Key.Key_Return)
    assert busy.window.run_page().run_id == "recipes-a0d2"
    QTest.keyClick(busy.window, Qt.Key.Key_Escape)
    assert busy.window.stack.currentWidget() is busy.window.runs


def test_delete_asks_and_the_row_goes(busy):
    busy.window.go_to("runs")
    busy.window.runs.table.select("recipes-a0d2")
    answer_question("Delete permanently")
    press(busy.window.runs, "Delete")
    busy.wait_for(lambda: "recipes-a0d2" not in busy.cluster.runs)
    assert busy.window.runs.model.place_of("recipes-a0d2") is None


# ---------------------------------------------------------------- new run


def test_start_with_nothing_marks_what_is_missing_and_starts_nothing(busy, new_run):
    press(new_run, "Start")
    assert "attention" in new_run.banner.message()
    assert new_run.form.fields["model"]._finding.isVisible()
    assert busy.called("runs.start") == []
    new_run.form.fields["model"].set_answer("org/model")
    new_run.form.edited.emit()
    assert "2 answers need" not in new_run.banner.message(), "what is left is counted"
    new_run.form.fields["data.train"].set_answer("t.jsonl")
    new_run.form.fields["nodes"].set_answer("alpha")
    new_run.form.edited.emit()
    assert not new_run.banner.isVisible()


def test_a_problem_shows_only_where_one_has_been(new_run):
    assert not new_run.form.fields["model"]._finding.isVisible()
    new_run.form.fields["adapter.rank"].input.selectAll()
    QTest.keyClicks(new_run.form.fields["adapter.rank"].input, "0")
    assert new_run.form.fields["adapter.rank"]._finding.isVisible()
    assert not new_run.form.fields["model"]._finding.isVisible()


def test_a_file_that_is_not_there_is_told_at_its_field_while_typing(busy, new_run):
    busy.core.missing = {"/data/chats.jsonl"}
    field = new_run.form.fields["data.train"]
    QTest.keyClicks(field.input, "/data/chats.jsonl")
    busy.wait_for(field._finding.isVisible)
    assert field._finding.text() == "There is no such file."
    QTest.keyClicks(field.input, ".gz")
    assert not field._finding.isVisible()
    busy.settle(0.5)
    assert not field._finding.isVisible()


def test_good_answers_start_a_run_and_open_its_page(busy, new_run):
    QTest.keyClicks(new_run.form.fields["model"].input, "org/model")
    QTest.keyClicks(new_run.form.fields["data.train"].input, "/data/chats.jsonl")
    press(new_run, "Start")
    busy.wait_for(lambda: bool(busy.called("runs.start")) and find_dialog(NewRunDialog) is None)
    spec = busy.called("runs.start")[0][0]
    assert (spec.model, spec.data.train) == ("org/model", "/data/chats.jsonl")
    assert spec.nodes == "all", "the plan does without epsilon, which does not answer"
    busy.wait_for(lambda: busy.window.run_page().run_id == "run-1-0001")


def test_a_refused_start_keeps_the_answers(busy, new_run):
    QTest.keyClicks(new_run.form.fields["model"].input, "org/model")
    QTest.keyClicks(new_run.form.fields["data.train"].input, "chats.jsonl")
    busy.core.failure = UserError("alpha is already busy: run x uses GPU 0", "Stop it first.")
    press(new_run, "Start")
    busy.wait_for(lambda: "Stop it first" in new_run.banner.message())
    assert new_run.start.isEnabled()
    assert new_run.answers()["model"] == "org/model"


def test_a_run_file_fills_the_form_and_keeps_what_is_not_asked(busy, new_run):
    new_run.open_file(Path("/x/evening.yaml"))
    busy.wait_for(lambda: new_run.answers()["name"] == "evening")
    new_run.form.fields["nodes"].set_answer("alpha")
    press(new_run, "Show as run file\u2026")
    shown = open_dialog(RunFileDialog)
    busy.wait_for(lambda: "seed: 7" in shown.text.toPlainText())
    assert shown.command.text() == "rackless start evening.yaml"
    target = Path("/x/copy.yaml")
    shown.save_file(target)
    busy.wait_for(lambda: shown.command.text() == "rackless start /x/copy.yaml")
    spec, path = busy.called("library.write_run_file")[0]
    assert path == target
    assert spec == replace(SPEC, name="evening", seed=7, nodes=("alpha",))


def test_a_name_with_gaps_and_signs_makes_a_command_and_a_file_that_work(busy, new_run):
    for key, text in (("model", "m"), ("data.train", "t"), ("name", "Q&A: my first/second")):
        new_run.form.fields[key].set_answer(text)
    press(new_run, "Show as run file\u2026")
    shown = open_dialog(RunFileDialog)
    assert shown.command.text() == "rackless start 'Q&A- my first-second.yaml'"
    shown.save_file(Path("/x/my runs/a.yaml"))
    busy.wait_for(lambda: shown.command.text() == "rackless start '/x/my runs/a.yaml'")
    press(shown, "Close")


def test_settings_become_a_recipe_that_can_be_taken_and_deleted(busy, new_run):
    for key, text in (("model", "m"), ("data.train", "t"), ("adapter.rank", "24")):
        new_run.form.fields[key].set_answer(text)
    press(new_run, "Show as run file\u2026")
    shown = open_dialog(RunFileDialog)
    assert not shown.keep.isEnabled()
    QTest.keyClicks(shown.title, "Evening runs")
    QTest.keyClick(shown.title, Qt.Key.Key_Return)
    busy.wait_for(lambda: "Saved recipe" in shown.banner.message())
    press(shown, "Close")
    box = new_run.form.start_from.box
    new_run.form.fields["adapter.rank"].set_answer("8")
    box.setCurrentIndex(box.findText("Evening runs"))
    box.activated.emit(box.currentIndex())
    assert new_run.answers()["adapter.rank"] == "24"
    answer_question("Delete permanently")
    new_run.form.start_from.delete.click()
    busy.wait_for(lambda: box.findText("Evening runs") < 0)
    assert not new_run.form.start_from.delete.isVisible()


def test_a_start_can_be_broken_off(busy, new_run):
    for key in ("model", "data.train"):
        new_run.form.fields[key].set_answer("x")
    busy.core.delay_s = 30.0
    press(new_run, "Start")
    busy.wait_for(lambda: bool(busy.called("runs.start")))
    assert not new_run.start.isEnabled()
    (note,) = busy.bridge.closing_notes()
    assert note.startswith("Starting ")
    press(new_run, "Cancel start")
    assert busy.bridge.closing_notes() == ()
    assert "cancelled" in new_run.banner.message()
    assert new_run.start.isEnabled()
    busy.settle(0.1)
    assert "run-1-0001" not in busy.cluster.runs


def test_a_run_file_may_name_a_node_and_a_choice_that_are_not_offered(new_run):
    new_run.form.fields["nodes"].set_answer("alpha, zeta")
    new_run.form.fields["precision"].set_answer("fp64")
    answers = new_run.answers()
    assert (answers["nodes"], answers["precision"]) == ("alpha, zeta", "fp64")
    assert "zeta" in new_run.form.fields["nodes"]._finding.text()


def test_a_recipe_changes_the_settings_and_keeps_model_and_data(busy, new_run):
    box = new_run.form.start_from.box
    busy.wait_for(lambda: box.count() > 1)
    QTest.keyClicks(new_run.form.fields["model"].input, "org/model")
    place = box.findText("DPO", Qt.MatchFlag.MatchContains)
    box.setCurrentIndex(place)
    box.activated.emit(place)
    answers = new_run.answers()
    shown = [answers[key] for key in ("model", "objective", "data.format")]
    assert shown == ["org/model", "dpo", "preference"]
    assert new_run.form.fields["dpo_beta"].isVisible()
    assert "settings changed" in new_run.form.fold._note.text()
    box.setCurrentIndex(0)
    box.activated.emit(0)
    typed = {"name": "run-1", "model": "org/model", "nodes": answers["nodes"]}
    assert new_run.answers() == {**usual_answers(), "data.eval": "auto", **typed}


def test_the_data_can_be_looked_at_before_the_start(busy, new_run):
    assert not new_run.outlook.look.isEnabled()
    new_run.form.fields["model"].set_answer("org/model")
    new_run.form.fields["data.train"].set_answer("chats.jsonl")
    new_run.form.fields["adapter.alpha"].set_answer("x")
    new_run._review()
    new_run.outlook.look.click()
    dialog = open_dialog(DataDialog)
    busy.wait_for(lambda: "learned" in dialog.view.toPlainText())
    assert [call[2] for call in busy.called("library.preview")] == [False]
    press(dialog, "Read all rows")
    busy.wait_for(
        lambda: len(busy.called("library.preview")) == 2 and not dialog.banner.isVisible()
    )
    assert not dialog.count_all.isEnabled()
    busy.core.failure = UserError("chats.jsonl, row 3: not valid JSON", "Correct it.")
    dialog._look(whole=True)
    busy.wait_for(lambda: "row 3" in dialog.banner.message())
    dialog.reject()


def test_a_contradiction_is_told_at_once_also_from_the_folded_part(new_run):
    new_run.form.fields["data.format"].set_answer("preference")
    assert "1 setting needs attention" in new_run.form.fold._note.text()
    new_run.form.fields["objective"].set_answer("dpo")
    num_all = len(list_questions(advanced=True))
    assert f"1 of {num_all} settings changed" in new_run.form.fold._note.text()
    new_run.form.fields["packing"].input.click()
    assert "DPO" in new_run.form.fields["packing"]._finding.text()
    new_run.form.fields["data.format"].set_answer("chat")
    new_run.form.fold.head.setChecked(False)
    press(new_run, "Start")
    assert not new_run.form.fold.is_open(), "the first answer in need of a look is a model"


def test_start_opens_the_folded_part_for_an_answer_in_it(new_run):
    new_run.form.fields["model"].set_answer("m")
    new_run.form.fields["data.train"].set_answer("t")
    new_run.form.fields["shares"].set_answer("1, 2")
    press(new_run, "Start")
    assert new_run.form.fold.is_open()
    assert "2 shares for 5 devices" in new_run.form.fields["shares"]._finding.text()


def test_a_new_run_like_another_has_all_of_its_settings(busy, page):
    spec = replace(SPEC, name="support-chat", nodes=("alpha",), precision="fp64", shares=(1.0,))
    busy.cluster.runs[RUN] = replace(busy.cluster.runs[RUN], spec=spec)
    page.head.show_run(busy.cluster.runs[RUN])
    page.head.repeat.click()
    dialog = open_dialog(NewRunDialog)
    assert to_spec(dialog.answers()) == replace(spec, name="support-chat-2")
    dialog.reject()


def test_a_broken_run_file_says_what_is_wrong(busy, new_run):
    busy.core.failure = UsageError("x.yaml: rank is 'a'", "Write a whole number.")
    new_run.open_file(Path("/x/x.yaml"))
    busy.wait_for(lambda: "Write a whole number" in new_run.banner.message())


def test_full_training_asks_nothing_about_adapters(new_run):
    new_run.form.fields["adapter.kind"].set_answer("full")
    assert not new_run.form.fields["adapter.rank"].isVisible()
    new_run.form.fields["adapter.kind"].set_answer("lora")
    assert new_run.form.fields["adapter.rank"].isVisible()
    assert not new_run.form.fields["adapter.dropout"].isVisible()
    new_run.form.fold.head.click()
    assert new_run.form.fields["adapter.dropout"].isVisible()


# ---------------------------------------------------------------- a run's page


def test_the_page_shows_what_the_core_has(page):
    assert len(page.ranks.rows()) == 4
    assert len(page.events.rows()) == 5
    assert page.progress.figures["step"].text() == "412 / 1,200"
    assert [mark.text for mark in page.charts.loss.curves.marks] == ["attempt 2"]


def test_live_steps_join_without_doubling(busy, page):
    newest = page.charts.loss.curves.series(2)
    before = len(newest)
    last = make_steps(424, (1, 2))[-1]
    fresh = replace(last, step=last.step + 1, loss=math.nan)
    busy.core.on_loop(busy.core.put_steps, RUN, (last, fresh))
    busy.wait_for(lambda: len(newest) == before + 1)
    assert math.isnan(newest.y[-1]), "a loss that is no number is a gap"


def test_live_steps_that_overtake_the_past_wait_for_it(busy):
    steps = make_steps(424, (1, 2))
    newest = replace(steps[-1], step=steps[-1].step + 1)
    busy.window.open_run(RUN)
    page = busy.window.run_page()
    page._take_steps(RUN, (steps[-1], newest))
    assert page.charts.loss.curves.attempts == []
    busy.wait_for(lambda: 2 in page.charts.loss.curves.attempts)
    assert [len(page.charts.loss.curves.series(attempt)) for attempt in (1, 2)] == [212, 213]


def test_events_arrive_in_plain_words(busy, page):
    event = RunEvent(run_id=RUN, time_s=NOW_S, severity="warning", text="beta is slow.")
    busy.core.on_loop(busy.core.put_event, event)
    busy.wait_for(lambda: event in page.events.rows())


def test_a_loss_that_is_no_number_is_told_above_the_page(busy, page):
    busy.core.on_loop(busy.core.put_run, replace(running_run(), loss=math.nan))
    busy.wait_for(lambda: "no longer a number" in page.notice.message())


def test_why_a_run_failed_is_told_before_its_loss(busy, page):
    failed = replace(running_run(), state="failed", loss=math.nan, message="beta was lost")
    busy.core.on_loop(busy.core.put_run, failed)
    busy.wait_for(lambda: "beta was lost" in page.notice.message())


def test_checkpoints_stay_those_of_the_run_that_is_shown(busy, page, monkeypatch):
    find, may_end = busy.core.answers[FindCheckpoints], asyncio.Event()

    async def checkpoints(action, report):
        if action.run_id == RUN:
            await may_end.wait()
        return await find(action, report)

    monkeypatch.setitem(busy.core.answers, FindCheckpoints, checkpoints)
    page.tabs.setCurrentIndex(3)
    press(page, "Verify all")
    assert "Verifying checkpoints of support-chat" in page.banner.message()
    page._take_event(
        RunEvent(run_id=RUN, time_s=2.0, kind="checkpoint", severity="info", text="any words")
    )
    busy.window.open_run("poems-11c0")
    busy.wait_for(lambda: bool(page.checkpoints.rows()))
    busy.core.on_loop(may_end.set)
    busy.wait_for(lambda: "support-chat: every checkpoint" in page.banner.message())
    assert {one.run_id for one in page.checkpoints.rows()} == {"poems-11c0"}


def test_where_there_is_no_checkpoint_none_is_called_whole(busy, page, monkeypatch):
    async def find_none(action, report):
        return ()

    monkeypatch.setitem(busy.core.answers, FindCheckpoints, find_none)
    page.tabs.setCurrentIndex(3)
    press(page, "Verify all")
    busy.wait_for(lambda: "nodes that respond have no checkpoint" in page.banner.message())


@pytest.mark.parametrize(
    ("value", "step", "text"),
    [(2e-6, 1e-6, "2e-6"), (0.0, 1e-6, "0"), (5e-4, 1e-4, "0.0005"), (1e36, 5e35, "1e36")],
)
def test_figures_of_an_axis_fit_beside_it_and_differ(value, step, text):
    assert format_tick(value, step) == text
    assert choose_ticks(Limits(0.0, 5e-7), 3) == [0.0, 2e-7, 4e-7]
    assert choose_ticks(Limits(-1.7e308, 1.7e308), 3) == []


def test_stop_asks_and_tells_the_end(busy, page):
    answer_question("Stop run")
    press(page.head, "Stop")
    busy.wait_for(lambda: "Stopped" in page.banner.message())
    assert busy.called("runs.stop") == [(RUN,)]
    assert page.head.buttons["resume"].isVisible()
    assert not page.head.buttons["stop"].isVisible()


def test_another_masters_run_can_be_taken_over(busy, page):
    button = page.head.buttons["take_over"]
    assert not button.isVisible(), "it is this master's own"
    busy.core.on_loop(busy.core.put_run, replace(running_run(), is_foreign=True))
    busy.wait_for(button.isVisible)
    answer_question("Take over")
    press(page.head, "Take over\u2026")
    busy.wait_for(lambda: "Took over" in page.banner.message())
    assert busy.called("runs.take_over") == [(RUN,)]


def test_a_run_that_is_not_ours_is_shown_and_left_to_the_user(busy):
    page = busy.window.findChild(RunsPage)
    assert page.found.isHidden()
    found = FoundRun(
        run_id="20261128-190000-abc",
        attempt=7,
        name="diary",
        node="beta",
        state="running",
        is_active=True,
        started_s=None,
        master=None,
        files=("/home/me/diary.txt", "me/model"),
    )
    other = replace(found, run_id="20261128-190000-xyz", node="gamma")
    busy.core.on_loop(busy.core.put_found, [found, other])
    busy.wait_for(lambda: not page.found.isHidden())
    labels = [label.text() for label in page.found.findChildren(QLabel)]
    assert any("Found on beta, not yours: attempt 7 of diary" in text for text in labels)
    asked = answer_question("Watch it")
    page.found.adopt(found)
    busy.wait_for(lambda: busy.called("runs.adopt"))
    assert busy.called("runs.adopt") == [(found.run_id, "beta", found.files)]
    assert any("/home/me/diary.txt" in text for text in asked)
    done = replace(found, run_id=other.run_id, node="gamma", state="done", is_active=False)
    lost = replace(done, state="lost")

    def offers() -> list[str]:
        buttons = page.found.findChildren(QPushButton)
        return [button.text() for button in buttons if button.isVisibleTo(page.found)]

    for one, count in ((other, 2), (done, 0), (lost, 1)):
        busy.core.on_loop(busy.core.put_found, [one])
        busy.wait_for(lambda one=one: busy.cluster.found == (one,))
        kept = [text for text in offers() if text.startswith(("Stop there", "Take over"))]
        assert len(kept) == count, one.state
    page.found.ignore(other)
    busy.wait_for(page.found.isHidden)
    assert busy.called("runs.ignore") == [(other.run_id, "gamma")]


def test_save_now_tells_the_step_and_the_stall(busy, page):
    press(page.head, "Save now")
    busy.wait_for(lambda: "checkpoint of step 412 is saved" in page.banner.message())
    assert "paused for 18 ms" in page.banner.message()
    assert busy.called("runs.save") == [(RUN,)]
    busy.core.on_loop(busy.core.put_run, replace(running_run(), state="stopped"))
    busy.wait_for(lambda: not page.head.buttons["save"].isVisible())


def test_a_profile_tells_what_took_longest_and_where_it_lies(busy, page, application):
    press(page.head, "Profile")
    busy.wait_for(lambda: "steps 413 to 415 are recorded" in page.banner.message().lower())
    assert "ampere_bf16_gemm 61" in page.banner.message()
    assert busy.called("runs.trace") == [(RUN, 3)]
    press(page.banner, "Copy paths")
    assert application.clipboard().text() == "/mirror/trace.json.gz"


def test_resume_on_other_nodes_from_an_older_checkpoint(busy):
    from PySide6.QtCore import QTimer

    busy.window.open_run("poems-11c0")
    page = busy.window.run_page()
    assert "gamma was lost at step 812" in page.notice.message()

    def answer():
        dialog = open_dialog(ResumeDialog)
        busy.wait_for(lambda: len(dialog.model.rows()) == 3)
        assert not dialog.boxes["epsilon"].isEnabled()
        dialog.boxes["gamma"].setChecked(False)
        dialog.table.select(320)
        press(dialog, "Resume")

    QTimer.singleShot(50, answer)
    press(page.head, "Resume\u2026")
    busy.wait_for(lambda: bool(busy.called("runs.resume")))
    assert busy.called("runs.resume") == [("poems-11c0", 320, ("alpha", "beta"), None)]


def test_a_verified_resume_chooses_its_checkpoint_by_itself(busy):
    from PySide6.QtCore import QTimer

    busy.window.open_run("poems-11c0")
    page = busy.window.run_page()

    def answer():
        dialog = open_dialog(ResumeDialog)
        busy.wait_for(lambda: len(dialog.model.rows()) == 3)
        assert not dialog.num_verified.isEnabled()
        dialog.verify.click()
        dialog.num_verified.setValue(5)
        assert not dialog.table.isEnabled()
        press(dialog, "Resume")

    QTimer.singleShot(50, answer)
    press(page.head, "Resume\u2026")
    busy.wait_for(lambda: bool(busy.called("runs.resume")))
    (_, step, _, verify_steps), *_ = busy.called("runs.resume")
    assert (step, verify_steps) == (None, 5)


def test_a_certificate_shows_and_a_broken_promise_is_told_above_the_page(busy, page):
    good = Certificate(
        promise="A", first_step=401, last_step=403, steps=3, equal_to_the_bit=True,
        largest_difference=0.0, other_samples=0, kept=True,
    )  # fmt: skip
    busy.core.on_loop(busy.core.put_run, replace(running_run(), certificate=good))
    busy.wait_for(lambda: page.progress.certificate.isVisible())
    assert "steps 401 to 403 replayed" in page.progress.certificate.text()
    bad = replace(good, equal_to_the_bit=False, largest_difference=0.25, kept=False)
    busy.core.on_loop(busy.core.put_run, replace(running_run(), certificate=bad))
    busy.wait_for(lambda: "MISMATCH" in page.notice.message())
    assert not page.progress.certificate.isVisible()


def test_the_log_is_read_followed_and_searched(busy, page):
    QTest.keyClick(busy.window, Qt.Key.Key_F, Qt.KeyboardModifier.ControlModifier)
    assert page.tabs.currentWidget() is page.logs
    view = page.logs.view
    busy.wait_for(lambda: view.document.num_lines == 399 and page.logs._size_bytes is not None)
    busy.core.on_loop(busy.core.put_log, RUN, 2, 0, b"the new line\n")
    busy.core.on_loop(busy.core.put_log, RUN, 2, 1, b"of another rank\n")
    busy.wait_for(lambda: view.document.num_lines == 400)
    assert view.document.line(399) == "the new line"
    QTest.keyClicks(page.logs.words, "step 17 ")
    QTest.keyClick(page.logs.words, Qt.Key.Key_Return)
    busy.wait_for(lambda: view.found_line == 16)
    assert not page.logs.follow.isChecked(), "looking at something stops the following"


def test_bytes_told_while_the_file_is_read_are_neither_lost_nor_doubled(busy, page):
    from app.events import LogArrived

    logs = page.logs
    busy.wait_for(lambda: logs._size_bytes is not None)
    size = logs._size_bytes
    logs._size_bytes = None
    logs._take(LogArrived(RUN, 2, "rank-0.log", size - 5, b"xxxx\nnew\n"))
    logs._read_all(size)
    assert logs.view.document.line(399) == "new"
    assert logs._size_bytes == size + 4


# ---------------------------------------------------------------- the plot


def test_the_wheel_zooms_a_double_click_shows_all(page):
    plot = page.charts.loss
    whole = plot.visible()
    event = QWheelEvent(
        QPointF(200, 100),
        plot.mapToGlobal(QPointF(200, 100)),
        QPoint(),
        QPoint(0, 240),
        Qt.MouseButton.NoButton,
        Qt.KeyboardModifier.NoModifier,
        Qt.ScrollPhase.NoScrollPhase,
        False,
    )
    plot.wheelEvent(event)
    zoomed = plot.visible()
    assert zoomed.span < whole.span * 0.7
    QTest.keyClick(plot, Qt.Key.Key_Left, Qt.KeyboardModifier.ShiftModifier)
    assert plot.visible().low < zoomed.low
    QTest.mouseDClick(plot, Qt.MouseButton.LeftButton, pos=QPoint(200, 100))
    assert plot.visible() == whole


def test_the_readout_takes_the_newest_attempt(page):
    step, value, attempt = page.charts.loss.curves.value_at(205.0)
    assert (step, attempt) == (205.0, 2)
    assert math.isfinite(value)
    assert page.charts.loss.curves.value_at(50.0)[2] == 1


def test_lost_steps_are_told_apart_and_a_peak_of_one_step_is_seen():
    curves = Curves()
    values = [0.0] * 100_000
    values[54_321] = 9.0
    curves.extend(1, [float(n) for n in range(100_000)], values)
    curves.extend(2, [90_000.0, 90_001.0], [1.0, math.nan])
    pieces = curves.visible(curves.full_range(), 500)
    assert [piece.is_lost for piece in pieces] == [True, False, False]
    assert max(piece.y.max() for piece in pieces if not np.isnan(piece.y).any()) == 9.0
    assert sum(len(piece.x) for piece in pieces) < 2100
    lost = pieces[0]
    assert lost.x[0] == 89_999, "joined to the last step that counts"
    assert curves.visible(Limits(10.0, 20.0), 500)[0].x.tolist() == [float(n) for n in range(9, 22)]


def test_a_million_steps_pan_smoothly(application, theme):
    plot = Plot(theme, "Loss", "chart_utilisation", show_loss)
    steps = np.arange(1_000_000, dtype=np.float64)
    plot.curves.extend(1, steps.tolist(), (2 + np.sin(steps / 5e4)).tolist())
    plot.resize(900, 300)
    plot.show()
    costs = []
    for turn in range(12):
        plot.show_range(Limits(turn * 1000.0, 900_000.0 + turn * 1000.0))
        begin_s = time.process_time()
        plot.repaint()
        costs.append(time.process_time() - begin_s)
    plot.deleteLater()
    assert sorted(costs)[6] < 1 / 30


def test_both_charts_show_the_same_steps(page):
    charts = page.charts
    charts.loss.show_range(Limits(100.0, 200.0))
    assert all(plot.visible() == Limits(100.0, 200.0) for plot in charts.plots)
    charts.choice.setCurrentIndex(charts.choice.findData("norm"))
    shown = charts.others["norm"]
    assert shown.isVisible()
    QTest.mouseDClick(shown, Qt.MouseButton.LeftButton, pos=QPoint(200, 100))
    assert charts.loss.visible() == charts.loss.full_range()
    waiting = charts.others["step"].lines[1]
    assert waiting.name == "waiting for others"
    assert len(waiting.curves) == len(charts.loss.curves)


def test_metrics_of_an_objective_are_offered_once_a_step_has_them(page):
    charts = page.charts
    place = charts.choice.findData("reward_margin")
    assert charts.choice.view().isRowHidden(place)
    step = StepRecord(
        attempt=9, step=900, time_s=0, loss=1.0, learning_rate=None, gradient_norm=None,
        tokens_per_s=None, step_s=None, wait_s=None, metrics={"reward_margin": 0.5},
    )  # fmt: skip
    charts.extend([step])
    assert not charts.choice.view().isRowHidden(place)
    assert charts.choice.view().isRowHidden(charts.choice.findData("reward_accuracy"))
    charts.choice.setCurrentIndex(place)
    charts.clear()
    assert charts.choice.currentIndex() == 0


def test_figures_and_picture_of_a_chart_are_copied(application, page):
    plot = page.charts.others["speed"]
    plot.show_range(Limits(205.0, 215.0))
    plot.copy_figures()
    rows = [line.split("\t") for line in application.clipboard().text().splitlines()]
    assert rows[0] == ["step", "attempt", "Throughput, tokens/s"]
    assert [row[0] for row in rows[1:] if row[1] == "2"] == [f"{step}" for step in range(205, 216)]
    assert float(rows[-1][2]) == pytest.approx(plot.curves.value_at(215.0)[1], rel=1e-6)
    plot.copy_picture()
    picture = application.clipboard().pixmap()
    assert picture.size() == plot.grab().size()


def test_a_rank_that_has_ended_does_not_look_busy():
    column = next(column for column in rank_columns() if column.title == "State")
    rank = running_run().ranks[0]
    assert column.status(replace(rank, state="ended")).tone == "calm"
    assert column.status(rank).tone == "busy"


def test_evaluations_stand_beside_the_training(busy, page):
    assert [line.name for line in page.charts.loss.lines] == ["training", "evaluation"]
    points = page.charts.loss.lines[1].curves
    before = len(points)
    assert before == len(busy.core.evaluation_map[RUN])
    busy.core.evaluation_map[RUN].append(
        EvaluationRecord(attempt=2, step=425, loss=1.0, perplexity=2.7)
    )
    text = "any words"
    event = RunEvent(run_id=RUN, time_s=NOW_S, kind="evaluated", severity="info", text=text)
    busy.core.on_loop(busy.core.put_event, event)
    busy.wait_for(lambda: len(page.charts.loss.lines[1].curves) == before + 1)
    page.charts.show_evaluations([])
    assert [len(line.curves) > 0 for line in page.charts.loss.lines] == [True]


def test_a_form_that_is_left_is_taken_up_again(busy, new_run):
    new_run.form.fields["model"].set_answer("org/model")
    new_run.form.fields["adapter.rank"].set_answer("8")
    QTest.keyClick(new_run, Qt.Key.Key_Escape)
    assert busy.window.state.draft == {"model": "org/model", "adapter.rank": "8"}
    busy.window.dialogs.ask_new_run()
    again = open_dialog(NewRunDialog)
    assert again.answers()["model"] == "org/model"
    assert again.answers()["adapter.rank"] == "8"
    assert "Restored your draft" in again.banner.message()
    press(again, "Start over")
    assert again.answers()["model"] == ""
    again.reject()
    assert busy.window.state.draft == {}


def test_a_form_that_a_run_has_filled_is_kept_too_once_it_was_changed(busy):
    busy.window.dialogs.ask_new_run()
    open_dialog(NewRunDialog).form.fields["model"].set_answer("org/before")
    open_dialog(NewRunDialog).reject()
    busy.window.dialogs.repeat_run(busy.cluster.runs[RUN])
    open_dialog(NewRunDialog).reject()
    assert busy.window.state.draft == {"model": "org/before"}, "nothing was answered"
    busy.window.dialogs.repeat_run(busy.cluster.runs[RUN])
    open_dialog(NewRunDialog).form.fields["adapter.rank"].set_answer("77")
    QTest.keyClick(open_dialog(NewRunDialog), Qt.Key.Key_Escape)
    busy.window.dialogs.ask_new_run()
    again = open_dialog(NewRunDialog)
    assert (again.answers()["adapter.rank"], again.answers()["model"]) == ("77", SPEC.model)
    again.reject()


def test_a_run_file_that_cannot_be_read_takes_no_answers_away(busy):
    busy.window.state.draft = {"model": "org/before"}
    busy.core.failure = UsageError("x.yaml: rank is 'a'", "Write a whole number.")
    busy.window.dialogs.ask_new_run(Path("/x/x.yaml"))
    dialog = open_dialog(NewRunDialog)
    busy.wait_for(lambda: "Write a whole number" in dialog.banner.message())
    dialog.reject()
    assert busy.window.state.draft == {"model": "org/before"}


def test_answers_are_kept_when_the_session_ends_around_the_form(busy, new_run):
    new_run.form.fields["model"].set_answer("org/model")
    busy.window.close_policy.is_quiet = True
    busy.window.close()
    assert busy.window.state.draft == {"model": "org/model"}


def test_a_newer_checkpoint_out_of_reach_is_told_before_it_is_given_up():
    plain = "The newest is selected. An older one repeats the steps after it."
    assert describe_choice(400, 400) == describe_choice(400, None) == plain
    assert "step 480, is on a node that does not respond" in describe_choice(400, 480)
    assert "step 480, is on a node that does not respond" in describe_choice(400, 480, 440)
    damaged = "The checkpoint of step 480 is damaged. The one of step 400 is selected."
    assert describe_choice(400, 480, 480) == damaged


@pytest.mark.parametrize(("num_damaged", "step"), [(1, 320), (3, None)])
def test_a_damaged_checkpoint_is_shown_and_not_chosen(busy, monkeypatch, num_damaged, step):
    plain = busy.core.answers[FindCheckpoints]

    async def list_damaged(action, report):
        found = await plain(action, report)
        bad = [replace(one, verified=False, problem="alpha: cut") for one in found[:num_damaged]]
        return (*bad, *found[num_damaged:])

    monkeypatch.setitem(busy.core.answers, FindCheckpoints, list_damaged)
    dialog = ResumeDialog(busy.context, busy.window, busy.cluster.runs[RUN])
    busy.wait_for(lambda: len(dialog.model.rows()) == 3)
    assert dialog.choice().step == step
    dialog.reject()
    wizard = ExportWizard(busy.context, busy.window, busy.cluster.runs[RUN])
    busy.wait_for(lambda: len(wizard.model.rows()) == 3)
    assert wizard.answers().checkpoint == step
    assert wizard.forward.isEnabled() == (step is not None)
    wizard.reject()
