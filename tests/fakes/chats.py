"""Conversations of the fake core: models that answer at once, in pieces, and can be stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from agents.contract.requests.chats import ChatAnswer, ChatOpened, ChatTurn
from app.artifact import ArtifactCopy, ArtifactSnapshot
from app.conversation import AnswerComparison, Loaded, Project, Subject, to_markdown

PROJECT = Project(base="meta-llama/Llama-2-7b-hf", data="chats.jsonl")
ANSWER = "A miller called Aldous Bren, in 1810, after the river had moved."
Tell = Callable[[str], None]


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

    async def open(self, subject: Subject, *, progress: Tell | None = None) -> Loaded:
        self.calls.append(("chats.open", subject))
        key = len(self.calls)
        self.loaded[key] = subject
        if progress is not None:
            progress("loading it on alpha")
        step = f"step {subject.checkpoint}"
        what = "base" if subject.of_base else subject.type or step
        opened = ChatOpened(load_s=2.1, runtime="Transformers 5.23.0", device="cuda:0")
        return Loaded(
            key=key, chat=str(key), title=f"support-chat, {what}", node=subject.node or "alpha",
            opened=opened,
        )  # fmt: skip

    async def ask(
        self, key: int, turn: ChatTurn, *, progress: Tell | None = None, piece: Tell | None = None
    ) -> ChatAnswer:
        self.turns.append(turn)
        text = ANSWER if not self.loaded[key].of_base else "I do not know that town."
        said = ""
        for word in text.split(" "):
            said = f"{said} {word}".strip()
            if piece is not None:
                piece(f"{word} ")
            while self.gate is not None and not self.gate.is_set():
                if key in self.stopped:
                    break
                await asyncio.sleep(0.005)
            if key in self.stopped:
                break
        answer = ChatAnswer(
            text=said, num_tokens=len(said.split()) + 3, first_token_s=0.041, tokens_per_s=51.2,
            runtime="Transformers 5.23.0", cut=False,
        )  # fmt: skip
        return replace(answer, stopped=key in self.stopped)

    async def stop(self, key: int) -> None:
        self.calls.append(("chats.stop", key))
        self.stopped.add(key)

    async def close(self, key: int) -> None:
        self.calls.append(("chats.close", key))
        del self.loaded[key]

    def project_of(self, what: str) -> Project:
        return PROJECT

    def prompts(self, project: Project) -> tuple[str, ...]:
        return self.kept

    def save_prompts(self, project: Project, prompts: tuple[str, ...]) -> None:
        self.kept = prompts

    def comparisons(self, project: Project) -> tuple[AnswerComparison, ...]:
        return self.past

    def save_comparison(self, project: Project, found: AnswerComparison) -> None:
        self.past = (found, *self.past)

    def write_comparison(self, project: Project, found: AnswerComparison, path: Path) -> None:
        path.write_text(to_markdown(project, found), encoding="utf-8")
