"""Nodes: add over SSH with its fingerprint, add this PC, remove, set up, check."""

import asyncio
from dataclasses import replace

import pytest
from PySide6.QtCore import QEvent, Qt
from PySide6.QtGui import QKeyEvent
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QDialog, QLabel

from app.core.nodes import CheckNodes, RemoveNode
from app.errors import HostKeyChanged, NodeUnreachable, UnshippedLock, UserError
from app.events import NodeRemoved
from app.gui.kit.primitives import Button
from app.gui.nodes.add_node_dialog import AddNodeDialog
from app.gui.repairs.windows_script_dialog import WindowsScriptDialog
from app.nodes.discovery.candidate import PcCandidate
from app.provisioning.check_row import make_row
from tests.fakes.core import FINGERPRINT, PASSWORD, make_node, publish_history
from tests.gui.stage import answer_question, find_dialog, open_dialog, press


@pytest.fixture
def dialog(empty) -> AddNodeDialog:
    press(empty.window, "Add a PC")
    found = open_dialog(AddNodeDialog)
    assert found is not None
    yield found
    if found is find_dialog(AddNodeDialog):
        found.reject()


def test_a_pc_over_ssh_is_added_after_its_fingerprint_was_confirmed(empty, dialog):
    assert not dialog.add.isEnabled()
    QTest.keyClicks(dialog.form.target, "anna@gamer-pc:2222")
    assert dialog.form.name.placeholderText() == "gamer-pc"
    press(dialog, "Add")
    empty.wait_for(lambda: dialog.confirm.isVisible())
    assert FINGERPRINT in dialog.banner.message()
    assert empty.core.node_map == {}
    press(dialog, "Fingerprint matches, add")
    empty.wait_for(dialog.found.isVisible)
    assert "gamer-pc" in empty.cluster.nodes
    assert empty.called("nodes.add") == [
        ("gamer-pc", "anna@gamer-pc:2222", None),
        ("gamer-pc", "anna@gamer-pc:2222", FINGERPRINT),
    ]


def test_a_fingerprint_is_never_taken_over_to_another_address(empty, dialog):
    QTest.keyClicks(dialog.form.target, "anna@one")
    press(dialog, "Add")
    empty.wait_for(lambda: dialog.confirm.isVisible())
    QTest.keyClicks(dialog.form.target, "2")
    assert not dialog.confirm.isVisible()
    press(dialog, "Add")
    empty.wait_for(lambda: len(empty.called("nodes.add")) == 2)
    assert empty.called("nodes.add")[1] == ("one2", "anna@one2:22", None)


def test_a_program_of_the_ssh_configuration_runs_only_after_a_yes(empty, dialog):
    empty.core.proxy_commands["lab"] = "nc -X 5 lab 22"
    QTest.keyClicks(dialog.form.target, "lab")
    press(dialog, "Add")
    empty.wait_for(lambda: dialog.allow.isVisible())
    assert "nc -X 5 lab 22" in dialog.banner.message()
    assert empty.called("nodes.add") == []
    press(dialog, "Run it and add")
    empty.wait_for(lambda: dialog.confirm.isVisible())
    press(dialog, "Fingerprint matches, add")
    empty.wait_for(dialog.found.isVisible)
    assert "lab" in empty.cluster.nodes


