"""The whole window: keyboard, both themes, closing, crashes, memory, a free thread."""

import json
import sys
import threading
import time
from dataclasses import replace

from PySide6.QtCore import Qt
from PySide6.QtTest import QTest

from app.core.runs import StopRun
from app.errors import UserError
from app.gui.application import core_opener
from app.gui.kit.actions import TEXTS
from app.gui.kit.primitives import Button
from app.gui.session.bridge import Bridge
from app.gui.shell.crash_dialog import CrashHook, make_report
from app.gui.shell.window_state import FILE_NAME, WindowState, read_window_state, write_window_state
from tests.fakes.core import FakeCore, publish_history, running_run
from tests.gui.cpu_wait import TurnTime
from tests.gui.pictures import BUSY
from tests.gui.stage import answer_question

# ---------------------------------------------------------------- keys


def test_tab_reaches_the_cards_and_every_shortcut_is_told(busy):
    focused = set()
    for _ in range(40):
        QTest.keyClick(busy.application.focusWidget() or busy.window, Qt.Key.Key_Tab)
        focused.add(type(busy.application.focusWidget()).__name__)
    assert {"DeviceCard", "Button", "QToolButton"} <= focused
    in_menus = {
        action.text()
        for menu in busy.window.menuBar().actions()
        for action in menu.menu().actions()
    }
    for name, texts in TEXTS.items():
        if texts.shortcut and busy.window.actions_.has(name):
            assert texts.text in in_menus, f"{texts.shortcut} stands in no menu"
    assert "Ctrl+N" in busy.window.actions_["new_run"].toolTip()


def test_both_themes_paint_every_page(busy, theme):
    busy.core.on_loop(publish_history, busy.core, 10)
    try:
        for scheme in (Qt.ColorScheme.Dark, Qt.ColorScheme.Light):
            theme.choose(scheme)
            grounds = set()
            for scene in ("overview", "nodes", "runs", "run-ranks"):
                image = BUSY[scene](busy).grab().toImage()
                grounds.add(image.pixelColor(200, 790).name())
            assert grounds == {theme.palette.window}
    finally:
        theme.choose(Qt.ColorScheme.Light)


def test_the_choice_of_colours_is_stored(busy, theme):
    busy.window.actions_["dark"].trigger()
    busy.wait_for(lambda: busy.core.chosen == {"theme": "dark"})
    busy.window.actions_["light"].trigger()


# ---------------------------------------------------------------- closing, crashing, remembering


def test_closing_says_once_that_runs_go_on(busy):
    busy.window.state.was_told_closing = False
    answer_question("Cancel")
    assert not busy.window.close()
    assert busy.window.isVisible()
    answer_question("Close the window")
    assert busy.window.close()
    assert busy.window.state.was_told_closing
    assert busy.window.state.geometry
    busy.window.show()
    assert busy.window.close(), "said only once"


def test_closing_with_nothing_under_way_asks_nothing(empty):
    assert empty.window.close()


def test_closing_waits_for_the_core_without_stopping_a_run(busy):
    busy.window.state.was_told_closing = True
    closed = []
    busy.bridge.closed.connect(lambda: closed.append(1))
    busy.window.finished.connect(busy.bridge.stop)
    busy.window.close()
    busy.wait_for(lambda: closed)
    assert busy.called("runs.stop") == []


def test_with_a_tray_closing_hides_and_says_so_once(busy):
    told = []
    busy.window.hidden.connect(told.append)
    busy.context.preferences.set("when_closed", "tray")
    busy.wait_for(lambda: busy.core.chosen == {"when_closed": "tray"})
    busy.window.close_policy.has_tray = lambda: True
    QTest.keyClick(busy.window, Qt.Key.Key_W, Qt.KeyboardModifier.ControlModifier)
    assert not busy.window.isVisible()
    busy.window.come_forward()
    assert busy.window.isVisible()
    assert not busy.window.close()
    assert not busy.window.is_over
    assert told[0][0] == "Rackless stays in the tray"
    assert told[1] is None
    busy.window.state.was_told_closing = True
    busy.window.hide()
    busy.window.quit()
    assert busy.window.is_over
    assert busy.called("runs.stop") == []


def test_without_a_tray_closing_ends_whatever_was_chosen(empty):
    empty.context.preferences.set("when_closed", "tray")
    assert empty.window.close()
    assert empty.window.is_over


def test_a_session_that_ends_is_not_held_up_by_the_tray_or_a_question(busy):
    busy.context.preferences.set("when_closed", "tray")
    busy.window.close_policy.has_tray = lambda: True
    busy.window.expect_end()
    assert busy.window.close()


