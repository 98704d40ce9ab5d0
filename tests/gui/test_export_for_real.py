"""The wizard and the chat over a real core and a real node: clicks that end in a model that loads.

A run of the demo's model is trained for a few steps, exported by clicks to two formats, and each is
asked the same question beside its base in the chat.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PySide6.QtWidgets import QApplication

from app.core.core import Core
from app.gui.chat.chat_dialog import ChatDialog, open_chat
from app.gui.export.export_wizard import ExportWizard
from app.gui.kit.theme import Theme
from app.gui.session.bridge import Bridge
from app.gui.session.context import Context
from app.gui.session.live_state import LiveState
from app.gui.shell.main_window import MainWindow
from app.gui.shell.window_state import WindowState
from tests.fakes.site import Site, open_site, wait_until
from tests.gui.stage import press

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
LIMIT_S = 150.0
Until = Callable[[Callable[[], bool], str], None]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with open_site(tmp_path_factory.mktemp("site")) as opened:
        yield opened


@pytest.fixture
def window(
    site: Site, application: QApplication, theme: Theme, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MainWindow]:
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    bridge = Bridge(lambda: Core.open(site.home))
    crashes: list[str] = []
    bridge.crashed.connect(crashes.append)
    made = MainWindow(Context(bridge, LiveState(bridge), theme), WindowState())
    made.show()
    bridge.start()
    yield made
    bridge.stop()
    bridge.join()
    made.hide()
    made.deleteLater()
    application.processEvents()
    assert crashes == []


def test_clicks_end_in_models_that_answer(
    site: Site, window: MainWindow, application: QApplication, tmp_path: Path
) -> None:
    def until(condition: Callable[[], bool], what: str) -> None:
        def look() -> bool:
            application.processEvents()
            return condition()

        wait_until(look, what, LIMIT_S)

    run_id = site.answer("start", str(site.write_run_file(10)))["run_id"]
    context = window._context
    until(lambda: run_id in context.cluster.runs, "the run is shown")
    until(lambda: context.cluster.runs[run_id].state == "done", "the run is done")

    wizard = ExportWizard(context, window, context.cluster.runs[run_id])
    wizard.show()
    until(lambda: bool(wizard.model.rows()), "checkpoints")
    press(wizard, "Next")
    for target in ("gguf:Q8_0", "nf4"):
        wizard.formats.boxes[target].click()
    press(wizard, "Next")
    until(lambda: bool(wizard.places.nodes), "nodes")
    wizard.places.nodes["alpha"].click()
    wizard.places.folder.setText(str(tmp_path / "out"))
    wizard.places.folder.textEdited.emit("")
    press(wizard, "Next")
    press(wizard, "Export")
    until(lambda: wizard.batch is not None and wizard.batch.is_over, "both are made")
    assert wizard.batch is not None
    assert [row.problem for row in wizard.batch.rows] == ["", ""]
    for name in ("gguf", "nf4"):
        (proof,) = json.loads((tmp_path / "out" / name / "proof.json").read_bytes())["proofs"]
        assert proof["keep"], proof["problems"]
    wizard.close()

    chat = open_chat(context, window, context.cluster.runs[run_id])
    until(lambda: len(chat.columns) == 3, "columns")
    answers = ask(chat, until, "Who founded Brenford?")
    assert len(answers) == 3
    assert all(text for text in answers)
    assert ask(chat, until, "And who else?")
    chat.close()


def ask(chat: ChatDialog, until: Until, prompt: str) -> list[str]:
    chat.prompt.setPlainText(prompt)
    press(chat, "Send")
    until(chat.new.isEnabled, "answers")
    problems = [column.transcript.exchanges[-1].problem for column in chat.columns]
    assert problems == ["", "", ""]
    return [column.transcript.exchanges[-1].text for column in chat.columns]
