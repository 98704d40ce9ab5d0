"""Rows of data as the Data page gets them, without a process that reads them."""

from __future__ import annotations

import json
from dataclasses import dataclass

from agents.contract.data import ShownConversation, ShownPart, ShownRow
from agents.contract.requests.rows import (
    DataFigures,
    RowBrief,
    RowList,
    RowState,
    SourceFigures,
    WholeRow,
)
from app.core.action import Report
from app.core.data import ListDataRows, ReadDataFigures, ShowDataRow

QUESTIONS = (
    ("How do I reset my password?", "Open Settings, choose Account, then Reset password."),
    ("The app closes when I open a photo.", "Update to version 4.2, which mends this."),
    ("Can I pay by invoice?", "Yes, from 50 seats on. Write to our sales team."),
    ("Where is my order 7731?", "It left our store this morning and arrives on Friday."),
)
STATES: dict[int, RowState] = {3: "left_out", 6: "cut", 9: "duplicate"}
FIGURES = DataFigures(
    format="chat",
    num_rows=12_480,
    share=1.0,
    is_whole=True,
    is_tokenized=True,
    num_left_out=34,
    num_cut=118,
    num_duplicates=61,
    num_tokens=4_310_200,
    num_targets=1_893_400,
    lengths=(0, 0, 0, 0, 12, 310, 1480, 3920, 4410, 1720, 476, 94, 24),
    reasons={
        "the conversation has no answer of the assistant": 29,
        "not valid JSON: Expecting ',' delimiter at character 118": 5,
    },
    sources=(
        SourceFigures(name="chats-1.jsonl", num_rows=9000, num_tokens=3_100_000, num_left_out=29),
        SourceFigures(name="chats-2.jsonl", num_rows=3480, num_tokens=1_210_200, num_left_out=5),
    ),
    columns=("messages", "topic", "agent"),
)


def make_brief(place: int) -> RowBrief:
    """Return a row of a support chat."""
    question, answer = QUESTIONS[place % len(QUESTIONS)]
    state = STATES.get(place, "kept")
    is_out = state == "left_out"
    return RowBrief(
        place=place,
        row=place,
        file="chats-1.jsonl",
        text=f"{question} \u2192 {answer}",
        num_tokens=None if is_out else 64 + 37 * place % 900,
        num_targets=None if is_out else 20 + 11 * place % 300,
        state=state,
        reason="the conversation has no answer of the assistant" if is_out else "",
    )


@dataclass
class FakeData:
    """Answers the actions on rows, from figures that a test may change."""

    figures: DataFigures = FIGURES
    calls: list[tuple[object, ...]] | None = None

    async def read(self, action: ReadDataFigures, report: Report) -> DataFigures:
        return self.figures

    async def list_rows(self, action: ListDataRows, report: Report) -> RowList:
        if self.calls is not None:
            self.calls.append(("data.rows", action))
        num_rows = self.figures.num_rows
        places = [place for place in range(1, 400) if place <= num_rows]
        if action.which in STATES.values():
            places = [place for place in places if STATES.get(place) == action.which]
            num_rows = len(places)
        if action.search:
            wanted = action.search.casefold()
            places = [one for one in places if wanted in make_brief(one).text.casefold()]
            num_rows = len(places)
        rows = places[action.start : action.start + action.count]
        return RowList(
            rows=tuple(map(make_brief, rows)), num_rows=num_rows, is_whole=self.figures.is_whole
        )

    async def show(self, action: ShowDataRow, report: Report) -> WholeRow:
        brief = make_brief(action.place)
        question, answer = QUESTIONS[action.place % len(QUESTIONS)]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        raw = json.dumps({"messages": messages, "topic": "support", "agent": "Ana"}, indent=2)
        parts = (
            ShownPart(text=f"<|im_start|>user\n{question}<|im_end|>\n", learned=False),
            ShownPart(text="<|im_start|>assistant\n", learned=False),
            ShownPart(text=f"{answer}<|im_end|>", learned=True),
        )
        shown = ShownRow(
            row=action.place,
            conversations=(ShownConversation(num_tokens=64, num_targets=20, parts=parts),),
        )
        is_out = brief.state == "left_out"
        return WholeRow(brief=brief, raw=raw, shown=None if is_out else shown)
