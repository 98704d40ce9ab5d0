"""A person's first hour, with clicks and keys: three real nodes, one run, from first start to end.

The run is exported to two formats, and each is asked the same question beside its base in the chat.

Behind the window are the real core, three nodes behind SSH servers of their own with real agents,
and training of the demo's small model on the CPU. Only the training environment is adopted rather
than built, since its packages are some gigabytes; everything else goes through the window.
"""

from __future__ import annotations

import getpass
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import QPoint, Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QCheckBox, QDialog

from app.core.nodes import SetUpNode
from app.gui.chat.chat_dialog import ChatDialog, open_chat
from app.gui.export.export_wizard import ExportWizard
from app.gui.kit.confirm import ConfirmDialog
from app.gui.kit.theme import Theme
from app.gui.new_run.new_run_dialog import NewRunDialog
from app.gui.nodes.add_node_dialog import AddNodeDialog
from app.gui.runs.resume_dialog import ResumeDialog
from tests.fakes.site import DEMO, Site, slowed, tagged_processes
from tests.gui.real_stage import RealStage
from tests.gui.stage import press

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAMES = ("alpha", "beta", "gamma")
NUM_STEPS = 60
FORMATS = ("gguf:Q8_0", "nf4")
LIMIT_S = 150.0
"""Longest time for exports, and for models that are loaded to answer, in seconds."""
ANSWERS = {
    "name": "first-run",
    "model": str(DEMO / "model"),
    "data.train": str(DEMO / "train.jsonl"),
    "adapter.rank": "4",
    "adapter.alpha": "8",
    "sequence_tokens": "64",
    "batch_sequences": "6",
    "learning_rate": "1e-3",
}
ADVANCED_ANSWERS = {
    "adapter.dropout": "0",
    "max_steps": str(NUM_STEPS),
    "checkpoint.every_steps": "5",
}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    for name in NAMES:
        site.start_node(name)
    yield site
    site.close()


@pytest.fixture
def stage(
    site: Site, application: QApplication, theme: Theme, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RealStage]:
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    stage = RealStage(application, theme, site.home)
    yield stage
    stage.end()
    assert stage.crashes == []


def test_a_first_hour_with_clicks_and_keys(site: Site, stage: RealStage, tmp_path: Path) -> None:
    add_the_first_pc(site, stage)
    add_with_keys_alone(site, stage, "beta")
    add_with_keys_alone(site, stage, "gamma")
    adopt_environment(stage)
    measure_the_links(stage)
    run_id = start_a_run(stage)
    with slowed(run_id):
        watch_it(stage, run_id)
        stop_it(stage, run_id)
    read_the_log_of_a_node(stage, run_id)
    resume_on_two(site, stage, run_id)
    export_it(stage, tmp_path / "out")
    ask_the_models(stage, run_id)
    delete_it(site, stage, run_id)


def add_the_first_pc(site: Site, stage: RealStage) -> None:
    window = stage.window
    assert window.stack.currentWidget() is window.overview
    stage.press(window.overview, "Add a PC")
    dialog = stage.shown(AddNodeDialog)
    fill_address(site, stage, dialog, "alpha")
    stage.press(dialog, "Add")
    confirm_fingerprint(site, stage, dialog, "alpha")
    stage.press(dialog, "Fingerprint matches, add")
    stage.until(dialog.found.isVisible, "what was found is shown")
    assert dialog.found.setup.isVisible(), "it has no environment yet"
    stage.press(dialog, "Done")
    stage.until(lambda: stage.find(AddNodeDialog) is None, "the dialog has closed")
    stage.until(lambda: window.overview.wall.cards(), "the wall shows the node's device")


