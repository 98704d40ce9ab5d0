"""Models to chat with, and saved answers to test prompts by which models are compared.

A project is a base model with its training data. Its runs and artifacts are compared by the same
prompts, and their answers are saved.
"""

from __future__ import annotations

from dataclasses import dataclass

from agents.contract.requests.chats import ChatAnswer, ChatOpened
from app.text import show_duration

MOST_PROMPTS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """Model to chat with, as the user names it."""

    what: str
    """A run's id or a prefix of it, an artifact's name, or an artifact's folder on this PC."""
    of_base: bool = False
    """True if the run's base model is meant."""
    checkpoint: int | None = None
    """Step of the run's checkpoint; None: the newest complete one."""
    type: str | None = None
    """Type of a GGUF artifact's file; None: the first."""
    node: str | None = None
    """Name of the node; None: one with a run's checkpoint, or the first that answers for an
    artifact."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A loaded model."""

    key: int
    """Key of the conversation in this process."""
    chat: str
    """Id of the conversation on the node."""
    title: str
    """Title for the user."""
    node: str
    opened: ChatOpened


@dataclass(frozen=True, kw_only=True, slots=True)
class Project:
    """Base model and data, shared by the runs and artifacts that are compared."""

    base: str
    data: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """Answers of one model to every prompt."""

    title: str
    """Title, such as `poems, step 400, on alpha`."""
    answers: tuple[ChatAnswer | None, ...]
    """Answers in the order of the prompts; None: no answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerComparison:
    """Answers of several models to the same prompts."""

    time_s: float
    prompts: tuple[str, ...]
    models: tuple[Compared, ...]
    system: str = ""


def read_prompts(text: str) -> tuple[str, ...]:
    """Return the prompts in a text, one per line.

    >>> read_prompts("Who founded Brenford?\\n\\n  What is a weir?  ")
    ('Who founded Brenford?', 'What is a weir?')
    """
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def describe_answer(found: ChatAnswer) -> str:
    """Describe the speed and length of an answer.

    >>> describe_answer(ChatAnswer(text="x", num_tokens=9, first_token_s=0.04, tokens_per_s=51.26,
    ...     runtime="Transformers 5", cut=True))
    '51.3 tokens/s, first after 40 ms, 9 tokens, cut there'
    """
    speed = f"{found.tokens_per_s:.1f} tokens/s, " if found.tokens_per_s is not None else ""
    ended = ", stopped there" if found.stopped else ", cut there" * found.cut
    tokens = "1 token" if found.num_tokens == 1 else f"{found.num_tokens} tokens"
    return f"{speed}first after {show_duration(found.first_token_s)}, {tokens}{ended}"


def to_markdown(project: Project, found: AnswerComparison) -> str:
    """Return a comparison as a document to keep or send."""
    lines = [f"# Answers of {len(found.models)} models", ""]
    lines += [f"- Base: `{project.base}`", f"- Data: `{project.data}`"]
    if found.system:
        lines.append(f"- System prompt: {_quoted(found.system)}")
    for place, prompt in enumerate(found.prompts):
        lines += ["", f"## {place + 1}. {_quoted(prompt)}", ""]
        for model in found.models:
            answer = model.answers[place]
            lines.append(f"**{model.title}**")
            if answer is None:
                lines += ["", "No answer.", ""]
            else:
                # An empty answer keeps its quote sign, else it would vanish from the document.
                quoted = "\n".join(f"> {line}" for line in answer.text.splitlines()) or ">"
                lines += ["", quoted, "", f"_{describe_answer(answer)}_", ""]
    return "\n".join(lines).rstrip() + "\n"


def _quoted(text: str) -> str:
    # A heading or list item in Markdown ends at the first line break.
    return " ".join(text.split())
