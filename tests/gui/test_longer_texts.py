"""Every page, dialog and step in a language whose words are 30 % longer: no text is cut.

On a dense screen, where 960 x 600 is all that a screen of 1920 x 1200 has. The scale must be known
before Qt starts, so it runs in a process of its own.

pytest -m campaign tests/gui/test_longer_texts.py      opens all of them: a minute
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PySide6.QtCore import QRectF
from PySide6.QtGui import QFontMetricsF
from PySide6.QtWidgets import QPushButton, QVBoxLayout, QWidget

from app.gui.kit.flow_layout import FlowLayout
from app.gui.kit.primitives import make_label
from app.gui.kit.theme import Theme
from app.gui.overview.card import _CAPTIONS, MIN_WIDTH_PX, DeviceCard
from app.telemetry.state import Status
from tests.gui.reach import lengthen

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.campaign
def test_nothing_is_cut_at_200_percent_in_a_longer_language():
    environment = dict(os.environ, QT_QPA_PLATFORM="offscreen", QT_SCALE_FACTOR="2")
    done = subprocess.run(
        [sys.executable, "-m", "tests.gui.longer"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-2000:]


def test_words_grow_and_figures_stay():
    assert lengthen("Nodes online") == "Nodesee onlineee"
    assert lengthen("412 / 1,200 \u00b7 13.4 GiB") == "412 / 1,200 \u00b7 13.4 GiBe"


@pytest.mark.parametrize("width", [MIN_WIDTH_PX, 420])
def test_the_words_of_a_card_keep_clear_of_each_other(busy, theme, monkeypatch, width):
    drawn = []

    def record(self, painter, line, text, size_px, color, *, weight=400, is_right=False):
        wide = QFontMetricsF(self.font(size_px, weight)).horizontalAdvance(text)
        left = line.right() - wide if is_right else line.left()
        drawn.append((text, QRectF(left, line.center().y() - 6, wide, 12)))

    monkeypatch.setattr(Theme, "paint_text", record)
    monkeypatch.setattr(
        "app.gui.overview.card._CAPTIONS", tuple((lengthen(text), room) for text, room in _CAPTIONS)
    )
    device = busy.window.overview.wall.cards()[0].device
    card = DeviceCard(theme, device, Status("error", lengthen("throttled: power limit") * 3))
    card.resize(width, 224)
    card.grab()
    assert drawn
    for place, (text, area) in enumerate(drawn):
        assert area.left() >= 0
        assert area.right() <= width, text
        for other, there in drawn[place + 1 :]:
            assert not area.intersects(there), f"'{text}' and '{other}' overlap"
    card.deleteLater()


def make_row(width, *, lead):
    box = QWidget()
    title = make_label("Title", "title") if lead else None
    row = FlowLayout(lead=title)
    buttons = [QPushButton(f"Button number {number}") for number in range(4)]
    for button in buttons:
        row.addWidget(button)
    QVBoxLayout(box).addLayout(row)
    box.resize(width, 300)
    box.show()
    box.layout().activate()
    return box, title, buttons


@pytest.mark.parametrize("lead", [True, False])
def test_a_row_breaks_where_it_is_too_narrow(application, theme, lead):
    box, title, buttons = make_row(1200, lead=lead)
    assert len({button.y() for button in buttons}) == 1
    if title is not None:
        assert title.x() < buttons[0].x()
        assert buttons[-1].geometry().right() >= box.width() - 24
    box.resize(320, 300)
    box.layout().activate()
    assert len({button.y() for button in buttons}) > 1
    for button in buttons:
        assert button.width() >= button.sizeHint().width()
        assert box.rect().contains(button.geometry())
    buttons[0].hide()
    box.layout().activate()
    assert buttons[1].y() <= buttons[2].y()
    box.deleteLater()


def test_words_that_wrap_push_their_layout_apart(application, theme):
    box = QWidget()
    column = QVBoxLayout(box)
    label = make_label("Some words. " * 30, wraps=True)
    column.addWidget(label)
    column.addWidget(QPushButton("Below"))
    box.resize(300, 10)
    box.show()
    application.processEvents()
    assert label.height() >= label.heightForWidth(label.width())
    box.deleteLater()
