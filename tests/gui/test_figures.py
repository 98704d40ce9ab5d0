"""The window shows what is so now: no frozen figures, no state that is over, no guessed lack."""

from dataclasses import replace

import pytest
from PySide6.QtCore import QPoint, QPointF, Qt
from PySide6.QtGui import QWheelEvent
from PySide6.QtTest import QTest
from PySide6.QtWidgets import (
    QAbstractItemView,
    QAbstractSpinBox,
    QApplication,
    QComboBox,
    QPlainTextEdit,
)

from app.errors import NodeUnreachable
from app.events import NodeChanged, RunChanged
from app.gui.new_run.new_run_dialog import NewRunDialog
from app.gui.session.banner_task import show_error_while
from app.gui.shell.tray import Tray
from app.telemetry.notices import Notice
from tests.fakes.core import NOW_S, running_run
from tests.gui.stage import find_dialog, open_dialog

RUN = "support-chat-7f3a"


@pytest.fixture
def new_run(busy):
    QTest.keyClick(busy.window, Qt.Key.Key_N, Qt.KeyboardModifier.ControlModifier)
    dialog = open_dialog(NewRunDialog)
    yield dialog
    if find_dialog(NewRunDialog) is dialog:
        dialog.reject()


def lose(stage, name, seen_s=NOW_S - 12):
    node = replace(
        stage.core.node_map[name], state="unreachable", problem="It is off.", last_seen_s=seen_s
    )
    stage.core.on_loop(stage.core.put_node, node)
    stage.wait_for(lambda: stage.cluster.nodes[name].state == "unreachable")


def put_run(stage, **values):
    run = replace(stage.cluster.runs[RUN], **values)
    stage.core.on_loop(stage.core.put_run, run)
    stage.wait_for(lambda: stage.cluster.runs[RUN] == run)


# ---------------------------------------------------------------- silent nodes


def test_ranks_of_a_lost_node_show_since_when_nothing_came(busy):
    busy.window.open_run(RUN)
    page = busy.window.run_page()
    busy.wait_for(lambda: bool(page.ranks.rows()))
    lose(busy, "beta")
    states = {rank.rank: rank for rank in page.ranks.rows()}
    column = next(c for c in page.ranks.columns if c.title == "State")
    assert column.status(states[1]).text == "silent for 12 s"
    assert (states[1].tokens_per_s, states[1].step) == (None, None)
    assert states[0].tokens_per_s is not None
    assert "beta unreachable" in page.head.state.accessibleName()


def test_a_run_whose_nodes_are_all_lost_has_no_speed_on_any_page(busy):
    for name in busy.cluster.runs[RUN].nodes:
        lose(busy, name)
    line = busy.window.overview.strip._lines[RUN]
    assert line._figures["speed"].text() == "\u2013"
    assert line._figures["left"].text() == "\u2013"
    row = next(run for run in busy.window.runs.model.rows() if run.run_id == RUN)
    assert (row.tokens_per_s, row.remaining_s) == (None, None)


def test_the_ranks_figures_of_an_ended_run_are_back_after_a_restart(busy):
    whole = replace(running_run(), state="done", phase=None)
    bare = replace(whole, ranks=tuple(replace(r, step=None, step_s=None) for r in whole.ranks))
    busy.core.run_map[RUN] = whole
    # As a list of all runs has it: the journals of an ended run are not read for it.
    busy.cluster._apply(RunChanged(bare))
    busy.window.open_run(RUN)
    page = busy.window.run_page()
    busy.wait_for(lambda: {r.step for r in page.ranks.rows()} == {412})


# ---------------------------------------------------------------- logs


def test_the_log_of_an_earlier_attempt_can_be_opened(busy):
    busy.core.old_logs_map[RUN, 1, 0, "gamma"] = b"an earlier line\n"
    busy.window.open_run(RUN)
    page = busy.window.run_page()
    put_run(busy, attempt=2)
    logs = page.logs
    busy.wait_for(lambda: logs.attempts.count() == 2 and logs._size_bytes is not None)
    assert logs.attempts.itemText(0) == "Attempt 2, newest"
    logs.attempts.setCurrentIndex(1)
    busy.wait_for(lambda: logs.view.document.num_lines > 0 and logs._size_bytes is not None)
    assert logs.view.document.line(0) == "an earlier line"
    assert logs.ranks.currentText() == "Rank 0 on gamma"
    # The run goes on: what the user reads stays.
    put_run(busy, step=415)
    assert logs.view.document.line(0) == "an earlier line"


