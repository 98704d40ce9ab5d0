"""Artifacts: what is shown of them, and copying, checking, deleting and serving by clicks."""

import asyncio
from dataclasses import replace

import pytest
from PySide6.QtCore import Qt, QTimer
from PySide6.QtGui import QGuiApplication
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QLabel

from app.core.artifacts import ListServeCommands
from app.errors import UserError
from app.gui.artifacts.copy_artifact_dialog import CopyArtifactDialog
from app.gui.artifacts.push_dialog import PushDialog
from app.gui.chat.chat_dialog import ChatDialog
from app.gui.export.export_wizard import ExportWizard
from tests.gui.stage import Stage, answer_question, find_dialog, open_dialog, press

GGUF = "support-chat-gguf:1"


@pytest.fixture
def stage(busy: Stage) -> Stage:
    QTest.mouseClick(busy.window.navigation.places["artifacts"], Qt.MouseButton.LeftButton)
    busy.wait_for(lambda: len(busy.window.artifacts.model.rows()) == 3)
    busy.window.artifacts.open_artifact(GGUF)
    return busy


def open_tab(stage: Stage, name: str) -> None:
    tabs = stage.window.artifacts.details
    titles = [tabs.tabText(place) for place in range(tabs.count())]
    bar = tabs.tabBar()
    place = bar.tabRect(titles.index(name)).center()
    QTest.mouseClick(bar, Qt.MouseButton.LeftButton, pos=place)


def answer_dialog(kind, answer) -> None:
    """Let `answer` work on the dialog that the next click opens."""

    def work():
        dialog = open_dialog(kind)
        assert dialog is not None
        answer(dialog)

    QTimer.singleShot(50, work)


def test_every_artifact_is_shown_with_its_verdict_and_place(stage):
    page = stage.window.artifacts
    model = page.table.model()
    cells = [[model.index(r, c).data() for c in range(7)] for r in range(3)]
    assert cells[0][:3] == [GGUF, "gguf Q8_0, Q4_K_M, Q3_K_M", "13.5 GiB"]
    assert [row[4] for row in cells] == ["not Q3_K_M", "keep", "lossless"]
    assert [row[5] for row in cells] == [
        "this PC, beta",
        "alpha",
        "missing: /home/anna/models/recipes",
    ]
    assert [v.name for v in page.details.measured.rows()] == ["Q8_0", "Q4_K_M", "Q3_K_M"]
    stage.wait_for(lambda: "Made by llama.cpp" in page.details.card.toPlainText())
    assert "base_model" not in page.details.card.toPlainText()
    page.open_artifact("recipes-merged:1")
    assert not page.buttons["push"].isEnabled()
    copies = page.details.copies
    copies.table.selectRow(0)
    assert not copies.folder.isEnabled()


def test_an_artifact_is_copied_to_a_node(stage):
    def choose(dialog):
        assert dialog.to_node.isChecked()
        dialog.node.setCurrentText("gamma")
        press(dialog, "Copy")

    answer_dialog(CopyArtifactDialog, choose)
    press(stage.window.artifacts, "Copy\u2026")
    stage.wait_for(lambda: "Copied" in stage.window.artifacts.banner.message())
    assert stage.called("artifacts.copy") == [(GGUF, "gamma")]
    stage.wait_for(lambda: len(stage.window.artifacts.details.copies.model.rows()) == 4)


def test_an_artifact_is_talked_to(stage):
    press(stage.window.artifacts, "Chat")
    dialog = open_dialog(ChatDialog)
    stage.wait_for(lambda: len(dialog.columns) == 3)
    assert "GGUF Q8_0" in [column.who.currentText() for column in dialog.columns]
    dialog.close()


def test_a_folder_has_to_be_named(stage):
    def choose(dialog):
        QTest.mouseClick(
            dialog.to_folder, Qt.MouseButton.LeftButton, pos=dialog.to_folder.rect().center() / 4
        )
        assert dialog.to_folder.isChecked()
        assert not dialog.start.isEnabled()
        QTest.keyClicks(dialog.folder, "backup")
        assert dialog.place() == "~/backup"
        press(dialog, "Cancel")

    answer_dialog(CopyArtifactDialog, choose)
    press(stage.window.artifacts, "Copy\u2026")
    assert stage.called("artifacts.copy") == []


def test_an_artifact_is_pushed_privately_and_a_refusal_is_told(stage):
    def name_it(dialog):
        assert not dialog.start.isEnabled()
        QTest.keyClicks(dialog.hub_id, "anna/support-chat")
        QTest.keyClick(dialog.hub_id, Qt.Key.Key_Return)

    message = stage.window.artifacts.banner.message
    answer_dialog(PushDialog, name_it)
    press(stage.window.artifacts, "Push\u2026")
    stage.wait_for(lambda: "to the hub" in message())
    assert stage.called("artifacts.push") == [(GGUF, "anna/support-chat", True)]
    stage.core.failure = UserError("there is no token of the hub on this PC", "hf auth login")
    answer_dialog(PushDialog, name_it)
    press(stage.window.artifacts, "Push\u2026")
    stage.wait_for(lambda: "no token of the hub" in message())


