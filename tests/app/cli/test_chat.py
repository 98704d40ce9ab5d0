"""`rackless chat` without a question is a conversation: what was said goes along."""

from __future__ import annotations

import asyncio
import io

import pytest

from agents.contract.requests.chats import ChatAnswer, ChatOpened, ChatTurn
from app.cli.chat import _chat
from app.cli.kit.output import Output
from app.cli.main import build_parser
from app.conversation import Loaded, Subject
from app.core.action import Report
from app.core.chats import AnswerPiece, AskModel, OpenChat, UnloadModel
from app.errors import UserError
from tests.fakes.core import FakeCore


class Core(FakeCore):
    """Answers with how many messages it was sent."""

    def __post_init__(self) -> None:
        self.answers = {OpenChat: self.open_chat, AskModel: self.ask, UnloadModel: self.close}
        self.turns: list[ChatTurn] = []
        self.subject: Subject | None = None
        self.is_closed = False

    async def open_chat(self, action: OpenChat, report: Report) -> Loaded:
        self.subject = action.subject
        opened = ChatOpened(load_s=1.0, runtime="fake", device="cpu")
        return Loaded(key=7, chat="c", title="demo, step 10", node="alpha", opened=opened)

    async def ask(self, action: AskModel, report: Report) -> ChatAnswer:
        turn = action.turn
        self.turns.append(turn)
        text = f"heard {len(turn.messages)}"
        if turn.messages[-1].content == "fail":
            raise UserError("the conversation is too long", "Start a new one.")
        report(AnswerPiece(text))
        return ChatAnswer(
            text=text, num_tokens=2, first_token_s=0.1, tokens_per_s=9.0, runtime="fake", cut=False
        )

    async def close(self, action: UnloadModel, report: Report) -> None:
        self.is_closed = True


def chat(monkeypatch: pytest.MonkeyPatch, typed: str, *options: str) -> tuple[Core, str, str]:
    core, out, err = Core(), io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    args = build_parser().parse_args(["chat", "run-1", *options])
    output = Output("--json" in options, out, err)
    assert asyncio.run(_chat(core, args, output)) == 0  # type: ignore[arg-type]
    assert core.is_closed
    return core, out.getvalue(), err.getvalue()


def test_turns_build_on_each_other_until_new(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = "one\n\ntwo\nfail\n\udcff\n/new\nthree\n/quit\nnever\n"
    core, out, err = chat(monkeypatch, typed, "--system", "Be short", "--top-p", "0.5")
    assert out.split("\n") == ["heard 2", "heard 4", "heard 2", ""]
    assert "this line is not text in UTF-8" in err
    assert "the conversation is too long Start a new one." in err
    assert [turn.top_p for turn in core.turns] == [0.5] * 4
    assert [one.role for one in core.turns[1].messages] == ["system", "user", "assistant", "user"]
    assert "never" not in {turn.messages[-1].content for turn in core.turns}


def test_one_question_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    core, out, _ = chat(monkeypatch, "", "--prompt", "Who?", "--json", "--checkpoint", "5")
    assert core.subject == Subject(what="run-1", checkpoint=5)
    assert '"text": "heard 1"' in out
