"""Actions on loaded models: chat, and compare their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from app.core.action import Action, Report, action, as_progress

if TYPE_CHECKING:
    from agents.contract.requests.chats import ChatAnswer, ChatTurn
    from app.conversation import AnswerComparison, Loaded, Project, Subject
    from app.core.state import CoreState


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """Event: a piece of an answer was generated."""

    text: str


@action("chats.open")
class OpenChat(Action["Loaded"]):
    """Load a run's model, its base, or an artifact, to chat with it.

    It stays loaded until `UnloadModel`; a model that its node has unloaded meanwhile is loaded
    again for the next question.

    Raises:
        UserError: there is no such run, artifact or node, or it cannot be loaded.
    """

    subject: Subject

    async def perform(self, core: CoreState, report: Report) -> Loaded:
        return await core.chats.open(self.subject, as_progress(report))


@action("chats.ask")
class AskModel(Action["ChatAnswer"]):
    """Return a loaded model's next message, and report an `AnswerPiece` for each piece of it.

    Raises:
        UserError: the conversation is closed or too long, or the node does not answer.
    """

    key: int
    """Key that `OpenChat` returned."""
    turn: ChatTurn
    """The whole conversation so far, and the generation settings."""

    async def perform(self, core: CoreState, report: Report) -> ChatAnswer:
        return await core.chats.ask(
            self.key, self.turn, as_progress(report), lambda text: report(AnswerPiece(text))
        )


@action("chats.stop")
class StopAnswer(Action[None]):
    """Stop the answer that a loaded model is generating, and keep its text so far."""

    key: int

    async def perform(self, core: CoreState, report: Report) -> None:
        await core.chats.stop(self.key)


@action("chats.close")
class UnloadModel(Action[None]):
    """Unload a model."""

    key: int

    async def perform(self, core: CoreState, report: Report) -> None:
        await core.chats.close(self.key)


@action("chats.project_of")
class FindProject(Action["Project"]):
    """Return the base and data that a run or an artifact belongs to.

    Raises:
        UserError: there is no such run or artifact.
    """

    what: str

    async def perform(self, core: CoreState, report: Report) -> Project:
        # Imported on use, here and below: other actions start sooner.
        from app.chats.chat import find_project

        return find_project(core.services, self.what)


@action("chats.prompts")
class ReadPrompts(Action["tuple[str, ...]"]):
    """Return the test prompts of a project."""

    project: Project

    async def perform(self, core: CoreState, report: Report) -> tuple[str, ...]:
        return core.prompts.prompts(self.project)


@action("chats.save_prompts")
class SavePrompts(Action[None]):
    """Save the test prompts of a project."""

    project: Project
    prompts: tuple[str, ...]

    async def perform(self, core: CoreState, report: Report) -> None:
        core.prompts.save_prompts(self.project, self.prompts)


@action("chats.read_prompt_file")
class ReadPromptFile(Action["tuple[str, ...]"]):
    """Return the prompts in a file, one per line.

    Raises:
        UserError: it cannot be read.
    """

    path: Path

    async def perform(self, core: CoreState, report: Report) -> tuple[str, ...]:
        from app.chats.chat import read_prompt_file

        return read_prompt_file(self.path)


@action("chats.compare")
class CompareModels(Action["AnswerComparison"]):
    """Ask models the test prompts of their project, and save their answers.

    Raises:
        UserError: there are no prompts, or no model can be loaded.
    """

    project: Project
    subjects: Sequence[Subject]
    max_tokens: int = 256

    async def perform(self, core: CoreState, report: Report) -> AnswerComparison:
        from app.chats.comparison import compare_models

        found = await compare_models(
            core.chats,
            self.subjects,
            core.prompts.prompts(self.project),
            as_progress(report),
            max_tokens=self.max_tokens,
        )
        core.prompts.add_comparison(self.project, found)
        return found


@action("chats.comparisons")
class ListComparisons(Action["tuple[AnswerComparison, ...]"]):
    """Return the saved comparisons of a project, newest first."""

    project: Project

    async def perform(self, core: CoreState, report: Report) -> tuple[AnswerComparison, ...]:
        return core.prompts.comparisons(self.project)


@action("chats.save_comparison")
class SaveComparison(Action[None]):
    """Save a comparison."""

    project: Project
    found: AnswerComparison

    async def perform(self, core: CoreState, report: Report) -> None:
        core.prompts.add_comparison(self.project, self.found)


@action("chats.write_comparison")
class WriteComparison(Action[None]):
    """Write a comparison to a file as Markdown.

    Raises:
        UserError: the file cannot be written.
    """

    project: Project
    found: AnswerComparison
    path: Path

    async def perform(self, core: CoreState, report: Report) -> None:
        from app.chats.chat import write_comparison

        write_comparison(self.project, self.found, self.path)
