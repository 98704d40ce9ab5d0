"""The page of settings and the list of shortcuts, with real keys."""

import zipfile
from pathlib import Path

import pytest
from PySide6.QtCore import QPoint, QPointF, Qt
from PySide6.QtGui import QGuiApplication, QWheelEvent
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QFileDialog, QLabel, QPushButton

from app.errors import LoginRefused, UserError
from app.gui.session.preferences import preferences_of
from app.gui.shell.help_dialog import HelpDialog
from app.hub.node_tokens import NodeToken
from app.settings import SETTINGS, Settings
from tests.gui.stage import answer_question, find_dialog, open_dialog, press


@pytest.fixture
def page(empty):
    QTest.keyClick(empty.window, Qt.Key.Key_Comma, Qt.KeyboardModifier.ControlModifier)
    page = empty.window.settings_page()
    assert empty.window.stack.currentWidget() is page
    return page


def test_every_setting_is_there_with_its_name_value_and_explanation(page):
    said = {label.text() for label in page.findChildren(QLabel)}
    for setting in SETTINGS:
        assert {setting.title, setting.description, setting.section} <= said
        assert page.rows[setting.key].control.accessibleName() == setting.title


def test_a_choice_is_taken_at_once_and_stored(empty, page, theme):
    control = page.rows["theme"].control
    control.setFocus()
    QTest.keyClick(control, Qt.Key.Key_Down)
    assert theme.palette.name == "dark"
    empty.wait_for(lambda: empty.core.chosen == {"theme": "dark"})
    empty.window.actions_["light"].trigger()
    assert control.currentData() == "light", "the menu and the page agree"
    QTest.keyClick(page.rows["notify_hot"].control, Qt.Key.Key_Space)
    assert empty.context.preferences.get("notify_hot") is False
    box = page.rows["lost_after_s"].control
    box.selectAll()
    QTest.keyClicks(box, "30")
    QTest.keyClick(box, Qt.Key.Key_Return)
    empty.wait_for(lambda: empty.core.chosen.get("lost_after_s") == 30.0)


def test_the_wheel_scrolls_and_changes_nothing(page):
    control = page.rows["when_closed"].control
    place = QPointF(control.rect().center())
    wheel = QWheelEvent(
        place, control.mapToGlobal(place), QPoint(0, 0), QPoint(0, -120),
        Qt.MouseButton.NoButton, Qt.KeyboardModifier.NoModifier, Qt.ScrollPhase.NoScrollPhase,
        False,
    )  # fmt: skip
    QApplication.sendEvent(control, wheel)
    assert control.currentData() == "end"
    assert not wheel.isAccepted()


def test_a_value_that_cannot_be_stored_is_told(empty, page, monkeypatch):
    def fail(key, value):
        raise UserError("The disk is full.", "Free some space.")

    monkeypatch.setattr(empty.core, "set", fail)
    page.rows["notify_hot"].control.click()
    empty.wait_for(lambda: "Free some space" in empty.window.banner.message())


def test_a_token_is_given_and_forgotten_and_never_shown(empty, page):
    row = page.token
    empty.wait_for(lambda: "No token" in row.state.text())
    QTest.keyClicks(row.field, "hf_secret0123456789")
    assert "secret" not in row.field.displayText()
    QTest.keyClick(row.field, Qt.Key.Key_Return)
    empty.wait_for(lambda: "anna" in row.banner.message())
    assert empty.called("hub.save_token") == [("hf_secret0123456789",)]
    assert row.field.text() == ""
    empty.wait_for(row.forget.isVisible)
    assert "secret" not in "".join(label.text() for label in page.findChildren(QLabel))
    row.forget.click()
    empty.wait_for(lambda: "deleted" in row.banner.message())
    empty.wait_for(lambda: "No token" in row.state.text())


def test_a_token_is_given_to_nodes_and_taken_back(empty, page):
    row = page.token
    empty.core.node_token_map = {
        name: NodeToken(node=name, place=place)
        for name, place in (("alpha", "none"), ("beta", "other"), ("gamma", "unknown"))
    }
    assert not row.give.isVisible()
    empty.core.token_place = "kept"
    row.refresh()
    empty.wait_for(row.give.isVisible)
    assert "Not on alpha. beta has its own. gamma cannot be asked." in row.nodes.text()
    assert not row.take.isVisible()
    row.give.click()
    empty.wait_for(lambda: row.nodes.text().startswith("On alpha."))
    assert not row.give.isVisible()
    row.take.click()
    empty.wait_for(row.give.isVisible)
    row.forget.click()
    empty.wait_for(lambda: "gamma did not respond" in row.banner.message())
    empty.wait_for(lambda: not row.nodes.isVisible())


def test_a_token_that_is_refused_can_be_corrected(empty, page):
    empty.core.failure = UserError("The hub does not know this token", "Make one.")
    page.token.field.setText("hf_wrong012345")
    page.token.keep.click()
    empty.wait_for(lambda: "does not know" in page.token.banner.message())
    assert page.token.keep.isEnabled()
    assert page.token.field.text() == "hf_wrong012345"


def test_what_is_stored_is_shown_and_a_broken_file_is_told(tmp_path):
    settings = Settings(tmp_path / "settings.json")
    settings.set("when_closed", "tray")
    assert preferences_of(Settings(tmp_path / "settings.json")).get("when_closed") == "tray"
    (tmp_path / "settings.json").write_text("{")
    broken = preferences_of(Settings(tmp_path / "settings.json"))
    assert "cannot be read" in broken.problem
    assert broken.get("when_closed") == "end"


