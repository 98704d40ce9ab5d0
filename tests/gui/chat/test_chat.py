"""Chat, driven as a person does: side by side, several turns, a stop, prompts that are kept."""

from __future__ import annotations

import asyncio

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest

from app.conversation import Subject
from app.core.chats import OpenChat
from app.errors import UserError
from app.gui.chat.chat_dialog import ChatDialog, open_chat
from tests.fakes.chats import ANSWER
from tests.gui.stage import find_dialog, open_dialog, press

RUN = "support-chat-7f3a"


@pytest.fixture
def dialog(busy):
    busy.window.open_run(RUN)
    press(busy.window.run_page().head, "Chat\u2026")
    found = open_dialog(ChatDialog)
    busy.wait_for(lambda: len(found.columns) == 3)
    yield found
    if find_dialog(ChatDialog) is found:
        found.close()


def ask(busy, dialog, prompt):
    dialog.prompt.setFocus()
    QTest.keyClicks(dialog.prompt, prompt)
    QTest.keyClick(dialog.prompt, Qt.Key.Key_Return, Qt.KeyboardModifier.ControlModifier)
    busy.wait_for(lambda: dialog.columns[0].is_busy)
    busy.wait_for(dialog.new.isEnabled)


def test_base_checkpoint_and_artifact_answer_side_by_side(busy, dialog):
    names = [column.who.currentText() for column in dialog.columns]
    assert names == ["Base, before training", "Step 400", "GGUF Q8_0"]
    assert not dialog.send.isEnabled()
    ask(busy, dialog, "Who founded Brenford?")
    ask(busy, dialog, "When?")
    for column, text in zip(
        dialog.columns, ("I do not know that town.", ANSWER, ANSWER), strict=True
    ):
        first, second = column.transcript.exchanges
        assert (first.text, second.prompt) == (text, "When?")
        assert first.figures.startswith("51.2 tokens/s, first after 41 ms")
        assert text in column.transcript.toPlainText()
        assert "On alpha, GPU 0, with Transformers" in column._state.text()
    assert [len(turn.messages) for turn in busy.core.chats.turns] == [1, 1, 1, 3, 3, 3]
    assert len(busy.called("chats.open")) == 3
    press(dialog, "New conversation")
    assert "No questions yet" in dialog.columns[0].transcript.toPlainText()
    dialog.close()
    busy.wait_for(lambda: not busy.core.chats.loaded)


def test_an_answer_can_be_stopped_and_another_model_chosen(busy, dialog):
    busy.core.chats.gate = asyncio.Event()
    dialog.prompt.setPlainText("Who?")
    press(dialog, "Send")
    for column in dialog.columns:
        busy.wait_for(lambda column=column: bool(column.transcript.exchanges))
        busy.wait_for(lambda column=column: bool(column.transcript.exchanges[0].text))
    press(dialog, "Stop")
    busy.wait_for(dialog.new.isEnabled)
    assert dialog.columns[1].transcript.exchanges[0].figures.endswith("stopped there")
    column = dialog.columns[1]
    column.who.setCurrentIndex(2)
    column.where.setCurrentIndex(column.where.findData("beta"))
    column.who.activated.emit(2)
    assert column.transcript.exchanges == []
    busy.core.chats.gate.set()
    ask(busy, dialog, "Who?")
    assert busy.called("chats.open")[-1] == (Subject(what=RUN, checkpoint=320, node="beta"),)


def test_columns_come_and_go(busy, dialog):
    assert not dialog.add.isEnabled()
    dialog.columns[0]._remove.click()
    dialog.columns[0]._remove.click()
    assert len(dialog.columns) == 1
    assert not dialog.columns[0]._remove.isVisible(), "one is left"
    press(dialog, "Add model")
    assert len(dialog.columns) == 2


def test_prompts_are_kept_and_their_answers_written(busy, dialog, tmp_path):
    dialog.fold.head.click()
    kept = ("Who founded Brenford?", "What is a weir for?")
    busy.wait_for(lambda: dialog.prompts.prompts() == kept)
    dialog.prompts.text.setPlainText("Who?\n\nWhen?\nWhy?")
    busy.wait_for(lambda: busy.core.chats.kept == ("Who?", "When?", "Why?"))
    dialog.how.system.setText("Be short")
    press(dialog, "Ask all")
    busy.wait_for(lambda: bool(busy.core.chats.past))
    (kept,) = busy.core.chats.past
    assert [len(model.answers) for model in kept.models] == [3, 3, 3]
    assert kept.models[0].title == "support-chat, base, on alpha"
    assert {len(turn.messages) for turn in busy.core.chats.turns} == {2}, "each by itself"
    assert dialog.columns[0].transcript.turns() == [], "no part of the conversation"
    busy.wait_for(dialog.prompts.save.isVisible)
    assert "3 models, 3 prompts" in dialog.prompts.past.currentText()
    target = tmp_path / "answers.md"
    dialog.prompts.save_to(str(target))
    busy.wait_for(lambda: "Answers saved" in dialog.banner.message())
    assert "## 3. Why?" in target.read_text()


def test_what_cannot_be_loaded_is_said_in_its_column(busy, dialog, monkeypatch):
    async def refuse(action, report):
        raise UserError("alpha has no training environment", "Set it up.")

    monkeypatch.setitem(busy.core.answers, OpenChat, refuse)
    ask(busy, dialog, "Who?")
    assert "Set it up." in dialog.columns[0].transcript.toPlainText()


