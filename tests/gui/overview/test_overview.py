"""Overview: first start, live cards, sums, the strip of runs, the demo's story."""

from dataclasses import replace

import numpy as np
import pytest
from PySide6.QtCore import QEvent, QPoint, Qt
from PySide6.QtGui import QHelpEvent
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QPushButton, QToolTip

from app.core.nodes import RemoveNode
from app.events import NodeSnapshot
from app.gui.charts.sparkline import make_polygon
from app.gui.overview.wall import CardPlace, arrange, choose_columns
from app.gui.shell.shell import DemoProgress
from app.gui.tables.device_columns import device_columns
from app.telemetry.stream import DeviceKey
from tests.fakes.core import NOW_S, make_node, publish_history, running_run
from tests.gui.stage import press

RUN = "support-chat-7f3a"


def test_an_empty_window_says_what_belongs_there_and_offers_it(empty):
    names = {b.accessibleName() for b in empty.window.findChildren(QPushButton) if b.isVisible()}
    assert {"Add this PC", "Add a PC"} <= names
    assert "Run the demo" not in names, "no dead button: there is no story to tell"
    assert ("nodes.connect", ()) in empty.core.calls or empty.wait_for(
        lambda: ("nodes.connect", ()) in empty.core.calls
    ) is None


def test_the_demo_shows_its_steps_and_a_failure(make_stage, tmp_path):
    from app.errors import UserError
    from tests.fakes.core import FakeCore

    async def story(core, report):
        report(DemoProgress((("Start", "done"), ("Train", "now")), "step 3"))
        report(DemoProgress((("Start", "done"), ("Train", "failed"))))
        raise UserError("rank 1 was lost", "start again")

    stage = make_stage(FakeCore(log_folder=tmp_path), demo=story)
    press(stage.window, "Run the demo")
    stage.wait_for(lambda: "rank 1 was lost" in stage.window.banner.message())
    strip = stage.window.overview.story
    assert strip.isVisible()
    assert [words.accessibleName() for _, words in strip._marks] == ["Start: done", "Train: failed"]


def test_every_device_has_a_card_with_figures_or_a_dash(busy):
    busy.core.on_loop(publish_history, busy.core, 30)
    cards = {card.device.key: card for card in busy.window.overview.wall.cards()}
    assert len(cards) == 6
    alpha = cards[DeviceKey("alpha", "cuda:0")]
    busy.wait_for(lambda: alpha.device.reading.utilisation is not None)
    busy.settle(0.1)
    assert "training support-chat" in alpha.accessibleName()
    assert "tokens per second" in alpha.accessibleDescription()
    lost = cards[DeviceKey("epsilon", "cuda:0")]
    assert "unreachable for 12 s" in lost.accessibleName()
    assert lost.accessibleDescription() == "no data"


def test_clock_and_fan_are_on_the_card_and_in_the_table_or_a_dash(busy):
    busy.core.on_loop(publish_history, busy.core, 3)
    overview = busy.window.overview
    cards = {card.device.key.node: card for card in overview.wall.cards()}
    busy.wait_for(lambda: "clock 2,400 MHz" in cards["alpha"].accessibleDescription())
    assert "fan unknown" in cards["alpha"].accessibleDescription()
    tips = []
    for tile in (0, 2):
        spot = cards["alpha"]._tile(tile).center().toPoint()
        spot_on_screen = cards["alpha"].mapToGlobal(spot)
        QApplication.sendEvent(
            cards["alpha"], QHelpEvent(QEvent.Type.ToolTip, spot, spot_on_screen)
        )
        tips.append(QToolTip.text().splitlines()[-1])
    assert tips == ["Clock: 2,400 MHz", "Fan: \u2013"]
    overview.show_as_table(True)
    model = overview.table.model
    busy.wait_for(lambda: bool(model.rows()))
    columns = {column.title: column for column in device_columns()}
    rows = {row.key.node: row for row in model.rows()}
    figures = {
        name: (columns["MHz"].text(row), columns["Fan"].text(row)) for name, row in rows.items()
    }
    assert figures["alpha"] == ("2,400", "\u2013")
    assert figures["epsilon"] == ("\u2013", "\u2013"), "it does not respond"
    with_fan = replace(rows["alpha"], reading=replace(rows["alpha"].reading, fan=0.4))
    assert columns["Fan"].text(with_fan) == "40 %"