def test_a_pc_without_our_key_gets_it_with_a_password_that_is_typed_once(empty, dialog):
    empty.core.locked_hosts.add("gamer")
    QTest.keyClicks(dialog.form.target, "anna@gamer")
    press(dialog, "Add")
    empty.wait_for(lambda: dialog.confirm.isVisible())
    assert not dialog.password.isVisible()
    press(dialog, "Fingerprint matches, add")
    empty.wait_for(lambda: dialog.password.isVisible())
    assert "password of anna@gamer:22" in dialog.banner.accessibleName()
    QTest.keyClicks(dialog.password, "wrong")
    press(dialog, "Copy key and add")
    empty.wait_for(lambda: "password is wrong" in dialog.banner.message())
    assert dialog.password.text() == ""
    QTest.keyClicks(dialog.password, PASSWORD)
    QTest.keyClick(dialog.password, Qt.Key.Key_Return)
    empty.wait_for(dialog.found.isVisible)
    assert "id_ed25519, which was just made, was added" in dialog.found.banner.message()
    assert empty.called("nodes.copy_key") == [("anna@gamer:22", FINGERPRINT)] * 2
    # Not the fingerprint of the host that got the key: it may be a jump host.
    assert empty.called("nodes.add")[-1][2] is None
    answer_question("Cancel")
    press(dialog.found, "Take it back")
    assert empty.called("nodes.take_back_key") == []
    answer_question("Take it back")
    press(dialog.found, "Take it back")
    empty.wait_for(lambda: "is taken back" in dialog.found.banner.message())
    assert empty.called("nodes.take_back_key") == [("gamer",)]


def test_a_pc_of_the_network_is_found_and_chosen(empty, dialog):
    empty.core.candidates = (
        PcCandidate(
            target="gamer",
            host="100.101.2.3",
            port=22,
            name="gamer",
            sources=("mdns",),
            state="open",
            banner="SSH-2.0-OpenSSH_9.6p1",
            overlay="Tailscale",
        ),
        PcCandidate(
            target="10.0.0.9", host="10.0.0.9", port=22, sources=("neighbour",), state="open",
            node="big",
        ),
    )  # fmt: skip
    press(dialog, "Find PCs on this network")
    empty.wait_for(lambda: len(dialog.near.model.rows()) == 2)
    assert "gradients over it are slow" in dialog.near.banner.message()
    dialog.near.table.selectRow(1)
    assert not dialog.near.use.isEnabled()
    dialog.near.table.selectRow(0)
    press(dialog.near, "Use this PC")
    assert dialog.form.target.text() == "gamer"
    assert dialog.add.isEnabled()


def test_a_list_is_added_after_one_look_at_all_fingerprints(empty, dialog):
    press(dialog, "Add a list of PCs")
    assert not dialog.several.add.isEnabled()
    dialog.several.text.setPlainText("big anna@10.0.0.2\nlab bob@10.0.0.3 # mine\nbig zoe@10.0.0.4")
    press(dialog.several, "Add all")
    empty.wait_for(lambda: dialog.several.confirm.isVisible())
    states = [(o.line.name, o.state) for o in dialog.several.model.rows()]
    assert states == [("big", "confirm"), ("lab", "confirm"), ("big", "failed")]
    assert empty.core.node_map == {}
    press(dialog.several, "All fingerprints match, add")
    empty.wait_for(lambda: "2 PCs are added" in dialog.several.banner.message())
    assert "1 could not be added" in dialog.several.banner.message()
    assert set(empty.cluster.nodes) == {"big", "lab"}
    assert not dialog.several.passwords.isVisible()


