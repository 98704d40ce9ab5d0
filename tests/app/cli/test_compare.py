"""`rackless compare` shows what was answered, and ends with 1 where a model has said nothing."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest

from agents.contract.requests.chats import ChatAnswer
from app.cli.compare import _compare
from app.cli.main import build_parser
from app.cli.output import Output
from app.conversation import AnswerComparison, Compared, Project

ANSWER = ChatAnswer(
    text="Forty-two.", num_tokens=2, first_token_s=0.1, tokens_per_s=9.0, runtime="x", cut=False
)


class Core:
    def __init__(self, *models: Compared) -> None:
        self.chats = self
        self.found = AnswerComparison(time_s=1.0, prompts=("Who?",), models=models)

    def project_of(self, what: str) -> Project:
        return Project(base="b", data="d")

    async def compare(self, *asked: Any, **more: Any) -> AnswerComparison:
        return self.found


@pytest.mark.parametrize(("answer", "code"), [(ANSWER, 0), (None, 1)])
def test_one_that_has_not_answered_is_shown_and_counts(
    answer: ChatAnswer | None, code: int
) -> None:
    core = Core(
        Compared(title="poems, step 10, on alpha", answers=(ANSWER,)),
        Compared(title="poems-awq, not loaded: it is gone", answers=(answer,)),
    )
    out, err = io.StringIO(), io.StringIO()
    args = build_parser().parse_args(["compare", "poems", "poems-awq"])
    assert asyncio.run(_compare(core, args, Output(False, out, err))) == code  # type: ignore[arg-type]
    assert "> Forty-two." in out.getvalue()
    assert "not loaded: it is gone" in out.getvalue()
