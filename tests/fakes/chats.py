"""Conversations of the fake core: models that answer at once, in pieces, and can be stopped."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from agents.contract.messages import Progress
from agents.contract.requests.chats import ChatAnswer, ChatOpened, ChatTurn
from app.artifact import ArtifactCopy, ArtifactSnapshot
from app.conversation import AnswerComparison, Loaded, Project, Subject, to_markdown
from app.core import chats
from app.core.action import Report

PROJECT = Project(base="meta-llama/Llama-2-7b-hf", data="chats.jsonl")
ANSWER = "A miller called Aldous Bren, in 1810, after the river had moved."


def make_artifact(folder: str = "/models/support-chat-gguf") -> ArtifactSnapshot:
    """Return an artifact with two files, on this PC."""
    copy = ArtifactCopy(kind="folder", place=folder, made_s=1.0)
    return ArtifactSnapshot(
        name="support-chat-gguf", version=1, format="gguf", types=("Q8_0", "Q4_K_M"),
        size_bytes=11_000_000_000, created_s=1.0, copies=(copy,),
    )  # fmt: skip


class FakeChats:
    """`core.chats` of the fake core."""

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls = calls
        """Shared with the fake core."""
        self.loaded: dict[int, Subject] = {}
        self.gate: asyncio.Event | None = None
        """An answer waits for it after its first word."""
        self.stopped: set[int] = set()
        self.kept: tuple[str, ...] = ("Who founded Brenford?", "What is a weir for?")
        self.past: tuple[AnswerComparison, ...] = ()
        self.turns: list[ChatTurn] = []

    async def open(self, action: chats.OpenChat, report: Report) -> Loaded:
        self.calls.append(("chats.open", action.subject))
        key = len(self.calls)
        self.loaded[key] = action.subject
        report(Progress(message="loading it on alpha"))
        subject = action.subject
        what = "base" if subject.of_base else subject.type or f"step {subject.checkpoint}"
        opened = ChatOpened(load_s=2.1, runtime="Transformers 5.23.0", device="cuda:0")
        return Loaded(
            key=key, chat=str(key), title=f"support-chat, {what}", node=subject.node or "alpha",
            opened=opened,
        )  # fmt: skip

    async def ask(self, action: chats.AskModel, report: Report) -> ChatAnswer:
        self.turns.append(action.turn)
        text = ANSWER if not self.loaded[action.key].of_base else "I do not know that town."
        said = ""
        for word in text.split(" "):
            said = f"{said} {word}".strip()
            report(chats.AnswerPiece(f"{word} "))
            while self.gate is not None and not self.gate.is_set():
                if action.key in self.stopped:
                    break
                await asyncio.sleep(0.005)
            if action.key in self.stopped:
                break
        answer = ChatAnswer(
            text=said, num_tokens=len(said.split()) + 3, first_token_s=0.041, tokens_per_s=51.2,
            runtime="Transformers 5.23.0", cut=False,
        )  # fmt: skip
        return replace(answer, stopped=action.key in self.stopped)

    async def stop(self, action: chats.StopAnswer, report: Report) -> None:
        self.calls.append(("chats.stop", action.key))
        self.stopped.add(action.key)

    async def close(self, action: chats.UnloadModel, report: Report) -> None:
        self.calls.append(("chats.close", action.key))
        del self.loaded[action.key]

    async def project_of(self, action: chats.FindProject, report: Report) -> Project:
        return PROJECT

    async def prompts(self, action: chats.ReadPrompts, report: Report) -> tuple[str, ...]:
        return self.kept

    async def save_prompts(self, action: chats.SavePrompts, report: Report) -> None:
        self.kept = action.prompts

    async def comparisons(
        self, action: chats.ListComparisons, report: Report
    ) -> tuple[AnswerComparison, ...]:
        return self.past

    async def save_comparison(self, action: chats.SaveComparison, report: Report) -> None:
        self.past = (action.found, *self.past)

    async def write_comparison(self, action: chats.WriteComparison, report: Report) -> None:
        action.path.write_text(to_markdown(action.project, action.found), encoding="utf-8")