def test_a_list_asks_for_passwords_once_one_for_all_or_one_for_each(empty, dialog):
    empty.core.locked_hosts |= {"10.0.0.2", "10.0.0.3", "10.0.0.4"}
    press(dialog, "Add a list of PCs")
    pane = dialog.several
    pane.text.setPlainText(
        "big anna@10.0.0.2\nlab bob@10.0.0.3\nold bob@10.0.0.4\nfree me@10.0.0.5"
    )
    QTest.keyClick(pane.text, Qt.Key.Key_Escape)
    assert dialog.isVisible(), "Escape goes back to the address and keeps the list"
    assert dialog.focusWidget() is dialog.form.target
    press(dialog, "Add a list of PCs")
    press(pane, "Add all")
    empty.wait_for(lambda: pane.confirm.isVisible())
    assert dialog.focusWidget() is pane.table
    press(pane, "All fingerprints match, add")
    empty.wait_for(lambda: "1 PC is added, 3 want a password." in pane.banner.message())
    box = pane.passwords
    choices = [box.account.itemText(place) for place in range(box.account.count())]
    assert [pane.table.model().index(row, 0).data() for row in range(3)] == ["password"] * 3
    assert choices == ["All 3 accounts", "anna@10.0.0.2", "bob@10.0.0.3", "bob@10.0.0.4"]
    assert empty.application.focusWidget() is box.password
    empty.wait_for(lambda: pane.text.height() >= pane.text.minimumHeight(), "the dialog has grown")
    assert not box.copy_key.isEnabled()
    QTest.keyClicks(box.password, "wrong")
    box.account.setCurrentIndex(1)
    assert box.password.text() == ""
    QTest.keyClicks(box.password, PASSWORD)
    press(pane, "Copy key and add")
    empty.wait_for(lambda: "2 PCs are added, 2 want a password." in pane.banner.message())
    assert box.account.currentText() == "All 2 accounts"
    QTest.keyClicks(box.password, "wrong")
    QTest.keyClick(box.password, Qt.Key.Key_Return)
    empty.wait_for(lambda: "does not accept this password" in pane.reason.text())
    assert box.password.text() == ""
    QTest.keyClicks(box.password, PASSWORD)
    QTest.keyClick(box.password, Qt.Key.Key_Return)
    empty.wait_for(lambda: "4 PCs are added." in pane.banner.message())
    assert not box.isVisible()
    assert set(empty.cluster.nodes) == {"big", "lab", "old", "free"}


def test_a_changed_key_is_a_hard_stop(empty, dialog):
    empty.core.failure = HostKeyChanged("gamer", "SHA256:old", "SHA256:new")
    QTest.keyClicks(dialog.form.target, "anna@gamer")
    press(dialog, "Add")
    empty.wait_for(lambda: "SHA256:old was confirmed" in dialog.banner.message())
    assert not dialog.add.isEnabled()
    assert not dialog.confirm.isVisible()


def test_an_unreachable_pc_can_be_tried_again(empty, dialog):
    empty.core.failure = NodeUnreachable("gamer does not answer", "Is it on?")
    QTest.keyClicks(dialog.form.target, "anna@gamer")
    press(dialog, "Add")
    empty.wait_for(lambda: "Is it on?" in dialog.banner.message())
    assert dialog.add.isEnabled()


def test_a_wrong_address_is_told_while_typing(empty, dialog):
    QTest.keyClicks(dialog.form.target, "gamer:x")
    assert dialog.form.problems["target"].isVisible()
    assert not dialog.add.isEnabled()


def test_this_pc_is_added_with_one_more_click(empty):
    press(empty.window, "Add this PC")
    dialog = open_dialog(AddNodeDialog)
    assert not dialog.form.target.isVisible()
    press(dialog, "Add")
    empty.wait_for(dialog.found.isVisible)
    assert empty.called("nodes.add") == [("this-pc", "this PC", None)]


def test_what_was_found_leads_to_a_node_that_is_ready_and_to_the_next_pc(empty):
    node = make_node("this-pc")
    empty.core.newcomer = replace(node, facts=replace(node.facts, environment=None))
    press(empty.window, "Add this PC")
    dialog = open_dialog(AddNodeDialog)
    press(dialog, "Add")
    empty.wait_for(dialog.found.isVisible)
    empty.settle(0.1)
    shown = [label.text() for label in dialog.found.findChildren(QLabel) if label.isVisible()]
    assert "AMD Ryzen 7 7700 8-Core Processor, 16 cores" in shown
    assert any("No NVIDIA GPU found" in text for text in shown)
    empty.core.delay_s = 30.0
    press(dialog, "Set up environment")
    press(dialog, "Cancel")
    assert "is unchanged" in dialog.found.banner.message()
    empty.core.delay_s = 0.0
    press(dialog, "Set up environment")
    empty.wait_for(lambda: "ready to train" in dialog.found.banner.message())
    assert not dialog.found.setup.isVisible()
    press(dialog, "Add another PC")
    QTest.keyClicks(dialog.form.target, "anna@gamer-pc")
    assert dialog.add.isEnabled()
    dialog.reject()


