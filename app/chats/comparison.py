"""Ask several models the same prompts, one model after the other, and save their answers."""

from __future__ import annotations

import time
from collections.abc import Sequence

from agents.contract.requests.chats import ChatAnswer, ChatMessage, ChatTurn
from app.chats.chat import Chats
from app.conversation import AnswerComparison, Compared, Subject
from app.errors import RacklessError, UsageError, UserError
from app.progress import OnMessage


async def compare_models(
    chats: Chats,
    subjects: Sequence[Subject],
    prompts: Sequence[str],
    tell: OnMessage,
    *,
    max_tokens: int = 256,
) -> AnswerComparison:
    """Return the answer of each model to each prompt, each in a new conversation.

    Only one model is loaded at a time, so that speeds on one node are comparable. A model that
    cannot be loaded has no answers, and its title gives the reason.

    Raises:
        UserError: there are no prompts, or no model can be loaded.
    """
    if not prompts:
        raise UsageError(
            "there are no test prompts", "Give a file with one per line: --prompts FILE"
        )
    models, problems = [], list[RacklessError]()
    for subject in subjects:
        try:
            models.append(await _compare(chats, subject, prompts, max_tokens, tell))
        except RacklessError as error:
            problems.append(error)
            title = f"{subject.what}{', base' if subject.of_base else ''}, not loaded: {error}"
            # Only a UserError has a hint; an AgentBug has none.
            tell(f"{title} {getattr(error, 'hint', '')}".strip())
            models.append(Compared(title=title, answers=(None,) * len(prompts)))
    if problems and len(problems) == len(models):
        raise problems[0]
    return AnswerComparison(time_s=time.time(), prompts=tuple(prompts), models=tuple(models))


async def _compare(
    chats: Chats, subject: Subject, prompts: Sequence[str], max_tokens: int, tell: OnMessage
) -> Compared:
    loaded = await chats.open(subject, tell)
    try:
        answers = [await _ask(chats, loaded.key, prompt, max_tokens, tell) for prompt in prompts]
    finally:
        await chats.close(loaded.key)
    return Compared(title=f"{loaded.title}, on {loaded.node}", answers=tuple(answers))


async def _ask(
    chats: Chats, key: int, prompt: str, max_tokens: int, tell: OnMessage
) -> ChatAnswer | None:
    turn = ChatTurn(messages=(ChatMessage(role="user", content=prompt),), max_tokens=max_tokens)
    try:
        return await chats.ask(key, turn, tell, lambda piece: None)
    except UserError as error:
        tell(f"no answer to {prompt!r}: {error} {error.hint}".strip())
        return None
