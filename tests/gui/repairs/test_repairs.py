"""Repairs in the window: seen, applied with a password, tested again, undone, listed."""

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QPushButton

from app.core.nodes import CheckNodes
from app.gui.repairs.repair_dialog import RepairDialog
from app.provisioning.check_row import make_row
from app.provisioning.repairs import Repair, install_driver
from app.provisioning.system_repairs import synchronise_clock
from tests.gui.stage import answer_question, find_dialog, open_dialog, press


@pytest.fixture
def dialog(busy) -> RepairDialog:
    """The repair of the clock of beta, offered by a check."""
    busy.window.go_to("nodes")
    page = busy.window.nodes
    page.check_all()
    busy.wait_for(lambda: "Checking" not in page.results._summary.text())
    yield open_for(busy, "clock")
    found = find_dialog(RepairDialog)
    if found is not None:
        found.reject()


def open_for(stage, check: str) -> RepairDialog:
    results = stage.window.nodes.results
    row = next(row for row in results.model.rows() if row.check == check)
    results.table.select((row.check, row.node, row.peer, row.message))
    press(results, "Fix\u2026")
    found = open_dialog(RepairDialog)
    assert found is not None
    stage.wait_for(lambda: "Checking" not in found.banner.message())
    return found


def test_a_repair_is_seen_applied_tested_again_and_undone(busy, dialog):
    assert "sudo timedatectl set-ntp true" in dialog.steps.toPlainText()
    assert dialog.password.isVisible()
    assert busy.core.repairs.log == {}
    dialog.password.setText("open sesame")
    press(dialog, "Apply")
    assert dialog.password.text() == ""
    busy.wait_for(lambda: "Repaired on beta" in dialog.banner.message())
    assert "Switch on the system's time synchronisation: done" in dialog.steps.toPlainText()
    (row,) = [r for r in busy.window.nodes.results.model.rows() if r.check == "clock"]
    assert row.status == "pass"
    assert not dialog.apply.isVisible()
    # Enter leaves, and does not take back what was just applied.
    assert [b.text() for b in dialog.findChildren(QPushButton) if b.isDefault()] == ["Close"]
    assert not dialog.password.hasFocus()
    dialog.password.setText("open sesame")
    assert dialog.undo.isDefault()
    press(dialog, "Undo")
    busy.wait_for(lambda: "Undone on beta" in dialog.banner.message())
    assert busy.core.repairs.heard == ["open sesame"] * 2
    assert not dialog.undo.isEnabled()


def test_a_wrong_password_changes_nothing_and_is_asked_for_again(busy, dialog):
    QTest.keyClicks(dialog.password, "wrong")
    QTest.keyClick(dialog.password, Qt.Key.Key_Return)
    busy.wait_for(lambda: "did not take the password" in dialog.banner.message())
    assert busy.application.focusWidget() is dialog.password
    assert busy.core.repairs.log == {}


def test_a_failed_repair_can_be_tried_to_undo(busy, dialog):
    busy.core.repairs.problem = "Switch on: no bus (exit code 1)."
    dialog.password.setText("open sesame")
    press(dialog, "Apply")
    busy.wait_for(lambda: "no bus" in dialog.banner.message())
    assert not dialog.undo.isEnabled()  # nothing of it was done


def test_what_only_a_person_can_do_is_shown_to_copy(busy, dialog):
    dialog.reject()
    script = Repair(id="w", title="W", explanation="E", where="windows", script="Set-It -On")
    results = busy.window.nodes.results
    results.show_rows((make_row("wsl", "beta", "fail", "nat", "change it", script),))
    found = open_for(busy, "wsl")
    assert found.steps.toPlainText() == "Set-It -On"
    assert "PowerShell" in found.banner.message()
    assert not found.apply.isVisible()


def test_a_driver_waits_for_a_restart(busy, dialog):
    dialog.reject()
    busy.core.repairs.admin = "passwordless"
    row = make_row("gpu", "beta", "fail", "no driver", "install it", install_driver())
    busy.window.nodes.results.show_rows((row,))
    found = open_for(busy, "gpu")
    press(found, "Apply")
    busy.wait_for(lambda: "Restart beta" in found.banner.message())
    assert not found.undo.isEnabled()