def test_a_linux_of_this_pc_is_offered_where_there_is_one(empty, dialog):
    assert not dialog.form.in_wsl.isVisible()
    dialog.reject()
    empty.core.distros = ("Ubuntu-24.04", "Debian")
    press(empty.window, "Add a PC")
    dialog = open_dialog(AddNodeDialog)
    empty.wait_for(dialog.form.in_wsl.isVisible)
    dialog.form.in_wsl.click()
    assert not dialog.form.target.isVisible()
    dialog.form.distro.setCurrentIndex(1)
    dialog.form.distro.activated.emit(1)
    press(dialog, "Add")
    empty.wait_for(dialog.found.isVisible)
    assert empty.called("nodes.add") == [("this-pc", "Debian", None)]
    press(dialog, "Done")


def test_what_comes_late_interrupts_no_adding(empty, dialog):
    assert dialog.focusWidget() is dialog.form.target
    empty.core.delay_s = 60.0
    QTest.keyClicks(dialog.form.target, "anna@192.168.1.31")
    QTest.keyClick(dialog.form.target, Qt.Key.Key_Return)
    empty.wait_for(lambda: "Connecting" in dialog.banner.message())
    dialog._show_distros(("Ubuntu",))
    enabled = [one.accessibleName() for one in dialog.findChildren(Button) if one.isEnabled()]
    shown = [name for name in enabled if name in ("Add", "Cancel", "Choose\u2026", "Find PCs")]
    assert shown == ["Cancel"]
    assert dialog.focusWidget().accessibleName() == "Cancel"


def test_windows_without_a_linux_says_how_to_get_one(empty, monkeypatch):
    monkeypatch.setattr("app.gui.nodes.add_node_form.IS_WINDOWS", True)
    press(empty.window, "Add this PC")
    dialog = open_dialog(AddNodeDialog)
    empty.settle(0.1)
    assert not dialog.form.this_pc.isVisible()
    assert "wsl --install" in dialog.form.problems["distro"].text()
    assert dialog.form.problems["distro"].isVisible()
    assert not dialog.add.isEnabled()
    dialog.reject()


def test_the_table_keeps_its_selection_while_figures_move(busy):
    QTest.keyClick(busy.window, Qt.Key.Key_2, Qt.KeyboardModifier.ControlModifier)
    page = busy.window.nodes
    assert page.isVisible()
    page.table.select("gamma")
    busy.core.on_loop(busy.core.put_node, busy.core.node_map["alpha"])
    busy.core.on_loop(busy.core.put_node, busy.core.node_map["gamma"])
    busy.settle(0.1)
    assert page.table.selected().name == "gamma"


def test_the_details_follow_the_clock_that_samples_tell_of(busy):
    busy.window.go_to("nodes")
    page = busy.window.nodes
    page.table.select("alpha")
    labels = page.details.findChildren(QLabel)
    value = labels[[label.text() for label in labels].index("Clock") + 1]
    assert value.text() == "\u2013"
    busy.core.on_loop(publish_history, busy.core, 3)
    busy.wait_for(lambda: value.text() == "in sync")


def test_no_two_buttons_of_the_page_have_the_same_icon(busy):
    busy.window.go_to("nodes")
    shown = [one for one in busy.window.nodes.findChildren(Button) if one.isVisible()]
    icons = [button._icon for button in shown if button._icon]
    assert len(icons) > 4
    assert len(set(icons)) == len(icons)


