"""Names of 200 characters, ten nodes, figures of a run that diverged: the window stays usable."""

from __future__ import annotations

from dataclasses import replace

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication, QTextDocument
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QVBoxLayout, QWidget

from app.core.artifacts import PlanExport
from app.errors import UserError
from app.events import RunEvent
from app.gui.export.export_wizard import ExportWizard
from app.gui.kit.primitives import make_label, make_selectable
from app.gui.new_run.new_run_dialog import NewRunDialog
from app.gui.runs.resume_dialog import ResumeDialog
from tests.fakes.core import make_node, running_run
from tests.fakes.exports import make_export_plan
from tests.gui.stage import open_dialog

RUN = "support-chat-7f3a"
LONG_WORD = "chats_of_the_second_quarter_without_any_gap_" * 5
LONG_PATH = f"/home/anna/{LONG_WORD}.jsonl"
NAMES = [f"workstation-{place}.lab-building-seven-second-floor-room-0042" for place in range(10)]


@pytest.fixture
def many(busy):
    for name in NAMES:
        busy.core.put_node(make_node(name, ("NVIDIA GeForce RTX 4070", 12)))
    busy.wait_for(lambda: NAMES[-1] in busy.cluster.nodes)
    return busy


def test_a_long_word_is_broken_and_copied_whole(application, theme):
    box = QWidget()
    column = QVBoxLayout(box)
    label = make_selectable(make_label(f"there is no {LONG_PATH}", wraps=True))
    column.addWidget(label)
    box.resize(300, 200)
    box.show()
    application.processEvents()
    assert box.width() == 300
    assert label.height() >= 6 * label.fontMetrics().height(), "the path takes several lines"
    assert label.text() == f"there is no {LONG_PATH}"
    label.setFocus()
    QTest.keyClick(label, Qt.Key.Key_A, Qt.KeyboardModifier.ControlModifier)
    QTest.keyClick(label, Qt.Key.Key_C, Qt.KeyboardModifier.ControlModifier)
    assert QGuiApplication.clipboard().text() == label.text() == label.selectedText()
    box.deleteLater()


def test_a_long_path_in_a_message_pushes_no_button_out_of_sight(busy):
    busy.window.open_run(RUN)
    page = busy.window.run_page()
    page.banner.show_error(UserError(f"there is no file {LONG_PATH}", f"Give it: {LONG_PATH}"))
    busy.settle()
    assert page.head.width() < busy.window.width()


def test_a_long_answer_leaves_the_form_as_wide_as_it_was(busy):
    busy.window.actions_["new_run"].trigger()
    dialog = open_dialog(NewRunDialog)
    dialog.form.fields["adapter.rank"].set_answer(LONG_WORD)
    dialog.form.fields["adapter.rank"]._touch()
    busy.settle()
    assert dialog.form.widget().width() == dialog.form.viewport().width()
    dialog.reject()


def test_the_perplexity_of_a_run_that_diverged_leaves_the_page_as_wide_as_it_was(busy):
    busy.window.open_run(RUN)
    page = busy.window.run_page()
    busy.core.on_loop(busy.core.put_run, replace(running_run(), perplexity=1e304, loss=700.0))
    busy.wait_for(lambda: page.progress.figures["perplexity"].text() == "1.00e+304")
    assert page.head.width() < busy.window.width()


def test_a_tip_shows_a_text_as_it_is_on_several_lines(busy):
    busy.window.open_run(RUN)
    page = busy.window.run_page()
    text = "rank 0: <b>bold</b> & " + "the disk is full, " * 40
    for said in ("it trains", text):
        page.events.put(RunEvent(run_id=RUN, time_s=1.0, severity="error", text=said))
    tips = {
        str(page.events.index(row, column).data(Qt.ItemDataRole.ToolTipRole))
        for row in range(page.events.rowCount())
        for column in range(page.events.columnCount())
    }
    assert "it trains" in tips
    shown = QTextDocument()
    shown.setHtml(max(tips, key=len))
    assert shown.toPlainText().strip() == text.strip()


def test_ten_nodes_leave_the_form_as_wide_as_it_was(many):
    many.window.actions_["new_run"].trigger()
    dialog = open_dialog(NewRunDialog)
    dialog.resize(dialog.minimumSize())
    many.settle()
    assert dialog.form.widget().width() == dialog.form.viewport().width()
    dialog.reject()


def test_ten_nodes_fit_the_dialog_that_resumes(many):
    dialog = ResumeDialog(many.context, many.window, many.cluster.runs[RUN])
    dialog.open()
    many.settle()
    assert dialog.width() <= 800
    last = dialog.boxes[NAMES[-1]]
    last.setFocus()
    assert last.parentWidget().height() > last.y(), "the last one can be scrolled to"
    dialog.close()


def test_ten_nodes_fit_the_wizard(many, monkeypatch):
    async def plan(action, report):
        plan = make_export_plan(action.request.to, action.request.types)
        place = plan.places[0]
        return replace(plan, places=tuple(replace(place, node=name) for name in NAMES))

    monkeypatch.setitem(many.core.answers, PlanExport, plan)
    wizard = ExportWizard(many.context, many.window, many.cluster.runs[RUN])
    wizard.show()
    wizard.formats.boxes["nf4"].click()
    wizard.go_to("where")
    many.wait_for(lambda: NAMES[-1] in wizard.places.nodes)
    many.settle()
    assert wizard.minimumSizeHint().height() <= 600
    wizard.close()
