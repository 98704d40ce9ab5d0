"""Runs side by side, and the filter of their table."""

from dataclasses import replace

from PySide6.QtCore import Qt
from PySide6.QtTest import QTest

from app.flows.compare import list_differences
from app.gui.runs.compare_page import ComparePage
from tests.fakes.core import make_steps
from tests.gui.stage import press

RUN = "support-chat-7f3a"


def click_row(busy, place, modifier=Qt.KeyboardModifier.NoModifier):
    table = busy.window.runs.table
    middle = table.visualRect(table.model().index(place, 0)).center()
    QTest.mouseClick(table.viewport(), Qt.MouseButton.LeftButton, modifier, middle)


def test_selected_runs_are_drawn_in_one_chart(busy):
    core, window = busy.core, busy.window
    other = next(run for run in core.run_map.values() if run.state == "done")
    spec = replace(other.spec, learning_rate=5e-5, batch_sequences=7)
    core.on_loop(core.put_run, replace(other, spec=spec))
    core.step_map[other.run_id] = make_steps(60)
    window.go_to("runs")
    busy.wait_for(lambda: window.runs.table.model().rowCount() == 4)
    buttons = window.runs._buttons
    busy.wait_for(lambda: busy.cluster.runs[other.run_id].spec == spec)
    click_row(busy, 0)
    assert not buttons["compare"].isEnabled()
    click_row(busy, 2, Qt.KeyboardModifier.ControlModifier)
    assert buttons["compare"].isEnabled()
    assert not buttons["stop"].isEnabled(), "which of the two would it stop?"
    press(window, "Compare")
    page = window.stack.currentWidget()
    assert isinstance(page, ComparePage)
    busy.wait_for(lambda: all(len(line.curves) for line in page.charts[0].plot.lines))
    names = [line.name for line in page.charts[0].plot.lines]
    assert names == ["support-chat", "recipes"]
    looks = {(line.color, line.pattern) for line in page.charts[0].plot.lines}
    assert len(looks) == 2
    rows = {row.label: row.values for row in page.model.rows()}
    assert rows["Learning rate"][1] == "5e-05"
    assert rows["State"] == ("running", "done")
    assert "Model" not in rows, "it is the same"
    page.charts[1].choice.setCurrentIndex(4)
    assert len(page.charts[1].plot.lines) == 2
    QTest.keyClick(window, Qt.Key.Key_Escape)
    assert window.stack.currentWidget() is window.runs


def test_a_step_that_comes_meanwhile_is_drawn(busy):
    core, window = busy.core, busy.window
    runs = [run for run in core.run_map.values() if run.state in ("running", "done")]
    window.compare_runs(runs)
    page = window.stack.currentWidget()
    line = page.charts[0].plot.lines
    busy.wait_for(lambda: any(len(one.curves) for one in page.charts[0].plot.lines))
    before = sum(len(one.curves) for one in page.charts[0].plot.lines)
    last = core.step_map[RUN][-1]
    core.on_loop(core.put_steps, RUN, (replace(last, step=last.step + 1),))
    busy.wait_for(lambda: sum(len(o.curves) for o in page.charts[0].plot.lines) == before + 1)
    assert line


def test_words_choose_the_rows(busy):
    window = busy.window
    window.go_to("runs")
    table = window.runs.table
    busy.wait_for(lambda: table.model().rowCount() == 4)
    for words, count in (("interrupted", 1), ("GAMMA llama", 2), ("nothing(", 0), ("", 4)):
        window.runs.filter.setText(words)
        assert table.model().rowCount() == count, words


def test_runs_alike_differ_in_nothing(busy):
    run = busy.core.run_map[RUN]
    assert list_differences([run, replace(run, name="again")]) == []