# ---------------------------------------------------------------- banners


def test_a_notice_of_a_run_goes_when_its_state_is_over(busy):
    tray = Tray(busy.context, busy.window)
    put_run(busy, state="interrupted", message="beta was lost")
    assert "was interrupted" in busy.window.banner.message()
    put_run(busy, state="running", attempt=3, message="")
    assert busy.window.banner.message() == ""
    tray.notify(Notice(kind="hot", tone="warning", title="RTX is hot", text="", node="alpha"))
    assert "hot" in busy.window.banner.message()
    busy.cluster.devices_changed.emit([])
    assert busy.window.banner.message() == "", "no device of alpha is hot"


def test_an_error_about_a_node_goes_when_the_node_is_back(busy):
    busy.window.go_to("nodes")
    banner = busy.window.nodes.banner
    lose(busy, "alpha")
    error = NodeUnreachable("alpha cannot be reached", where="alpha")
    show_error_while(busy.context, busy.window.nodes.banner, error)
    put_run(busy, step=413)
    assert "alpha" in banner.message()
    node = replace(busy.core.node_map["alpha"], state="online", problem="")
    busy.core.on_loop(busy.core.put_node, node)
    busy.wait_for(lambda: banner.message() == "")


# ---------------------------------------------------------------- unknown is not none


def test_nothing_is_called_missing_before_the_first_answer(busy):
    nodes, runs = busy.cluster.node_list(), busy.cluster.run_list()
    cluster = busy.cluster
    cluster.is_open = False
    cluster.nodes.clear()
    busy.window.runs.model.reset([])
    for page in (busy.window.runs, busy.window.nodes):
        page._choose()
        assert page._stack.currentIndex() == 2, "looking for them"
    QTest.keyClick(busy.window, Qt.Key.Key_N, Qt.KeyboardModifier.ControlModifier)
    dialog = open_dialog(NewRunDialog)
    field = dialog.form.fields["nodes"]
    try:
        assert "Looking for your nodes" in field._finding.text()
        assert not field._boxes
        cluster._fill(nodes, runs)
        assert set(field._boxes) == {node.name for node in nodes}
        ticked = {name for name, box in field._boxes.items() if box.isChecked()}
        assert ticked == {node.name for node in nodes if node.state == "online"}
        assert "Looking" not in field._finding.text()
        cluster._apply(NodeChanged(replace(nodes[0], state="unreachable")))
        assert not field._boxes[nodes[0].name].isChecked(), "it cannot take part any more"
        field._boxes[nodes[1].name].click()
        cluster._apply(NodeChanged(nodes[0]))
        assert not field._boxes[nodes[0].name].isChecked(), "the user has chosen"
    finally:
        dialog.reject()


def test_a_form_opened_while_nodes_connect_waits_for_them(busy, new_run):
    field = new_run.form.fields["nodes"]
    alpha = busy.cluster.nodes["alpha"]
    busy.cluster._apply(NodeChanged(replace(alpha, state="connecting")))
    assert "Connecting to alpha" in field._finding.text()
    busy.cluster._apply(NodeChanged(alpha))
    assert "Connecting" not in field._finding.text()
    assert field._boxes["alpha"].isChecked()


# ---------------------------------------------------------------- the wheel


def roll_over(widget):
    at = QPointF(widget.rect().center())
    event = QWheelEvent(
        at,
        widget.mapToGlobal(at),
        QPoint(),
        QPoint(0, -240),
        Qt.MouseButton.NoButton,
        Qt.KeyboardModifier.NoModifier,
        Qt.ScrollPhase.NoScrollPhase,
        False,
    )
    QApplication.sendEvent(widget, event)


def test_scrolling_over_an_answer_and_typing_changes_nothing(busy, new_run):
    busy.window.open_run(RUN)
    for name in ("settings", "nodes", "runs", "artifacts"):
        busy.window.go_to(name)
    inputs = [
        widget
        for root in (busy.window, new_run)
        for kind in (QComboBox, QAbstractSpinBox, QPlainTextEdit, QAbstractItemView)
        for widget in root.findChildren(kind)
        # The list that a combo box opens takes the wheel, and closes with it.
        if not isinstance(widget.parent().parent() if widget.parent() else None, QComboBox)
    ]
    assert len(inputs) > 20
    assert [w for w in inputs if w.focusPolicy() == Qt.FocusPolicy.WheelFocus] == []
    answers = new_run.answers()
    for box in new_run.findChildren(QComboBox):
        roll_over(box)
    assert new_run.answers() == answers