def test_the_window_remembers(tmp_path, make_stage):
    state = WindowState(geometry="00ff", page="nodes", was_told_closing=True, was_told_hiding=True)
    write_window_state(tmp_path, state)
    assert read_window_state(tmp_path) == state
    for broken in ("{", "[]", '{"page": 3, "other": 1}', '"x"'):
        (tmp_path / FILE_NAME).write_text(broken)
        assert read_window_state(tmp_path) == WindowState()
    write_window_state(tmp_path / "file-in-the-way" / "x", state)
    assert json.loads((tmp_path / "file-in-the-way" / "x" / FILE_NAME).read_text())
    (tmp_path / "plain").write_text("")
    write_window_state(tmp_path / "plain", state)


def test_a_crash_is_one_dialog_with_a_report_to_copy(application, theme, monkeypatch):
    for name in ("excepthook",):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(sys, "__excepthook__", lambda *args: None)
    hook = CrashHook(theme)
    hook.install()

    def fail():
        raise KeyError("deep inside")

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    end_s = time.monotonic() + 5
    while hook.dialog is None and time.monotonic() < end_s:
        application.processEvents()
    first = hook.dialog
    assert "deep inside" in first.report
    assert "in fail" in first.report
    hook.show_crash("a second one")
    assert hook.dialog is first
    first.accept()
    assert hook.dialog is None


def test_a_report_tells_versions_and_no_names(monkeypatch):
    report = make_report("Traceback")
    assert "PySide6" in report
    assert "Traceback" in report


def test_an_error_without_a_place_of_its_own_shows_above_the_page(busy):
    busy.core.failure = UserError("The store is full.", "Free some space.")
    busy.bridge.do(StopRun(run_id="support-chat-7f3a"))
    busy.wait_for(lambda: "Free some space" in busy.window.banner.message())


def test_what_the_store_has_to_say_shows_above_the_page(make_stage):
    stage = make_stage(FakeCore(notice="The database was damaged and moved aside."))
    stage.wait_for(lambda: "moved aside" in stage.window.banner.message())


def test_the_real_core_opens_behind_the_window(application, tmp_path):
    bridge = Bridge(core_opener(tmp_path / "home"))
    opened, failed = [], []
    bridge.opened.connect(lambda nodes, runs: opened.append((nodes, runs)))
    bridge.open_failed.connect(failed.append)
    bridge.crashed.connect(failed.append)
    bridge.start()
    end_s = time.monotonic() + 30
    while not (opened or failed) and time.monotonic() < end_s:
        application.processEvents()
        time.sleep(0.005)
    bridge.stop()
    bridge.join()
    assert failed == []
    assert opened == [((), ())]


# ---------------------------------------------------------------- a thread that is never blocked


def test_slow_nodes_never_block_the_window(busy):
    """Every action takes 0.4 s and figures flood in; the Qt thread stays free all the time."""
    busy.core.delay_s = 0.4
    busy.core.on_loop(publish_history, busy.core, 120)
    busy.window.open_run("support-chat-7f3a")
    busy.settle(0.5)
    gaps = []
    deeds = [
        busy.window.refresh,
        lambda: busy.window.go_to("nodes"),
        busy.window.nodes.check_all,
        lambda: busy.window.go_to("overview"),
        lambda: busy.window.open_run("support-chat-7f3a"),
        lambda: busy.core.on_loop(busy.core.put_run, replace(running_run(), step=500)),
        lambda: busy.window.go_to("runs"),
    ]
    end_s, turn = time.perf_counter() + 2.0, 0
    while time.perf_counter() < end_s:
        not_free = TurnTime()
        busy.core.on_loop(busy.core.put_sample, "alpha", 1000 + turn)
        busy.core.on_loop(busy.core.put_log, "support-chat-7f3a", 2, 0, b"line\n" * 50)
        if turn % 10 == 0:
            deeds[turn // 10 % len(deeds)]()
        busy.application.processEvents()
        gaps.append(not_free.seconds())
        turn += 1
        time.sleep(0.005)
    gaps.sort()
    assert gaps[int(len(gaps) * 0.9)] < 0.05, f"worst {gaps[-5:]}"
    assert gaps[-1] < 0.35, "far below the 0.4 s that each action takes"


def test_an_empty_page_offers_each_action_once_and_one_of_them_first(empty):
    for place in ("overview", "nodes", "runs", "artifacts"):
        empty.window.go_to(place)
        page = empty.window.stack.currentWidget()
        empty.wait_for(lambda page=page: bool(_shown_buttons(page)), place)
        shown = _shown_buttons(page)
        names = [button.accessibleName() for button in shown]
        assert len(set(names)) == len(names), place
        assert [button.objectName() for button in shown].count("primary") == 1, place


def _shown_buttons(page):
    return [button for button in page.findChildren(Button) if button.isVisible()]
