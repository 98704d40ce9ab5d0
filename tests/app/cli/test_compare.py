"""`rackless compare` shows what was answered, and ends with 1 where a model has said nothing."""

from __future__ import annotations

import asyncio
import io

import pytest

from agents.contract.requests.chats import ChatAnswer
from app.cli.compare import _compare
from app.cli.kit.output import Output
from app.cli.main import build_parser
from app.conversation import AnswerComparison, Compared
from app.core.action import Report
from app.core.chats import CompareModels
from tests.fakes.core import FakeCore

ANSWER = ChatAnswer(
    text="Forty-two.", num_tokens=2, first_token_s=0.1, tokens_per_s=9.0, runtime="x", cut=False
)


@pytest.mark.parametrize(("answer", "code"), [(ANSWER, 0), (None, 1)])
def test_one_that_has_not_answered_is_shown_and_counts(
    answer: ChatAnswer | None, code: int
) -> None:
    models = (
        Compared(title="poems, step 10, on alpha", answers=(ANSWER,)),
        Compared(title="poems-awq, not loaded: it is gone", answers=(answer,)),
    )
    core = FakeCore()

    async def compare(action: CompareModels, report: Report) -> AnswerComparison:
        return AnswerComparison(time_s=1.0, prompts=("Who?",), models=models)

    core.answers[CompareModels] = compare
    out, err = io.StringIO(), io.StringIO()
    args = build_parser().parse_args(["compare", "poems", "poems-awq"])
    assert asyncio.run(_compare(core, args, Output(False, out, err))) == code  # type: ignore[arg-type]
    assert "> Forty-two." in out.getvalue()
    assert "not loaded: it is gone" in out.getvalue()
