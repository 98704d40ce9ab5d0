"""Quantize and export, driven as a person does: asked, left, taken up, made, cancelled."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtCore import QEvent, Qt
from PySide6.QtGui import QGuiApplication, QKeyEvent
from PySide6.QtTest import QTest

from app.artifacts.exports.request import ExportRequest
from app.core.artifacts import ExportModel, PlanExport
from app.errors import UserError
from app.events import ExportedModel
from app.flows.export import ExportAnswers
from app.gui.chat.chat_dialog import ChatDialog
from app.gui.export.export_wizard import ExportWizard
from app.gui.session.export_board import ExportBatch
from tests.fakes.exports import make_export_plan
from tests.gui.stage import answer_question, open_dialog, press

RUN = "support-chat-7f3a"


def open_wizard(busy):
    busy.window.open_run(RUN)
    press(busy.window.run_page().head, "Export\u2026")
    wizard = open_dialog(ExportWizard)
    busy.wait_for(lambda: bool(wizard.model.rows()))
    return wizard


@pytest.fixture
def wizard(busy):
    found = open_wizard(busy)
    yield found
    left = open_dialog(ExportWizard)
    if left is not None:
        left.close()


def go_on(busy, wizard, *targets):
    """Answer up to the summary."""
    press(wizard, "Next")
    for target in targets:
        wizard.formats.boxes[target].click()
    while wizard.step != "summary":
        if wizard.step == "where":
            busy.wait_for(lambda: "beta" in wizard.places.nodes)
            wizard.places.folder.setText("/m/out")
            wizard._review()
        press(wizard, "Next")


def test_several_formats_are_made_one_after_the_other(busy, wizard):
    assert not wizard.back.isEnabled()
    wizard.table.select(320)
    press(wizard, "Next")
    assert not wizard.forward.isEnabled(), "nothing is chosen"
    for target in ("gguf:Q8_0", "gguf:Q3_K_M", "awq"):
        wizard.formats.boxes[target].click()
    busy.wait_for(lambda: "about 3 min 50 s on beta" in wizard.formats._notes["awq"].text())
    assert wizard.formats._notes["gguf:Q8_0"].text() == "6.7 GiB"
    press(wizard, "Next")
    assert wizard.step == "calibration"
    QTest.keyClicks(wizard.calibration.path, "/data/own.txt")
    assert not wizard.forward.isEnabled(), "it was not looked at yet"
    busy.wait_for(wizard.forward.isEnabled)
    press(wizard, "Next")
    busy.wait_for(lambda: "beta" in wizard.places.nodes)
    assert not wizard.places.nodes["gamma"].isEnabled()
    assert "12.0 GiB are free" in wizard.places.nodes["gamma"].accessibleDescription()
    wizard.places.nodes["alpha"].click()
    wizard.places.folder.setText("")
    wizard.places.folder.textEdited.emit("")
    assert not wizard.forward.isEnabled()
    QTest.keyClicks(wizard.places.folder, "/m/out")
    press(wizard, "Next")
    assert "--type Q3_K_M --checkpoint 320 --node alpha" in wizard.summary.commands.text()
    press(wizard, "Export")
    busy.wait_for(lambda: wizard.batch is not None and wizard.batch.is_over)
    gguf, awq = busy.called("artifacts.export")
    asked = ExportRequest(run_id=RUN, to="awq", checkpoint=320, node="alpha")
    types = ("Q8_0", "Q3_K_M")
    assert gguf == (replace(asked, to="gguf", types=types), Path("/m/out/gguf"))
    assert awq == (replace(asked, calibration="/data/own.txt"), Path("/m/out/awq"))
    first, second = wizard.batch.rows
    assert (first.state, second.state) == ("done", "done")
    page = wizard.stack.currentWidget().widget()
    assert page.rows[0].state.accessibleName() == "State: Review", "Q3_K_M is not to be kept"
    assert "do not keep" in page.rows[0].result.text()
    assert page.rows[1].state.accessibleName() == "State: Keep"
    press(wizard, "Another export")
    assert wizard.step == "formats"
    assert len(wizard.formats.targets()) == 3


def test_it_is_taken_up_where_it_was_left(busy, wizard):
    press(wizard, "Next")
    wizard.formats.boxes["nf4"].click()
    wizard.places.folder.setText("/m/nf4")
    press(wizard, "Close")
    again = open_wizard(busy)
    assert (again.step, again.formats.targets()) == ("formats", ("nf4",))
    assert again.places.folder.text() == "/m/nf4"


def test_awq_can_be_made_by_the_other_package(busy, wizard):
    press(wizard, "Next")
    maker = wizard.formats.maker
    assert not maker.isVisible(), "it is asked where AWQ is chosen"
    wizard.formats.boxes["awq"].click()
    wizard.formats.boxes["gptq:4-bit"].click()
    assert maker.isVisible()
    assert maker.buttons["gptqmodel"].isChecked()
    maker.buttons["autoawq"].click()
    press(wizard, "Close")
    again = open_wizard(busy)
    assert again.formats.maker.buttons["autoawq"].isChecked()
    press(again, "Next")
    press(again, "Next")
    busy.wait_for(lambda: "beta" in again.places.nodes)
    again.places.folder.setText("/m/out")
    press(again, "Next")
    awq, gptq = again.summary.commands.text().splitlines()
    assert "--to awq --engine autoawq" in awq
    assert "--engine" not in gptq
    press(again, "Export")
    busy.wait_for(lambda: again.batch is not None and again.batch.is_over)
    first, second = busy.called("artifacts.export")
    assert [(one[0].to, one[0].engine) for one in (first, second)] == [
        ("awq", "autoawq"), ("gptq", "gptqmodel"),
    ]  # fmt: skip


def test_what_is_under_way_goes_on_without_the_window_and_can_be_cancelled(busy, wizard):
    busy.core.delay_s = 30.0
    go_on(busy, wizard, "nf4", "merged")
    press(wizard, "Export")
    busy.wait_for(lambda: bool(busy.called("artifacts.export")))
    press(wizard, "Close")
    texts = answer_question("Wait for it")
    busy.window.close()
    assert busy.window.isVisible(), "closing would break it off"
    label = wizard.batch.rows[0].job.label
    assert f"Exporting {label} stops. Finished files are kept." in texts[1]
    again = open_wizard(busy)
    assert again.batch.rows[0].state == "now"
    press(again, "Cancel export")
    assert [row.state for row in again.batch.rows] == ["cancelled", "cancelled"]
    assert len(busy.called("artifacts.export")) == 1
    busy.core.delay_s = 0.0


def test_one_that_fails_does_not_keep_the_others(busy, wizard):
    go_on(busy, wizard, "nf4", "merged")
    busy.core.failure = UserError("beta: the disk is full", "Free some room.")
    press(wizard, "Export")
    busy.wait_for(lambda: wizard.batch is not None and wizard.batch.is_over)
    assert [row.state for row in wizard.batch.rows] == ["failed", "done"]
    page = wizard.stack.currentWidget().widget()
    assert "the disk is full. Free some room." in page.rows[0].result.text()


def test_a_file_with_three_words_keeps_one_at_the_step(busy, wizard):
    press(wizard, "Next")
    wizard.formats.boxes["awq"].click()
    press(wizard, "Next")
    busy.core.failure = UserError("own.txt has 3 words", "Name another.")
    QTest.keyClicks(wizard.calibration.path, "own.txt")
    busy.wait_for(lambda: "3 words" in wizard._problem.text())
    assert not wizard.forward.isEnabled()
    wizard.calibration.own.click()
    assert wizard.forward.isEnabled()


def go_to_places(busy, wizard):
    """Choose a format and go on to where it is made."""
    press(wizard, "Next")
    wizard.formats.boxes["nf4"].click()
    press(wizard, "Next")
    assert wizard.step == "where"


def test_a_plan_that_cannot_be_made_says_why_and_starts_nothing(busy, wizard, monkeypatch):
    async def fail(action, report):
        raise UserError("the base of this run has moved", "Put it back to /models/llama.")

    monkeypatch.setitem(busy.core.answers, PlanExport, fail)
    go_to_places(busy, wizard)
    busy.wait_for(lambda: "Put it back" in wizard._problem.text())
    assert wizard._problem.isVisible()
    assert not wizard.forward.isEnabled()
    monkeypatch.undo()
    press(wizard, "Back")
    press(wizard, "Next")
    busy.wait_for(wizard.forward.isEnabled)
    assert not wizard._problem.isVisible()


def test_without_a_node_that_can_one_does_not_go_on(busy, wizard, monkeypatch):
    async def plan(action, report):
        plan = make_export_plan(action.request.to, action.request.types)
        return replace(plan, places=plan.places[2:])

    monkeypatch.setitem(busy.core.answers, PlanExport, plan)
    go_to_places(busy, wizard)
    busy.wait_for(lambda: "No node" in wizard._problem.text())
    assert not wizard.forward.isEnabled()


def test_a_folder_that_is_used_is_told_at_its_field(busy, wizard):
    busy.core.used_folders = {Path("/m/used")}
    go_to_places(busy, wizard)
    busy.wait_for(lambda: "beta" in wizard.places.nodes)
    wizard.places.folder.clear()
    QTest.keyClicks(wizard.places.folder, "/m/used")
    busy.wait_for(lambda: "/m/used is not empty. Name a new" in wizard._problem.text())
    assert not wizard.forward.isEnabled()
    QTest.keyClicks(wizard.places.folder, "-2")
    assert wizard.forward.isEnabled()
    press(wizard, "Next")
    busy.core.used_folders = {Path("/m/used-2")}
    press(wizard, "Close")
    again = open_wizard(busy)
    assert again.step == "summary"
    busy.wait_for(lambda: not again.forward.isEnabled())
    assert busy.called("artifacts.export") == []


def test_enter_goes_on_and_a_double_click_or_a_held_key_makes_nothing(busy, wizard):
    go_to_places(busy, wizard)
    busy.wait_for(lambda: "beta" in wizard.places.nodes)
    wizard.places.folder.setFocus()
    QTest.keyClick(wizard.places.folder, Qt.Key.Key_Return)
    assert wizard.step == "summary"
    press(wizard, "Back")
    QTest.mouseClick(wizard.forward, Qt.MouseButton.LeftButton)
    QTest.mouseDClick(wizard.forward, Qt.MouseButton.LeftButton)
    QTest.mouseRelease(wizard.forward, Qt.MouseButton.LeftButton)
    busy.settle()
    assert (wizard.step, busy.called("artifacts.export")) == ("summary", [])
    held = QKeyEvent(
        QEvent.Type.KeyPress, Qt.Key.Key_Return, Qt.KeyboardModifier.NoModifier, "\r", True
    )
    busy.application.sendEvent(wizard.forward, held)
    busy.settle()
    assert busy.called("artifacts.export") == []


def test_answers_are_kept_for_another_export_when_the_window_was_closed_meanwhile(busy, wizard):
    go_on(busy, wizard, "nf4", "merged")
    press(wizard, "Export")
    busy.wait_for(lambda: wizard.batch is not None and wizard.batch.is_over)
    press(wizard, "Close")
    again = open_wizard(busy)
    press(again, "Another export")
    assert set(again.formats.targets()) == {"nf4", "merged"}
    assert again.places.folder.text() == "/m/out"


def test_each_job_has_its_own_time_though_nobody_looks(busy):
    times = iter([100.0, 700.0, 700.0, 705.0])
    answers = ExportAnswers(targets=("merged", "nf4"), folder="/m/out")
    batch = ExportBatch(busy.bridge, RUN, answers, lambda: next(times))
    batch.start()
    busy.wait_for(lambda: batch.is_over)
    assert [(row.began_s, row.ended_s) for row in batch.rows] == [(100.0, 700.0), (700.0, 705.0)]


def test_what_was_made_is_asked_and_copied_by_where_it_is(busy, wizard, monkeypatch):
    async def make(action, report):
        return ExportedModel(path=Path("/home/anna") / action.out.relative_to("~"))

    monkeypatch.setitem(busy.core.answers, ExportModel, make)
    go_on(busy, wizard, "nf4")
    wizard.places.folder.setText("out")
    press(wizard, "Export")
    busy.wait_for(lambda: wizard.batch is not None and wizard.batch.is_over)
    page = wizard.stack.currentWidget().widget()
    press(page, "Copy path")
    assert QGuiApplication.clipboard().text() == "/home/anna/out"
    press(page, "Chat")
    assert open_dialog(ChatDialog)._wanted.what == "/home/anna/out"
    open_dialog(ChatDialog).close()


def test_the_chosen_node_stays_while_nodes_are_looked_at_again(busy, wizard, monkeypatch):
    go_to_places(busy, wizard)
    busy.wait_for(lambda: "alpha" in wizard.places.nodes)
    wizard.places.nodes["alpha"].click()
    press(wizard, "Back")
    plan, may_end = busy.core.answers[PlanExport], asyncio.Event()

    async def wait(action, report):
        await may_end.wait()
        return await plan(action, report)

    monkeypatch.setitem(busy.core.answers, PlanExport, wait)
    press(wizard, "Next")
    assert wizard.answers().node == "alpha"
    busy.core.on_loop(may_end.set)
    busy.wait_for(lambda: "alpha" in wizard.places.nodes)
    assert wizard.places.nodes["alpha"].isChecked()
    wizard.places.nodes[""].click()
    press(wizard, "Back")
    press(wizard, "Next")
    busy.wait_for(lambda: "alpha" in wizard.places.nodes)
    assert wizard.answers().node == ""
