"""What is drawn can be had as text: the wall as a table, a chart point by point and as a table."""

import numpy as np
import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication

from app.gui.charts.figures_dialog import FiguresDialog, FiguresModel
from app.gui.charts.line import LineSeries
from app.gui.charts.reading import next_step
from app.gui.shell.window_state import WindowState, read_window_state, write_window_state
from app.telemetry.stream import DeviceKey
from app.text import show_loss
from tests.fakes.core import busy_core, publish_history

RUN = "support-chat-7f3a"


def cells(table):
    """Return the texts of a table as they are shown."""
    model = table.model()
    across = range(model.columnCount())
    return [[model.index(row, c).data() for c in across] for row in range(model.rowCount())]


def test_the_wall_as_a_table_has_what_the_cards_paint(busy):
    busy.core.on_loop(publish_history, busy.core, 30)
    overview = busy.window.overview
    QTest.mouseClick(overview.view, Qt.MouseButton.LeftButton)
    assert overview.table.isVisible()
    assert not overview.wall.isVisible()
    assert overview.view.accessibleName() == "Show as cards"
    busy.wait_for(lambda: any("1,040" in row for row in cells(overview.table.table)))
    rows = cells(overview.table.table)
    assert len(rows) == len(overview.wall.cards())
    alpha = next(row for row in rows if row[0] == "alpha")
    assert alpha[1:4] == ["GPU 0", "RTX 5070 Ti", "training support-chat \u00b7 rank 0"]
    assert alpha[5].endswith("/ 16.0 GiB")
    lost = next(row for row in rows if row[0] == "epsilon")
    assert lost[3].startswith("unreachable")
    assert lost[4] == "\u2013", "figures of a node that does not answer are not current"


def test_enter_on_a_row_opens_its_run(busy):
    overview = busy.window.overview
    overview.show_as_table(True)
    overview.table.table.select(DeviceKey("alpha", "cuda:0"))
    QTest.keyClick(overview.table.table, Qt.Key.Key_Return)
    assert busy.window.run_page().run_id == RUN


def test_the_choice_is_remembered(make_stage, tmp_path):
    write_window_state(tmp_path, WindowState(wall_as_table=True))
    stage = make_stage(busy_core(tmp_path), state=read_window_state(tmp_path))
    stage.wait_for(stage.window.overview.table.isVisible)
    QTest.mouseClick(stage.window.overview.view, Qt.MouseButton.LeftButton)
    assert stage.window.state.wall_as_table is False


@pytest.fixture
def plot(busy):
    busy.window.open_run(RUN)
    plot = busy.window.run_page().charts.others["speed"]
    busy.wait_for(lambda: len(plot.curves) > 0)
    plot.setFocus()
    return plot


def test_arrow_keys_read_a_chart_point_by_point(plot):
    QTest.keyClick(plot, Qt.Key.Key_Right)
    first = plot.accessibleDescription()
    assert first.startswith("step 1, ")
    assert first.endswith("attempt 1")
    QTest.keyClick(plot, Qt.Key.Key_Right)
    second = plot.accessibleDescription()
    assert int(second.split()[1].rstrip(",")) > 1
    QTest.keyClick(plot, Qt.Key.Key_Left)
    assert plot.accessibleDescription() == first
    QTest.keyClick(plot, Qt.Key.Key_Left)
    assert plot.accessibleDescription() == first, "before the first point there is none"
    plot.extend(2, [5000.0], [0.5])
    assert plot.accessibleDescription() == first, "news does not interrupt who reads"
    plot.clearFocus()
    plot.extend(2, [5001.0], [0.5])
    assert plot.accessibleDescription().endswith(" at step 5,001")


def test_a_chart_of_several_lines_reads_them_all(busy, plot):
    loss = busy.window.run_page().charts.loss
    QTest.keyClick(loss, Qt.Key.Key_Left)
    said = loss.accessibleDescription().split("; ")
    assert [part.split(", ")[1] for part in said] == [line.name for line in loss.lines]


def test_reading_on_moves_what_is_in_view(plot):
    plot.show_range(plot.visible().zoomed(0.2, 100.0))
    before = plot.visible()
    for _ in range(3):
        QTest.keyClick(plot, Qt.Key.Key_Left)
    assert plot.visible() == before
    plot._hover = before.low
    QTest.keyClick(plot, Qt.Key.Key_Left)
    assert plot.visible().low < before.low


def test_the_next_step_is_the_nearest_of_all_lines():
    lines = [LineSeries("a", "accent"), LineSeries("b", "accent")]
    lines[0].curves.extend(1, [1.0, 10.0, 20.0], [0.0, 0.0, 0.0])
    lines[1].curves.extend(1, [4.0, 12.0], [0.0, 0.0])
    assert next_step(lines, 1.0, 0.5) == 4.0
    assert next_step(lines, 1.0, 9.5) == 12.0
    assert next_step(lines, 12.0, -0.5) == 10.0
    assert next_step(lines, 1.0, -0.5) is None
    assert next_step(lines, 20.0, 0.5) is None
    assert next_step([], 20.0, 0.5) is None


def test_enter_shows_a_chart_as_a_table(plot):
    QTest.keyClick(plot, Qt.Key.Key_Return)
    dialog = plot.findChild(FiguresDialog)
    assert dialog.isVisible()
    assert dialog.windowTitle() == "Throughput, tokens/s"
    rows = cells(dialog.table)
    assert len(rows) == len(plot.curves)
    assert rows[0][1] == "1"
    assert {row[2] for row in rows} == {"1", "2"}
    dialog.close()


def test_a_table_of_a_million_figures_is_there_at_once():
    line = LineSeries("loss", "accent")
    steps = np.arange(1_000_000, dtype=float)
    line.curves.extend(1, steps.tolist(), (steps / 7).tolist())
    model = FiguresModel([line], line.curves.full_range(), show_loss)
    assert model.rowCount() == 1_000_000
    assert model.index(999_999, 1).data() == "999,999"
    assert FiguresModel([], line.curves.full_range(), show_loss).rowCount() == 0


def test_a_table_of_figures_copies_them(plot):
    plot.show_table()
    dialog = plot.findChild(FiguresDialog)
    copy = next(
        b for b in dialog.findChildren(type(plot.window().overview.view))
        if b.accessibleName() == "Copy as text"
    )  # fmt: skip
    copy.click()
    assert QApplication.clipboard().text().startswith("step\tattempt\t")
    dialog.close()