def test_enter_presses_a_button_of_a_page_once(busy):
    busy.window.go_to("nodes")
    page = busy.window.nodes
    page.table.select("alpha")
    button = page._buttons["measure"]
    button.setFocus()
    held = QKeyEvent(
        QEvent.Type.KeyPress, Qt.Key.Key_Return, Qt.KeyboardModifier.NoModifier, "", True
    )
    busy.application.sendEvent(button, held)
    assert busy.called("nodes.calibrate") == []
    QTest.keyClick(button, Qt.Key.Key_Return)
    busy.wait_for(lambda: "plans use it" in page.banner.message())
    assert len(busy.called("nodes.calibrate")) == 1


def test_long_work_can_be_cancelled_where_it_is_told(busy):
    busy.window.go_to("nodes")
    page = busy.window.nodes
    page.table.select("alpha")
    busy.core.delay_s = 30.0
    for words in ("Measure", "Set up environment", "Check all nodes"):
        press(busy.window, words)
        busy.wait_for(lambda: page.banner.isVisible())
        press(page, "Cancel")
        assert "cancelled" in page.banner.message()
    busy.core.delay_s = 0.0
    press(page, "Measure")
    busy.wait_for(lambda: "plans use it" in page.banner.message())


def test_a_node_that_does_not_answer_can_be_woken(busy):
    busy.window.go_to("nodes")
    page = busy.window.nodes
    page.table.select("alpha")
    assert not page._buttons["wake"].isVisible()
    page.table.select("epsilon")
    press(page, "Wake")
    busy.wait_for(lambda: "epsilon answers" in page.banner.message())
    assert busy.called("nodes.wake") == [("epsilon",)]


def test_remove_asks_first_and_cancel_is_safe(busy):
    busy.window.go_to("nodes")
    busy.window.nodes.table.select("delta")
    answer_question("Cancel")
    press(busy.window.nodes, "Remove")
    assert busy.called("nodes.remove") == []
    answer_question("Remove")
    press(busy.window.nodes, "Remove")
    busy.wait_for(lambda: "delta" not in busy.cluster.nodes)
    assert "delta" not in [node.name for node in busy.window.nodes.model.rows()]


def test_set_up_shows_its_end_and_its_failure(busy):
    busy.window.go_to("nodes")
    busy.window.nodes.table.select("alpha")
    press(busy.window.nodes, "Set up environment")
    busy.wait_for(lambda: "ready to train" in busy.window.nodes.banner.message())
    busy.core.failure = UserError("The disk of alpha is full.", "Free 8 GiB.")
    press(busy.window.nodes, "Set up environment")
    busy.wait_for(lambda: "Free 8 GiB" in busy.window.nodes.banner.message())


def test_hashes_of_an_index_are_taken_after_a_press_of_their_button(busy):
    busy.window.go_to("nodes")
    page = busy.window.nodes
    page.table.select("alpha")
    busy.core.failure = UnshippedLock("alpha", "cu126", "https://index.example/cu126")
    press(page, "Set up environment")
    busy.wait_for(lambda: "hashes Rackless does not ship" in page.banner.message())
    assert "--accept-index" not in page.banner.message()
    assert busy.called("nodes.setup") == [("alpha",)]
    press(page, "Lock cu126 and set up")
    busy.wait_for(lambda: "ready to train" in page.banner.message())
    assert busy.called("nodes.setup") == [("alpha",), ("alpha", True)]


def test_a_check_shows_the_worst_first_with_a_fix_to_copy(busy, application):
    busy.window.go_to("nodes")
    press(busy.window.nodes, "Check all nodes")
    results = busy.window.nodes.results
    busy.wait_for(lambda: results.table.selected() is not None)
    assert results.table.selected().status == "fail"
    press(results, "Copy fix")
    assert application.clipboard().text() == "sudo ufw allow from 192.168.1.0/24"
    message = "packets of more than 1472 bytes do not arrive there " * 8
    results.show_rows((make_row("all-reduce", "beta", "unknown", message, "wait"),))
    results.table.selectRow(0)
    shown = [label.text() for label in results.findChildren(QLabel) if label.isVisible()]
    assert message in shown, "the table cuts it"
    label = next(one for one in results.findChildren(QLabel) if one.text() == message)
    results.show_rows((make_row("all-reduce", "beta", "unknown", "x" * 60, "wait"),))
    results.table.selectRow(0)
    assert not label.isVisible()
    busy.window.resize(960, 600)
    busy.wait_for(label.isVisible, "the narrower window cuts the shorter one as well")


