"""The tray: what its icon, menu and notifications say, and that nothing needs it."""

from dataclasses import replace

import pytest
from PySide6.QtWidgets import QSystemTrayIcon

from app.gui.shell.tray import Tray, draw_tray_icon
from app.telemetry.whole import Whole
from tests.fakes.core import publish_history, running_run

RUN = "support-chat-7f3a"


class FakeIcon(QSystemTrayIcon):
    """An icon whose notifications a test can read; there is no tray to show them in."""

    def __init__(self):
        super().__init__()
        self.told = []

    def showMessage(self, title, text, sign, shown_ms):  # noqa: N802 - Qt's name
        self.told.append((title, text))


@pytest.fixture
def tray(busy):
    tray = Tray(busy.context, busy.window, FakeIcon())
    busy.window.close_policy.has_tray = lambda: True
    return tray


def end_run(stage, state="done", **values):
    stage.core.on_loop(stage.core.put_run, replace(running_run(), state=state, **values))
    stage.wait_for(lambda: stage.cluster.runs[RUN].state == state)


def menu_of(tray):
    return {action.text(): action for action in tray.menu.actions() if action.text()}


def test_a_click_on_the_notification_opens_the_run(busy, tray):
    busy.window.hide()
    end_run(busy, "failed", message="gamma has no memory left.")
    assert tray.icon.told == [("support-chat has failed", "gamma has no memory left.")]
    tray.icon.messageClicked.emit()
    assert busy.window.isVisible()
    assert busy.window.stack.currentWidget() is busy.window.run_page()


def test_in_front_it_is_told_above_the_page(busy, tray):
    end_run(busy)
    assert tray.icon.told == []
    assert "support-chat has finished" in busy.window.banner.message()
    busy.window.banner._action.click()
    assert busy.window.stack.currentWidget() is busy.window.run_page()


def test_without_a_tray_nothing_is_lost(busy, tray):
    busy.window.close_policy.has_tray = lambda: False
    busy.window.showMinimized()
    end_run(busy)
    assert tray.icon.told == []
    busy.window.come_forward()
    assert "support-chat has finished" in busy.window.banner.message()


@pytest.mark.parametrize(
    ("key", "state"), [("notify_finished", "done"), ("notify_problems", "failed")]
)
def test_what_is_switched_off_is_not_told(busy, tray, key, state):
    busy.context.preferences.set(key, False)
    busy.window.hide()
    end_run(busy, state)
    assert tray.icon.told == []


def test_a_hot_gpu_is_told_once(busy, tray, monkeypatch):
    monkeypatch.setattr("app.telemetry.alerts.GPU_HOT_CELSIUS", 60.0)
    busy.window.hide()
    busy.core.on_loop(publish_history, busy.core, 20)
    busy.wait_for(lambda: len(tray.icon.told) >= 4)
    busy.settle(0.1)
    assert len(tray.icon.told) == len({title for title, _ in tray.icon.told})
    assert "RTX 5070 Ti in alpha is hot" in tray.icon.told[0][0]
    tray.icon.messageClicked.emit()
    assert busy.window.stack.currentWidget() is busy.window.nodes


def test_the_menu_follows_the_runs(busy, tray):
    tray.refresh()
    before = menu_of(tray)
    assert any(text.startswith("support-chat 34 %") for text in before)
    assert "Rackless:" in tray.icon.toolTip()
    busy.window.hide()
    next(action for text, action in before.items() if text.startswith("support")).trigger()
    assert busy.window.isVisible()
    end_run(busy)
    tray.refresh()
    assert not any(text.startswith("support-chat 34 %") for text in menu_of(tray))
    menu_of(tray)["New run"].trigger()
    dialog = next(w for w in busy.application.topLevelWidgets() if w.windowTitle() == "New run")
    dialog.close()


def test_quit_in_the_menu_ends_it_and_stops_no_run(busy, tray):
    busy.context.preferences.set("when_closed", "tray")
    busy.window.state.was_told_closing = True
    busy.window.close()
    assert tray.icon.told[-1][0] == "Rackless stays in the tray"
    assert not busy.window.is_over
    menu_of(tray)["Quit Rackless"].trigger()
    assert busy.window.is_over
    assert busy.called("runs.stop") == []


def test_states_differ_in_shape_and_not_in_colour_alone(theme):
    def ink(tone, share):
        image = draw_tray_icon(theme, Whole(tone=tone, share=share, text="")).pixmap(64).toImage()
        return {
            (x, y) for x in range(64) for y in range(64) if image.pixelColor(x, y).alpha() > 160
        }

    shapes = [ink("calm", None), ink("busy", 0.2), ink("busy", 0.7), ink("warning", 0.2)]
    shapes.append(ink("error", 0.2))
    for number, one in enumerate(shapes):
        for other in shapes[number + 1 :]:
            assert len(one ^ other) > 60
