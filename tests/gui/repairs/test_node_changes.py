"""A change of a node goes on to its end whatever is looked at, and its result is shown there."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest

from app.core.action import Action, Report
from app.core.nodes import CalibrateNode
from app.core.repairs import ApplyRepair, UndoChanges
from app.core.storage import FreeStorage
from app.gui.repairs.repair_dialog import RepairDialog
from app.provisioning.check_row import make_row
from app.provisioning.system_repairs import synchronise_clock
from tests.fakes.storage import MODEL
from tests.gui.stage import Stage, answer_question, open_dialog, press


def hold(stage: Stage, monkeypatch, kind: type[Action[Any]]) -> Callable[[], None]:
    """Let an action of the fake core wait until what is returned is called."""
    act, gate = stage.core.answers[kind], asyncio.Event()

    async def wait(action: Action[Any], report: Report) -> object:
        stage.core.calls.append((f"held.{kind.dotted_name}",))
        await gate.wait()
        return await act(action, report)

    monkeypatch.setitem(stage.core.answers, kind, wait)
    return lambda: stage.bridge.call_soon(gate.set)


def click_node(stage: Stage, name: str) -> None:
    table = stage.window.nodes.table
    names = [table.model().index(row, 0).data() for row in range(table.model().rowCount())]
    middle = table.visualRect(table.model().index(names.index(name), 0)).center()
    QTest.mouseClick(table.viewport(), Qt.MouseButton.LeftButton, pos=middle)


def click_tab(stage: Stage, title: str) -> None:
    tabs = stage.window.nodes.tabs
    place = [tabs.tabText(index) for index in range(tabs.count())].index(title)
    QTest.mouseClick(
        tabs.tabBar(), Qt.MouseButton.LeftButton, pos=tabs.tabBar().tabRect(place).center()
    )


def click_place(stage: Stage, name: str) -> None:
    QTest.mouseClick(stage.window.navigation.places[name], Qt.MouseButton.LeftButton)


@pytest.mark.parametrize("look", ["another node", "another tab", "another page"])
def test_a_deletion_goes_on_whatever_is_looked_at(busy, monkeypatch, look):
    click_place(busy, "nodes")
    page, pane = busy.window.nodes, busy.window.nodes.storage
    click_node(busy, "alpha")
    click_tab(busy, "Storage")
    busy.wait_for(lambda: "Rackless uses 24.0 GiB" in pane.summary.text())
    release = hold(busy, monkeypatch, FreeStorage)
    pane.table.select(MODEL)
    answer_question("Delete")
    press(pane, "Delete\u2026")
    busy.wait_for(lambda: busy.called("held.storage.free") == [()])
    click_node(busy, "beta")
    busy.wait_for(pane.again.isEnabled, "beta was read")
    assert pane.banner.message() == ""
    assert pane.leftovers.isEnabled()
    click_tab(busy, "Log")
    click_tab(busy, "Storage")
    click_node(busy, "alpha")
    busy.wait_for(lambda: pane.model.rows() != [], "alpha was read again")
    busy.wait_for(lambda: "Deleting on alpha" in pane.banner.message())
    assert not pane.leftovers.isEnabled()
    told = page.banner
    if look == "another node":
        click_node(busy, "beta")
    elif look == "another tab":
        click_tab(busy, "Log")
    else:
        click_place(busy, "overview")
        told = busy.window.banner
    release()
    busy.wait_for(lambda: "16.0 GiB are free again on alpha" in told.message(), look)
    assert busy.called("storage.free") == [("alpha", MODEL)]
    click_place(busy, "nodes")
    click_node(busy, "alpha")
    click_tab(busy, "Storage")
    busy.wait_for(lambda: MODEL not in [item.name for item in pane.model.rows()])
    busy.wait_for(pane.leftovers.isEnabled)


def test_an_undo_goes_on_and_its_failure_is_shown_where_the_person_is(busy, monkeypatch):
    busy.core.repairs.admin = "passwordless"
    open_clock_repair(busy)
    dialog = open_dialog(RepairDialog)
    press(dialog, "Apply")
    busy.wait_for(lambda: "Repaired on beta" in dialog.banner.message())
    press(dialog, "Close")
    page, pane = busy.window.nodes, busy.window.nodes.changes
    click_node(busy, "beta")
    click_tab(busy, "Changes")
    busy.wait_for(pane.undo.isEnabled)
    release = hold(busy, monkeypatch, UndoChanges)
    busy.core.repairs.admin = "password"  # is asked for one by now, and gets none
    press(pane, "Undo")
    busy.wait_for(lambda: busy.called("held.repairs.undo") == [()])
    click_tab(busy, "Details")
    click_tab(busy, "Changes")
    busy.wait_for(lambda: "1 repair on beta" in pane.summary.text(), "its log was read again")
    assert "Undoing on beta" in pane.banner.message()
    assert not pane.undo.isEnabled()
    click_node(busy, "alpha")
    release()
    busy.wait_for(lambda: "beta: sudo on this node did not take" in page.banner.message())


def test_a_repair_goes_on_after_its_dialog_was_closed(busy, monkeypatch):
    busy.core.repairs.admin = "passwordless"
    release = hold(busy, monkeypatch, ApplyRepair)
    open_clock_repair(busy)
    dialog = open_dialog(RepairDialog)
    press(dialog, "Apply")
    busy.wait_for(lambda: busy.called("held.repairs.apply") == [()])
    press(dialog, "Close")
    told = busy.window.nodes.banner
    release()
    busy.wait_for(lambda: "Repaired on beta. The check that asked for it passes" in told.message())
    assert told.message().startswith("beta: Synchronise the clock")
    (row,) = busy.window.nodes.results.model.rows()
    assert row.status == "pass"


def test_closing_waits_for_what_changes_a_node(busy, monkeypatch):
    busy.window.state.was_told_closing = True
    busy.core.repairs.admin = "passwordless"
    release_repair = hold(busy, monkeypatch, ApplyRepair)
    release_deletion = hold(busy, monkeypatch, FreeStorage)
    open_clock_repair(busy)
    dialog = open_dialog(RepairDialog)
    press(dialog, "Apply")
    press(dialog, "Close")
    click_node(busy, "alpha")
    click_tab(busy, "Storage")
    pane = busy.window.nodes.storage
    busy.wait_for(pane.leftovers.isEnabled)
    answer_question("Delete")
    press(pane, "Delete leftovers\u2026")
    busy.wait_for(lambda: "Deleting on alpha" in pane.banner.message())
    texts = answer_question("")  # Enter: what is the default waits
    assert not busy.window.close()
    assert "Repairing beta continues there" in texts[1]
    assert "Deleting on alpha stops after the present item" in texts[1]
    release_repair()
    busy.wait_for(lambda: len(busy.bridge.closing_notes()) == 1, "the repair has ended")
    texts = answer_question("Wait for it")
    assert not busy.window.close()
    assert "Repairing" not in texts[1]
    release_deletion()
    busy.wait_for(lambda: "are free again on alpha" in pane.banner.message())
    assert busy.window.close(), "nothing is under way, so nothing is asked"


def test_closing_names_an_undo_and_a_set_up_and_can_leave_them(busy, monkeypatch):
    busy.window.state.was_told_closing = True
    busy.core.repairs.admin = "passwordless"
    open_clock_repair(busy)
    dialog = open_dialog(RepairDialog)
    press(dialog, "Apply")
    busy.wait_for(lambda: "Repaired on beta" in dialog.banner.message())
    press(dialog, "Close")
    click_node(busy, "beta")
    click_tab(busy, "Changes")
    pane = busy.window.nodes.changes
    busy.wait_for(pane.undo.isEnabled)
    hold(busy, monkeypatch, UndoChanges)
    press(pane, "Undo")
    hold(busy, monkeypatch, CalibrateNode)
    press(busy.window.nodes, "Measure")  # is done again at will, so nobody is asked about it
    assert busy.bridge.closing_notes() == (
        "Undoing on beta continues there; its Changes tab shows the outcome.",
    )
    busy.core.delay_s = 60.0
    press(busy.window.nodes, "Set up environment")
    texts = answer_question("Close now")
    assert busy.window.close()
    assert "Setting up beta stops" in texts[1]


def open_clock_repair(stage: Stage) -> None:
    """Open the repair of the clock of beta from the results of a check."""
    click_place(stage, "nodes")
    click_tab(stage, "Check")
    results = stage.window.nodes.results
    results.show_rows((make_row("clock", "beta", "fail", "late", "set it", synchronise_clock()),))
    press(results, "Fix\u2026")
    stage.wait_for(open_dialog(RepairDialog).apply.isEnabled)