def test_only_the_cards_with_news_repaint(busy):
    busy.core.on_loop(publish_history, busy.core, 5)
    painted = []
    for card in busy.window.overview.wall.cards():
        original = card.paintEvent
        card.paintEvent = lambda event, card=card, original=original: (
            painted.append(card.device.key.node),
            original(event),
        )
    # A busy PC still paints the history after any fixed time, so wait until nothing paints.
    busy.settle(0.2)
    while painted:
        painted.clear()
        busy.settle(0.2)
    busy.core.on_loop(busy.core.put_sample, "delta", 500)
    busy.settle(0.15)
    assert set(painted) == {"delta"}


def test_the_sums_count_only_what_answers(busy):
    busy.core.on_loop(publish_history, busy.core, 3)
    values = busy.window.overview.totals._values
    busy.wait_for(lambda: values["power"].text() != "\u2013")
    assert values["nodes"].text() == "4 of 5"
    assert values["devices"].text() == "4 GPUs \u00b7 1 CPU"


def test_a_lost_node_and_a_new_node_change_the_wall(busy):
    node = busy.core.node_map["alpha"]
    busy.core.on_loop(busy.core.put_node, replace(node, state="unreachable", last_seen_s=NOW_S - 3))
    busy.core.on_loop(busy.core.put_node, make_node("zeta"))
    wall = busy.window.overview.wall
    busy.wait_for(lambda: len(wall.cards()) == 7)
    assert any("unreachable for 3" in card.accessibleName() for card in wall.cards())
    busy.core.on_loop(lambda: busy.bridge.do(RemoveNode(name="zeta")))
    busy.wait_for(lambda: len(wall.cards()) == 6)


def test_a_node_that_is_not_reached_yet_has_a_place_without_facts(empty):
    node = NodeSnapshot(name="new", transport="ssh", address="a@new:22", state="connecting")
    empty.core.on_loop(empty.core.put_node, node)
    empty.wait_for(lambda: "new" in empty.window.overview.wall._heads)
    assert empty.window.overview.wall.cards() == []


def test_a_click_or_enter_on_a_card_opens_what_runs_there(busy):
    wall = busy.window.overview.wall
    card = next(c for c in wall.cards() if c.device.key.node == "alpha")
    QTest.mouseClick(card, Qt.MouseButton.LeftButton, pos=QPoint(40, 40))
    assert busy.window.stack.currentWidget() is busy.window.run_page()
    assert busy.window.run_page().run_id == RUN
    busy.window.go_to("overview")
    idle = next(c for c in wall.cards() if c.device.key.node == "delta")
    idle.setFocus()
    QTest.keyClick(idle, Qt.Key.Key_Return)
    assert busy.window.stack.currentWidget() is busy.window.nodes
    assert busy.window.nodes.table.selected().name == "delta"


def test_the_strip_follows_the_run_and_goes_with_it(busy):
    strip = busy.window.overview.strip
    assert strip.isVisible()
    line = strip._lines[RUN]
    busy.core.on_loop(busy.core.put_run, running_run(600))
    busy.wait_for(lambda: "600" in line._figures["step"].text())
    press(busy.window.overview.strip, "Open run support-chat")
    assert busy.window.run_page().run_id == RUN
    busy.window.go_to("overview")
    busy.core.on_loop(busy.core.put_run, replace(running_run(1200), state="done"))
    busy.wait_for(lambda: not strip.isVisible())


@pytest.mark.parametrize(
    ("counts", "columns", "places"),
    [
        ([1, 1, 1], 3, [CardPlace(0, 1, 0, 1), CardPlace(1, 1, 0, 1), CardPlace(2, 1, 0, 1)]),
        ([1, 2], 2, [CardPlace(0, 1, 0, 1), CardPlace(0, 2, 268, 1)]),
        ([5], 2, [CardPlace(0, 2, 0, 3)]),
        ([0, 1], 2, [CardPlace(0, 1, 0, 1), CardPlace(1, 1, 0, 1)]),
        ([], 4, []),
    ],
)
def test_groups_stand_side_by_side_where_they_fit(counts, columns, places):
    assert arrange(counts, columns) == places


def test_more_columns_on_wider_screens():
    assert [choose_columns(width) for width in (100, 640, 1056, 2200, 3600)] == [1, 2, 3, 7, 11]


def test_polygons_are_written_without_a_loop():
    polygon = make_polygon(np.array([1.0, 2.0]), np.array([3.0, 4.5]))
    assert [(p.x(), p.y()) for p in polygon.toList()] == [(1.0, 3.0), (2.0, 4.5)]