def test_the_data_folder_is_told(empty, page):
    copy = next(b for b in page.findChildren(QLabel) if b.objectName() == "code")
    assert Path(copy.text()) == empty.context.home


def test_all_shortcuts_on_one_page(empty):
    QTest.keyClick(empty.window, Qt.Key.Key_F1)
    dialog = next(
        w for w in empty.application.topLevelWidgets() if w.windowTitle() == "Keyboard shortcuts"
    )
    assert ("Ctrl+K", "Command palette") in dialog.rows
    assert len({keys for keys, _ in dialog.rows}) == len(dialog.rows), "none has two meanings"
    next(
        b for b in dialog.children() if getattr(b, "text", str)().strip() == "Copy as text"
    ).click()
    assert "Ctrl+N\tNew run" in QGuiApplication.clipboard().text()
    QTest.keyClick(dialog, Qt.Key.Key_Escape)
    assert not dialog.isVisible()


def test_the_troubleshooting_page_is_searched_and_opened_by_a_link(empty):
    window = empty.window
    window.show_error(LoginRefused("pc accepts no key", "Copy yours there."))
    press(window.banner, "More about this")
    empty.wait_for(lambda: find_dialog(HelpDialog) is not None)
    dialog = open_dialog(HelpDialog)
    assert dialog.table.selected().topic == "login-refused"
    assert "ssh-copy-id" in dialog.reader.toPlainText()
    dialog.field.setText("no kernel image is available")
    QTest.keyClick(dialog.field, Qt.Key.Key_Return)
    assert dialog.table.selected().topic == "gpu-too-new"
    assert dialog.isVisible(), "Enter searches and does not close it"
    dialog.field.setText("xylophone")
    QTest.keyClick(dialog.field, Qt.Key.Key_Return)
    assert dialog.table.selected() is None
    assert not dialog.reader.toPlainText()
    window.actions_["help"].trigger()
    assert open_dialog(HelpDialog) is dialog, "one page, not two"
    dialog.close()
    window.banner.show_message("error", "Something else", "")
    assert not [
        b for b in window.banner.findChildren(QPushButton)
        if b.accessibleName() == "More about this" and b.isVisible()
    ]  # fmt: skip


def test_a_report_is_saved_where_the_person_says(empty, tmp_path, monkeypatch):
    file = tmp_path / "report.zip"
    file.write_text("the file dialog has asked whether to replace it")
    monkeypatch.setattr(QFileDialog, "getSaveFileName", lambda *args: (str(file), ""))
    monkeypatch.setattr(empty.window.dialogs, "_report", None)
    object.__setattr__(empty.context, "home", tmp_path / "home")
    answer_question("Choose a file")
    empty.window.actions_["save_report"].trigger()
    assert "Collecting" in empty.window.banner.message()
    empty.window.actions_["save_report"].trigger()  # asks nothing while one is under way
    empty.wait_for(lambda: "Collecting" not in empty.window.banner.message(), "the report ends")
    assert str(file) in empty.window.banner.message()
    assert zipfile.is_zipfile(file)

    monkeypatch.setattr(
        QFileDialog, "getSaveFileName", lambda *args: (str(tmp_path / "absent" / "r.zip"), "")
    )
    answer_question("Choose a file")
    empty.window.actions_["save_report"].trigger()
    empty.wait_for(lambda: "not saved" in empty.window.banner.message(), "the failure is said")
    assert "Name another file" in empty.window.banner.message()


def choose_with_mouse(control, text):
    """Open a combo box with a click, and click one of its choices."""
    QTest.mouseClick(control, Qt.MouseButton.LeftButton)
    # Qt takes a click that comes sooner for the second half of the first one.
    QTest.qWait(QApplication.doubleClickInterval() + 200)
    view = control.view()
    index = view.model().index(control.findText(text), 0)
    view.scrollTo(index)
    place = view.visualRect(index).center()
    assert view.isVisible()
    QTest.mouseClick(view.viewport(), Qt.MouseButton.LeftButton, pos=place)


def test_a_node_gets_a_setting_of_its_own_by_the_mouse_and_gives_it_back(busy):
    page = busy.window.nodes
    busy.window.go_to("nodes")
    page.open_node("gamma")
    bar = page.tabs.tabBar()
    place = page.tabs.indexOf(page.settings)
    QTest.mouseClick(bar, Qt.MouseButton.LeftButton, pos=bar.tabRect(place).center())
    pane = page.settings
    row = pane.rows["when_hot"]
    busy.wait_for(lambda: row.control.currentText() == "As on all nodes: warn me")
    said = {label.text() for label in pane.findChildren(QLabel)}
    setting = next(one for one in SETTINGS if one.key == "when_hot")
    assert {setting.title, setting.description} <= said
    choose_with_mouse(row.control, "Lower its power limit")
    busy.wait_for(lambda: busy.core.own_settings == {"gamma": {"when_hot": "limit"}})

    page.table.select("alpha")
    busy.wait_for(lambda: row.control.currentData() == "same", "another node has its own")
    assert "alpha" in pane.summary.text()
    busy.core.failure = UserError("The disk is full.", "Free some space.")
    choose_with_mouse(row.control, "Pause until it is cooler")
    busy.wait_for(lambda: "Free some space" in pane.banner.message())
    busy.wait_for(lambda: row.control.currentData() == "same", "what is stored is shown")

    busy.context.preferences.set("when_hot", "wait")
    page.table.select("gamma")
    busy.wait_for(lambda: row.control.currentData() == "limit")
    choose_with_mouse(row.control, "As on all nodes: pause until it is cooler")
    busy.wait_for(lambda: busy.core.own_settings == {"gamma": {}})