def add_with_keys_alone(site: Site, stage: RealStage, name: str) -> None:
    stage.key(Qt.Key.Key_N, Qt.KeyboardModifier.ControlModifier | Qt.KeyboardModifier.ShiftModifier)
    dialog = stage.shown(AddNodeDialog)
    fill_address(site, stage, dialog, name)
    stage.key(Qt.Key.Key_Return)
    confirm_fingerprint(site, stage, dialog, name)
    stage.key(Qt.Key.Key_Space)
    stage.until(dialog.found.isVisible, f"{name} is added")
    assert name in stage.cluster.nodes
    stage.key(Qt.Key.Key_Escape)
    stage.until(lambda: stage.find(AddNodeDialog) is None, "the dialog has closed")


def fill_address(site: Site, stage: RealStage, dialog: AddNodeDialog, name: str) -> None:
    stage.type(dialog.form.target, f"{getpass.getuser()}@127.0.0.1:{site.servers[name]['port']}")
    stage.type(dialog.form.key, str(site.key))
    stage.type(dialog.form.name, name)


def confirm_fingerprint(site: Site, stage: RealStage, dialog: AddNodeDialog, name: str) -> None:
    stage.until(dialog.confirm.isVisible, "the fingerprint is asked about")
    assert site.servers[name]["fingerprint"] in dialog.banner.message()
    assert name not in stage.cluster.nodes, "nothing is added before the confirmation"


def adopt_environment(stage: RealStage) -> None:
    ready: list[str] = []
    for name in NAMES:
        stage.bridge.do(
            SetUpNode(name=name, python=sys.executable),
            lambda report, name=name: ready.append(name),
        )
    stage.until(lambda: len(ready) == len(NAMES), "all nodes can train")


def measure_the_links(stage: RealStage) -> None:
    stage.key(Qt.Key.Key_2, Qt.KeyboardModifier.ControlModifier)
    page = stage.window.nodes
    page.tabs.setCurrentWidget(page.links)

    def ways() -> set[str]:
        rows = page.links.model.rows()
        return {row.cells[name].text for row in rows for name in NAMES if name != row.node}

    assert ways() == {"not measured"}
    stage.press(page.links, "Measure links")
    stage.until(lambda: all("MB/s" in way for way in ways()), "all six ways are measured")


def start_a_run(stage: RealStage) -> str:
    stage.key(Qt.Key.Key_N, Qt.KeyboardModifier.ControlModifier)
    dialog = stage.shown(NewRunDialog)
    for key, text in ANSWERS.items():
        stage.type(dialog.form.fields[key].input, text)
    QTest.mouseClick(dialog.form.fold.head, Qt.MouseButton.LeftButton)
    for key, text in ADVANCED_ANSWERS.items():
        stage.type(dialog.form.fields[key].input, text)
    boxes = dialog.form.fields["nodes"].findChildren(QCheckBox)
    assert [box.isChecked() for box in boxes] == [True] * len(NAMES)
    stage.press(dialog, "Start")
    stage.until(lambda: stage.find(NewRunDialog) is None, f"started; {dialog.banner.message()}")
    (run_id,) = stage.cluster.runs
    assert stage.window.stack.currentWidget() is stage.window.run_page()
    return run_id


def watch_it(stage: RealStage, run_id: str) -> None:
    page = stage.window.run_page()
    assert page.run_id == run_id
    stage.until(lambda: page.progress.figures["loss"].text() not in ("", "\u2013"), "a loss")
    assert float(page.progress.figures["loss"].text()) > 0
    assert {rank.node for rank in page.ranks.rows()} == set(NAMES)
    stage.until(
        lambda: stage.cluster.runs[run_id].newest_checkpoint_step is not None, "a checkpoint"
    )


def stop_it(stage: RealStage, run_id: str) -> None:
    stage.answer(ConfirmDialog, "Stop run")
    stage.press(stage.window.run_page().head, "Stop")
    stage.until(lambda: stage.cluster.runs[run_id].state == "stopped", "the run has stopped")
    assert (stage.cluster.runs[run_id].step or 0) < NUM_STEPS
    assert tagged_processes(run_id) == []