def test_an_artifact_of_a_deleted_run_can_be_asked_alone(busy):
    wanted = Subject(what="support-chat-gguf:1")
    dialog = open_chat(busy.context, busy.window, None, wanted)
    busy.wait_for(lambda: len(dialog.columns) == 1)
    assert dialog.columns[0].who.count() == 3
    dialog.close()


def test_a_checkpoint_of_the_table_stands_among_them(busy):
    busy.window.open_run(RUN)
    page = busy.window.run_page()
    busy.wait_for(lambda: bool(page.checkpoints.rows()))
    page.saved.select(320)
    page._chat()
    dialog = open_dialog(ChatDialog)
    busy.wait_for(lambda: len(dialog.columns) == 3)
    assert dialog.columns[1].who.currentText() == "Step 320"
    dialog.close()


def refuse_to_load(busy, monkeypatch, step, after=None):
    """Let the checkpoint of a step not be loaded; `after` is waited for before that is known."""
    load = busy.core.answers[OpenChat]

    async def open_chat(action, report):
        if action.subject.checkpoint != step:
            return await load(action, report)
        while after is not None and not after():  # noqa: ASYNC110 - of the other thread
            await asyncio.sleep(0.005)
        raise UserError("alpha has no training environment", "Set it up.")

    monkeypatch.setitem(busy.core.answers, OpenChat, open_chat)


def test_a_question_is_not_lost_with_a_model_that_cannot_be_loaded(busy, dialog, monkeypatch):
    refuse_to_load(busy, monkeypatch, 400)
    prompt = "Who founded Brenford? " * 500
    dialog.prompt.setPlainText(prompt)
    press(dialog, "Send")
    busy.wait_for(dialog.new.isEnabled)
    for column in dialog.columns:
        (exchange,) = column.transcript.exchanges
        assert exchange.prompt == prompt.strip()
    assert "Set it up." in dialog.columns[1].transcript.exchanges[0].problem


def test_a_question_that_is_stopped_while_its_model_is_loaded_stays(busy, dialog, monkeypatch):
    refuse_to_load(busy, monkeypatch, 400, after=lambda: False)
    dialog.prompt.setPlainText("Who?")
    press(dialog, "Send")
    busy.wait_for(lambda: not dialog.columns[0].is_busy)
    press(dialog, "Stop")
    busy.wait_for(dialog.new.isEnabled)
    (exchange,) = dialog.columns[1].transcript.exchanges
    assert (exchange.prompt, exchange.problem[:9]) == ("Who?", "Not asked")


def ask_all(busy, dialog):
    dialog.fold.head.click()
    busy.wait_for(lambda: bool(dialog.prompts.prompts()))
    press(dialog, "Ask all")


def test_answers_are_kept_though_the_last_model_cannot_be_loaded(busy, dialog, monkeypatch):
    others = (dialog.columns[0], dialog.columns[2])
    refuse_to_load(busy, monkeypatch, 400, after=lambda: not any(c.is_busy for c in others))
    ask_all(busy, dialog)
    busy.wait_for(lambda: bool(busy.core.chats.past))
    assert [model.title for model in busy.core.chats.past[0].models] == [
        *("support-chat, base, on alpha", "support-chat, Q8_0, on alpha")
    ]


def test_answers_are_kept_when_the_last_column_is_taken_away(busy, dialog, monkeypatch):
    refuse_to_load(busy, monkeypatch, 400, after=lambda: False)
    ask_all(busy, dialog)
    busy.wait_for(lambda: not dialog.columns[0].is_busy and not dialog.columns[2].is_busy)
    dialog.columns[1]._remove.click()
    busy.wait_for(lambda: bool(busy.core.chats.past))
    assert len(busy.core.chats.past[0].models) == 2


def test_answers_stay_those_of_the_model_that_gave_them(busy, dialog, monkeypatch):
    refuse_to_load(busy, monkeypatch, 400, after=lambda: False)
    ask_all(busy, dialog)
    first, last = dialog.columns[0], dialog.columns[1]
    busy.wait_for(lambda: not first.is_busy and not dialog.columns[2].is_busy)
    first.who.setCurrentIndex(2)
    first.who.activated.emit(2)
    last.stop()
    busy.wait_for(lambda: bool(busy.core.chats.past))
    assert busy.core.chats.past[0].models[0].title == "support-chat, base, on alpha"


def test_prompts_beyond_the_most_are_told(busy, dialog):
    dialog.fold.head.click()
    dialog.prompts.text.setPlainText("\n".join(f"Why {number}?" for number in range(140)))
    assert len(dialog.prompts.prompts()) == 100
    assert dialog.prompts._too_many.isVisible()
    assert "140 prompts: only the first 100" in dialog.prompts._too_many.text()
    dialog.prompts.text.setPlainText("Why?")
    assert not dialog.prompts._too_many.isVisible()


def test_no_column_is_added_while_models_are_looked_for(busy):
    dialog = open_chat(busy.context, busy.window, busy.cluster.runs[RUN])
    assert not dialog.add.isEnabled()
    busy.wait_for(lambda: len(dialog.columns) == 3)
    dialog.close()