def test_a_second_check_ends_the_first(busy, monkeypatch):
    check, gates = busy.core.answers[CheckNodes], [asyncio.Event(), asyncio.Event()]
    ended = []

    async def held_check(action, report):
        number = len(ended)
        ended.append("under way")
        try:
            await gates[number].wait()
        except asyncio.CancelledError:
            ended[number] = "cancelled"
            raise
        return await check(action, report)

    monkeypatch.setitem(busy.core.answers, CheckNodes, held_check)
    busy.window.go_to("nodes")
    press(busy.window.nodes, "Check all nodes")
    busy.wait_for(lambda: ended == ["under way"])
    press(busy.window.nodes, "Check again")
    busy.wait_for(lambda: ended == ["cancelled", "under way"])
    busy.core.on_loop(gates[1].set)
    busy.wait_for(lambda: len(busy.window.nodes.results.model.rows()) == 7)


def test_the_table_of_nodes_takes_no_more_height_than_its_rows(busy):
    busy.window.go_to("nodes")
    page = busy.window.nodes
    busy.settle(0.1)
    for number in (5, 4):
        last = page.table.model().index(number - 1, 0)
        below_px = page.table.viewport().height() - page.table.visualRect(last).bottom()
        assert 0 <= below_px < 2 * page.table.rowHeight(0), "all rows show, and little else"
        busy.core.on_loop(busy.core.events.publish, NodeRemoved("delta"))
        busy.wait_for(lambda: len(page.model.rows()) == 4)
        busy.settle(0.1)


def test_rows_of_a_check_appear_while_it_runs(busy, monkeypatch):
    check, may_end = busy.core.answers[CheckNodes], asyncio.Event()

    async def slow_check(action, report):
        rows = await check(action, report)
        await may_end.wait()
        return rows

    monkeypatch.setitem(busy.core.answers, CheckNodes, slow_check)
    busy.window.go_to("nodes")
    results = busy.window.nodes.results

    def texts():
        return "\n".join(label.text() for label in results.findChildren(QLabel))

    press(busy.window.nodes, "Check all nodes")
    busy.wait_for(lambda: "3 of 9 links measured" in busy.window.nodes.banner.message())
    shown = results.model.rows()
    assert "fail" in {row.status for row in shown}
    assert "Checking; rows appear" in texts()
    busy.core.on_loop(may_end.set)
    busy.wait_for(lambda: "1 failed" in texts())
    assert results.model.rows() == shown
    assert "Read there: connect 192.168.1.12:41877: timed out" in texts()
    may_end.clear()
    press(busy.window.nodes, "Check all nodes")
    busy.wait_for(lambda: "3 of 9 links measured" in busy.window.nodes.banner.message())
    press(busy.window.nodes.banner, "Cancel")
    assert "Checking; rows appear" not in texts()
    assert f"was cancelled. The rows below were known by then. {len(shown)} checks" in texts()
    assert results.model.rows() == shown
    busy.core.failure = UserError("The disk is full.", "Free some.")
    press(results, "Check again")
    busy.wait_for(lambda: "The check broke off. No row was known by then." in texts())


def test_dialogs_do_not_pile_up(busy):
    assert find_dialog(QDialog) is None


