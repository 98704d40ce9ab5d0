"""Actions on loaded models: chat, and compare their answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agents.contract.requests.chats import ChatAnswer, ChatTurn
from app.conversation import AnswerComparison, Loaded, Project, Subject
from app.runs.services import Services

if TYPE_CHECKING:
    from app.chats.chat import Chats
    from app.core.api import OnMessage


class CoreChats:
    """`core.chats`."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._chats_made: Chats | None = None

    @property
    def _chats(self) -> Chats:
        """Open conversations; created on first use, since most commands never chat."""
        if self._chats_made is None:
            from app.chats.chat import Chats

            self._chats_made = Chats(self._services)
        return self._chats_made

    async def open(self, subject: Subject, *, progress: OnMessage | None = None) -> Loaded:
        """Load a run's model, its base, or an artifact, to chat with it.

        It stays loaded until `close`; a model that its node has unloaded meanwhile is loaded
        again for the next question.

        Raises:
            UserError: there is no such run, artifact or node, or it cannot be loaded.
        """
        return await self._chats.open(subject, progress or (lambda text: None))

    async def ask(
        self,
        key: int,
        turn: ChatTurn,
        *,
        progress: OnMessage | None = None,
        piece: OnMessage | None = None,
    ) -> ChatAnswer:
        """Return a loaded model's next message.

        Args:
            key: key that `open` returned.
            turn: the whole conversation so far, and the generation settings.
            progress: called with each step before the answer, such as loading.
            piece: called with each piece of the answer as it is generated.

        Raises:
            UserError: the conversation is closed or too long, or the node does not answer.
        """
        tell, say = (told or (lambda text: None) for told in (progress, piece))
        return await self._chats.ask(key, turn, tell, say)

    async def stop(self, key: int) -> None:
        """Stop the answer that a loaded model is generating, and keep its text so far."""
        await self._chats.stop(key)

    async def close(self, key: int) -> None:
        """Unload a model."""
        await self._chats.close(key)

    def project_of(self, what: str) -> Project:
        """Return the base and data that a run or an artifact belongs to.

        Raises:
            UserError: there is no such run or artifact.
        """
        # Imported on use, here and below: commands that do not need it start sooner.
        from app.chats.chat import find_project

        return find_project(self._services, what)

    def prompts(self, project: Project) -> tuple[str, ...]:
        """Return the test prompts of a project."""
        return self._services.prompts.prompts(project)

    def save_prompts(self, project: Project, prompts: tuple[str, ...]) -> None:
        """Save the test prompts of a project."""
        self._services.prompts.save_prompts(project, prompts)

    def read_prompt_file(self, path: Path) -> tuple[str, ...]:
        """Return the prompts in a file, one per line.

        Raises:
            UserError: it cannot be read.
        """
        from app.chats.chat import read_prompt_file

        return read_prompt_file(path)

    async def compare(
        self,
        project: Project,
        subjects: Sequence[Subject],
        *,
        max_tokens: int = 256,
        progress: OnMessage | None = None,
    ) -> AnswerComparison:
        """Ask models the test prompts of their project, and save their answers.

        Raises:
            UserError: there are no prompts, or no model can be loaded.
        """
        from app.chats.comparison import compare_models

        found = await compare_models(
            self._chats,
            subjects,
            self.prompts(project),
            progress or (lambda text: None),
            max_tokens=max_tokens,
        )
        self.save_comparison(project, found)
        return found

    def comparisons(self, project: Project) -> tuple[AnswerComparison, ...]:
        """Return the saved comparisons of a project, newest first."""
        return self._services.prompts.comparisons(project)

    def save_comparison(self, project: Project, found: AnswerComparison) -> None:
        """Save a comparison."""
        self._services.prompts.add_comparison(project, found)

    def write_comparison(self, project: Project, found: AnswerComparison, path: Path) -> None:
        """Write a comparison to a file as Markdown.

        Raises:
            UserError: the file cannot be written.
        """
        from app.chats.chat import write_comparison

        write_comparison(project, found, path)
