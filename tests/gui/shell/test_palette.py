"""The command palette, with real keys."""

from PySide6.QtCore import Qt
from PySide6.QtTest import QTest

from tests.gui.stage import answer_question

RUN = "support-chat-7f3a"


def open_palette(stage):
    focused = stage.application.focusWidget() or stage.window
    QTest.keyClick(focused, Qt.Key.Key_K, Qt.KeyboardModifier.ControlModifier)
    palette = stage.window.findChild(object, "palette")
    stage.wait_for(palette.isVisible, "the palette is open")
    assert stage.application.focusWidget() is palette.field
    return palette


def press(palette, key):
    QTest.keyClick(palette.field, key)


def choose(stage, text):
    palette = open_palette(stage)
    QTest.keyClicks(palette.field, text)
    press(palette, Qt.Key.Key_Return)
    assert not palette.isVisible()


def test_pages_runs_and_nodes_by_name(busy):
    window = busy.window
    choose(busy, "artif")
    assert window.stack.currentWidget() is window.artifacts
    choose(busy, "support-chat")
    assert window.stack.currentWidget() is window.run_page()
    choose(busy, "beta")
    assert window.stack.currentWidget() is window.nodes
    choose(busy, "overv")
    assert window.stack.currentWidget() is window.overview


def test_a_run_is_stopped_by_its_name_after_the_question(busy):
    answer_question("Stop run")
    choose(busy, "stop supp")
    busy.wait_for(lambda: busy.called("runs.stop") == [(RUN,)])


def test_arrows_go_round_and_a_screen_reader_hears_the_row(busy):
    palette = open_palette(busy)
    QTest.keyClicks(palette.field, "poems")
    titles = palette.titles()
    assert titles[0] == "poems"
    assert {"Resume poems", "Repeat poems"} <= set(titles)
    assert "poems" in palette.field.accessibleDescription()
    press(palette, Qt.Key.Key_Up)
    assert palette.list.currentIndex().row() == len(titles) - 1
    press(palette, Qt.Key.Key_Down)
    press(palette, Qt.Key.Key_Down)
    assert palette.list.currentIndex().row() == 1
    assert titles[1] in palette.field.accessibleDescription()


def test_escape_gives_the_keys_back(busy):
    busy.window.go_to("runs")
    busy.window.runs.table.setFocus()
    palette = open_palette(busy)
    press(palette, Qt.Key.Key_Escape)
    assert not palette.isVisible()
    assert busy.application.focusWidget() is busy.window.runs.table
    palette = open_palette(busy)
    QTest.keyClick(palette.field, Qt.Key.Key_K, Qt.KeyboardModifier.ControlModifier)
    assert not palette.isVisible()


def test_nothing_found_says_so_and_enter_does_nothing(busy):
    palette = open_palette(busy)
    QTest.keyClicks(palette.field, "zzz")
    assert palette.titles() == []
    press(palette, Qt.Key.Key_Return)
    assert palette.isVisible()


def test_a_click_elsewhere_closes_it(busy):
    palette = open_palette(busy)
    busy.window.go_to("runs")
    busy.window.runs.table.setFocus()
    assert not palette.isVisible()


def test_it_offers_what_can_be_done_and_every_shortcut(empty):
    empty.window.actions_["check"].setEnabled(False)
    palette = open_palette(empty)
    titles = palette.titles()
    assert "Check all nodes" not in titles
    assert {"Add a PC", "New run", "Overview", "Theme: Dark"} <= set(titles)