def test_a_check_tells_what_is_not_whole(stage):
    open_tab(stage, "Copies")
    press(stage.window.artifacts, "Verify all copies")
    message = stage.window.artifacts.banner.message
    stage.wait_for(lambda: "1 of 3 copies" in message())
    assert "/media/anna/backup/support-chat: MISSING" in message()


def test_one_copy_is_deleted_and_the_last_one_with_a_warning(stage):
    open_tab(stage, "Copies")
    copies = stage.window.artifacts.details.copies
    assert not copies.delete.isEnabled()
    copies.table.select(("node", "beta"))
    answer_question("Delete permanently")
    press(copies, "Delete copy")
    stage.wait_for(lambda: stage.called("artifacts.delete") == [(GGUF, "beta", True)])
    stage.wait_for(lambda: len(copies.model.rows()) == 2)

    answer_question("Cancel")
    press(stage.window.artifacts, "Delete")
    assert len(stage.called("artifacts.delete")) == 1
    answer_question("Delete permanently")
    press(stage.window.artifacts, "Delete")
    stage.wait_for(lambda: len(stage.window.artifacts.model.rows()) == 2)
    assert "Deleted" in stage.window.artifacts.banner.message()


def test_a_command_to_serve_goes_to_the_clipboard(stage):
    open_tab(stage, "Serve")
    pane = stage.window.artifacts.serving
    stage.wait_for(lambda: len(pane.buttons) == 6)
    QTest.mouseClick(pane.buttons[1], Qt.MouseButton.LeftButton)
    message = stage.window.artifacts.banner.message
    stage.wait_for(lambda: "Modelfile-Q8_0" in message())
    assert QGuiApplication.clipboard().text().startswith("ollama create support-chat-gguf:q8_0 -f ")


def test_what_cannot_be_served_says_why(stage):
    open_tab(stage, "Serve")
    pane = stage.window.artifacts.serving
    stage.wait_for(lambda: len(pane.buttons) == 6)
    stage.core.failure = UserError("poems-awq:1 has no whole copy on this PC")
    stage.window.artifacts.open_artifact("poems-awq:1")
    stage.wait_for(lambda: pane.buttons == [])
    said = [label.text() for label in pane.widget().findChildren(QLabel)]
    assert said == [
        "poems-awq:1 has no whole copy on this PC. Copy the artifact to a folder on this PC first."
    ]


def test_news_from_elsewhere_are_shown_and_keep_the_selection(stage):
    found = stage.core.artifact_map["poems-awq:1"]
    stage.core.on_loop(stage.core.put_artifact, replace(found, version=2))
    page = stage.window.artifacts
    stage.wait_for(lambda: len(page.model.rows()) == 4)
    assert page.table.selected().label == GGUF


def test_commands_are_those_of_the_artifact_that_is_shown(stage, monkeypatch):
    find, may_end = stage.core.answers[ListServeCommands], asyncio.Event()

    async def serve_commands(action, report):
        if action.name == GGUF:
            await may_end.wait()
        return await find(action, report)

    monkeypatch.setitem(stage.core.answers, ListServeCommands, serve_commands)
    page = stage.window.artifacts
    page.open_artifact(GGUF)
    open_tab(stage, "Serve")
    other = next(label for label in stage.core.artifact_map if label != GGUF)
    page.open_artifact(other)
    stage.settle()
    before = [button.accessibleName() for button in page.serving.buttons]
    stage.core.on_loop(may_end.set)
    stage.settle()
    assert [button.accessibleName() for button in page.serving.buttons] == before


def test_a_run_is_chosen_and_exported(stage):
    QTest.mouseClick(stage.window.artifacts.export, Qt.MouseButton.LeftButton)
    stage.wait_for(lambda: stage.application.activePopupWidget() is not None)
    menu = stage.application.activePopupWidget()
    assert menu.actions()[0].text() == "support-chat"
    menu.actions()[0].trigger()
    menu.close()
    stage.wait_for(lambda: find_dialog(ExportWizard) is not None)
    open_dialog(ExportWizard).close()


def test_an_empty_page_leads_to_the_runs(empty):
    page = empty.window.artifacts
    empty.window.go_to("artifacts")
    empty.wait_for(lambda: page._stack.currentIndex() == 0, "it is known to be empty")
    press(page, "Export a run")
    assert empty.window.stack.currentWidget() is empty.window.runs


@pytest.mark.parametrize("name", ["anna/my poems", "anna/a/b", "/poems", "anna/-x", "https://x/y"])
def test_what_is_no_name_on_the_hub_is_told_at_its_field(stage, name):
    def name_it(dialog):
        QTest.keyClicks(dialog.hub_id, name)
        assert dialog._problem.isVisible()
        assert not dialog.start.isEnabled()
        press(dialog, "Cancel")

    answer_dialog(PushDialog, name_it)
    press(stage.window.artifacts, "Push\u2026")
    assert stage.called("artifacts.push") == []