def test_links_are_a_matrix_that_says_what_is_not_measured(busy):
    page = busy.window.nodes
    busy.window.go_to("nodes")
    page.tabs.setCurrentWidget(page.links)
    names = [node.name for node in busy.cluster.node_list()]
    cells = {row.node: row.cells for row in page.links.model.rows()}
    assert [row.node for row in page.links.model.rows()] == names
    assert {cells[one][other].text for one in names for other in names} == {
        "\u2013",
        "not measured",
    }
    press(page.links, "Measure links")
    busy.wait_for(lambda: page.links.model.rows()[0].cells["gamma"].text == "117 MB/s, 0.40 ms")
    assert page.tabs.currentWidget() is page.links, "one stays where one was"
    cells = {row.node: row.cells for row in page.links.model.rows()}
    assert cells["alpha"]["beta"].text == "not measured"
    assert cells["beta"]["alpha"].tone == "warning"
    assert "1 link not measured" in page.links.summary.text()
    busy.bridge.do(RemoveNode(name="gamma"))
    busy.wait_for(lambda: "gamma" not in {row.node for row in page.links.model.rows()})
    assert page.links.table.model().columnCount() == len(names)


def test_the_log_of_a_node_is_read_when_somebody_looks(busy):
    page = busy.window.nodes
    busy.window.go_to("nodes")
    page.table.select("alpha")
    busy.settle(0.05)
    assert busy.called("nodes.logs") == []
    page.tabs.setCurrentWidget(page.log)
    busy.wait_for(lambda: page.log.view.document.num_lines > 60)
    document = page.log.view.document
    first = document.line(0)
    assert first.startswith("== support-chat-7f3a, attempt 1, rank-0.log, written")
    assert document.line(document.end_line - 1) == "step 412 loss 1.3700"
    page.table.select("delta")
    busy.wait_for(lambda: "No logs on delta" in page.log.summary.text())
    assert page.log.view.document.num_lines == 0
    page.table.select("epsilon")
    busy.wait_for(lambda: "epsilon is off" in page.log.summary.text())
    page.table.select("beta")
    busy.wait_for(lambda: "2 logs on beta" in page.log.summary.text())
    press(page.log, "Refresh")
    busy.wait_for(lambda: len(busy.called("nodes.logs")) == 5)


def test_a_node_in_wsl_offers_the_script_for_its_windows(busy, tmp_path):
    page = busy.window.nodes
    busy.window.go_to("nodes")
    alpha = busy.cluster.nodes["alpha"]
    busy.core.put_node(replace(alpha, facts=replace(alpha.facts, wsl="nat")))
    busy.wait_for(lambda: busy.cluster.nodes["alpha"].facts.wsl == "nat")
    page.table.select("beta")
    assert not page.script.isVisible()
    page.table.select("alpha")
    press(page, "Script for Windows\u2026")
    dialog = open_dialog(WindowsScriptDialog)
    busy.wait_for(dialog.save.isEnabled)
    assert "Keep WSL running (administrator)" in dialog.steps.text()
    dialog.memory.setValue(24)
    busy.wait_for(dialog.save.isEnabled)
    dialog.save_file(tmp_path / "alpha.ps1")
    busy.wait_for(lambda: "Saved" in dialog.banner.message())
    assert b'"memory_gib": 24' in (tmp_path / "alpha.ps1").read_bytes()
    dialog.save_file(tmp_path)
    busy.wait_for(lambda: "cannot be written" in dialog.banner.message())
    dialog.reject()


def test_a_windows_pc_that_is_no_node_yet_gets_its_script(empty, dialog, tmp_path):
    press(dialog, "Script for a Windows PC")
    script = open_dialog(WindowsScriptDialog)
    empty.wait_for(script.save.isEnabled)
    assert script.name.text() == "node-1"
    script.name.selectAll()
    QTest.keyClicks(script.name, "red")
    empty.wait_for(lambda: "as red: USER@" in script.command.text())
    script.save_file(tmp_path / "red.ps1")
    empty.wait_for(lambda: "Saved" in script.banner.message())
    assert b"red" in (tmp_path / "red.ps1").read_bytes()
    script.reject()