def read_the_log_of_a_node(stage: RealStage, run_id: str) -> None:
    page = stage.window.nodes
    stage.window.open_node("beta")
    page.tabs.setCurrentWidget(page.log)
    stage.until(lambda: page.log.view.document.num_lines > 1, "a log")
    assert page.log.view.document.line(0).startswith(f"== {run_id}, attempt 1, ")
    stage.window.open_run(run_id)


def resume_on_two(site: Site, stage: RealStage, run_id: str) -> None:
    def choose(dialog: QDialog) -> None:
        assert isinstance(dialog, ResumeDialog)
        stage.until(dialog.model.rows, "checkpoints")
        box = dialog.boxes["gamma"]
        tick = QPoint(8, box.height() // 2)
        QTest.mouseClick(box, Qt.MouseButton.LeftButton, pos=tick)
        assert dialog.choice().nodes == ("alpha", "beta")
        stage.press(dialog, "Resume")

    stage.when_shown(ResumeDialog, choose)
    page = stage.window.run_page()
    stage.press(page.head, "Resume\u2026")
    stage.until(lambda: stage.cluster.runs[run_id].state == "done", "the resumed run is done")
    run = stage.cluster.runs[run_id]
    assert (run.attempt, run.nodes, run.step) == (2, ("alpha", "beta"), NUM_STEPS)
    assert {rank.node for rank in page.ranks.rows()} == {"alpha", "beta"}
    assert not site.attempt("gamma", run_id, 2).exists()


def export_it(stage: RealStage, folder: Path) -> None:
    stage.press(stage.window.run_page().head, "Export\u2026")
    wizard = stage.shown(ExportWizard)
    stage.until(wizard.model.rows, "checkpoints")
    stage.press(wizard, "Next")
    for target in FORMATS:
        wizard.formats.boxes[target].setFocus()
        stage.key(Qt.Key.Key_Space)
    assert wizard.formats.targets() == FORMATS
    stage.press(wizard, "Next")
    stage.until(lambda: wizard.places.nodes, "nodes")
    wizard.places.nodes["alpha"].click()
    stage.type(wizard.places.folder, str(folder))
    stage.press(wizard, "Next")
    stage.press(wizard, "Export")
    stage.until(lambda: wizard.batch is not None and wizard.batch.is_over, "both", LIMIT_S)
    assert wizard.batch is not None
    assert [row.problem for row in wizard.batch.rows] == ["", ""]
    for name in ("gguf", "nf4"):
        (proof,) = json.loads((folder / name / "proof.json").read_bytes())["proofs"]
        assert proof["keep"], proof["problems"]
    stage.press(wizard, "Close")
    stage.until(lambda: stage.find(ExportWizard) is None, "the wizard has closed")


def ask_the_models(stage: RealStage, run_id: str) -> None:
    chat = open_chat(stage.context, stage.window, stage.cluster.runs[run_id])
    stage.until(lambda: len(chat.columns) == 1 + len(FORMATS), "columns")
    assert all(ask(stage, chat, "Who founded Brenford?"))
    assert ask(stage, chat, "And who else?")
    chat.close()


def ask(stage: RealStage, chat: ChatDialog, prompt: str) -> list[str]:
    chat.prompt.setPlainText(prompt)
    press(chat, "Send")
    stage.until(chat.new.isEnabled, "answers", LIMIT_S)
    last = [column.transcript.exchanges[-1] for column in chat.columns]
    assert [one.problem for one in last] == [""] * len(last)
    return [one.text for one in last]


def delete_it(site: Site, stage: RealStage, run_id: str) -> None:
    window = stage.window
    stage.key(Qt.Key.Key_3, Qt.KeyboardModifier.ControlModifier)
    assert window.stack.currentWidget() is window.runs
    window.runs.table.select(run_id)
    stage.answer(ConfirmDialog, "Delete permanently")
    stage.press(window.runs, "Delete")
    stage.until(lambda: run_id not in stage.cluster.runs, "the run is gone")
    assert window.runs.model.rows() == []
    for name in NAMES:
        assert not (site.agent_home(name) / "runs" / run_id).exists(), name