def test_the_changes_of_a_node_are_listed_and_undone(busy, dialog):
    busy.core.repairs.admin = "passwordless"
    dialog.reject()
    found = open_for(busy, "clock")
    press(found, "Apply")
    busy.wait_for(lambda: "Repaired on beta" in found.banner.message())
    found.reject()
    page = busy.window.nodes
    page.open_node("beta")
    page.tabs.setCurrentWidget(page.changes)
    pane = page.changes
    busy.wait_for(lambda: "1 repair on beta; 1 can be undone." in pane.summary.text())
    assert "timedatectl" in pane.steps.toPlainText()
    answer_question("Undo all")
    press(pane, "Undo all")
    busy.wait_for(lambda: "1 of 1 change undone" in pane.banner.message())
    busy.wait_for(lambda: "0 can be undone." in pane.summary.text())
    assert not pane.undo_all.isEnabled()
    page.open_node("alpha")
    page.tabs.setCurrentWidget(pane)
    busy.wait_for(lambda: "repaired nothing on alpha" in pane.summary.text())


def test_a_change_is_made_and_undone_by_keys_alone(busy, dialog):
    QTest.keyClicks(dialog.password, busy.core.repairs.password)
    QTest.keyClick(dialog.password, Qt.Key.Key_Return)
    busy.wait_for(lambda: "Repaired on beta" in dialog.banner.message())
    QTest.keyClick(dialog.focusWidget(), Qt.Key.Key_Escape)
    assert not dialog.isVisible()
    page = busy.window.nodes
    page.open_node("beta")
    page.tabs.setCurrentWidget(page.changes)
    pane = page.changes
    busy.wait_for(lambda: pane.password.isVisible() and pane.undo.isEnabled())
    QTest.keyClicks(pane.password, busy.core.repairs.password)
    QTest.keyClick(pane.password, Qt.Key.Key_Return)
    assert page.window().focusWidget() is pane.undo
    assert "Undoing" not in pane.banner.message()
    QTest.keyClick(pane.undo, Qt.Key.Key_Return)
    busy.wait_for(lambda: "1 of 1 change undone" in pane.banner.message())


def test_a_node_is_prepared_repair_by_repair(busy, monkeypatch):
    busy.core.repairs.admin = "passwordless"
    clock = make_row("clock", "alpha", "warn", "late", "set it", synchronise_clock())
    driver = make_row("gpu", "alpha", "warn", "no driver", "install it", install_driver())
    broken = make_row("environment", "alpha", "fail", "there is none yet", "set it up")
    well = make_row("clock", "alpha", "pass", "within 0.1 s")
    coming = [(clock, driver, broken), (well,), (well,), (clock,), (broken,), (broken,)]

    async def check(action, report):
        assert action.names == ("alpha",)
        return coming.pop(0)

    monkeypatch.setitem(busy.core.answers, CheckNodes, check)
    busy.window.go_to("nodes")
    page = busy.window.nodes
    page.table.select("alpha")

    def prepare_until(text: str) -> None:
        press(page, "Prepare\u2026")
        busy.wait_for(lambda: text in page.banner.message(), text)

    press(page, "Prepare\u2026")
    busy.wait_for(lambda: find_dialog(RepairDialog) is not None)
    first = open_dialog(RepairDialog)
    assert first.windowTitle() == "Repair alpha (1 of 2)"
    busy.wait_for(first.apply.isEnabled)
    press(first, "Apply")
    busy.wait_for(lambda: "Repaired on alpha" in first.banner.message())
    press(first, "Next")
    second = open_dialog(RepairDialog)
    assert second.windowTitle() == "Repair alpha (2 of 2)"
    busy.wait_for(second.next.isEnabled)
    press(second, "Next")
    busy.wait_for(lambda: page.banner.message().startswith("alpha is ready to train"))
    assert [one.repair for one in busy.core.repairs.log["alpha"]] == ["time-sync"]
    assert busy.called("nodes.setup") == [("alpha",)]
    assert tuple(page.results.model.rows()) == (well,)
    prepare_until("alpha is ready to train; nothing to do")
    press(page, "Prepare\u2026")
    busy.wait_for(lambda: find_dialog(RepairDialog) is not None)
    press(open_dialog(RepairDialog), "Stop")
    assert "Preparing alpha: stopped" in page.banner.message()
    prepare_until("alpha is not ready: 1 problem left")
    assert coming == []
