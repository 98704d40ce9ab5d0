"""Chat: the models to choose from, the first choice, and the turn sent to a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agents.contract.formats import EXPORTS
from agents.contract.requests.chats import ChatMessage, ChatTurn
from app.artifact import ArtifactSnapshot
from app.conversation import Subject
from app.events import CheckpointSnapshot, RunSnapshot

MOST_COLUMNS = 3
DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelChoice:
    """A model to chat with."""

    label: str
    subject: Subject


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatSettings:
    """Generation settings, the same for all columns."""

    system: str = ""
    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float = 0.0
    top_p: float = 1.0


def offer(
    run: RunSnapshot | None,
    checkpoints: Sequence[CheckpointSnapshot],
    artifacts: Sequence[ArtifactSnapshot],
) -> tuple[ModelChoice, ...]:
    """Return all models to chat with: the base, each checkpoint, each file of a local artifact.

    Args:
        run: run of the models; None: it is deleted, and only its artifacts are left.
        checkpoints: checkpoints of the run; those known to be damaged are left out.
        artifacts: artifacts of the run.
    """
    found: list[ModelChoice] = []
    if run is not None:
        base = Subject(what=run.run_id, of_base=True)
        found.append(ModelChoice(label="Base, before training", subject=base))
        # None: not hashed yet, which is the usual case.
        usable = [one for one in checkpoints if one.verified is not False]
        for one in sorted(usable, key=lambda one: -one.step):
            subject = Subject(what=run.run_id, checkpoint=one.step)
            found.append(ModelChoice(label=f"Step {one.step}", subject=subject))
    for artifact in artifacts:
        if artifact.folder() is None:
            continue
        # Only formats with joined types have a file for each; any other is loaded as a whole.
        for kind in (artifact.types if EXPORTS[artifact.format].joins_types else ()) or (None,):
            version = f", version {artifact.version}" if artifact.version > 1 else ""
            what = kind or ", ".join(artifact.types)
            label = f"{artifact.format.upper()} {what}".strip() + version
            found.append(ModelChoice(label=label, subject=Subject(what=artifact.label, type=kind)))
    return tuple(found)


def name_artifact(wanted: Subject | None, artifacts: Sequence[ArtifactSnapshot]) -> Subject | None:
    """Return the wanted subject by its artifact's name if it was named by its folder."""
    for one in artifacts:
        if wanted is not None and one.folder() == wanted.what:
            return replace(wanted, what=one.label)
    return wanted


def choose_columns(
    choices: Sequence[ModelChoice], wanted: Subject | None
) -> tuple[ModelChoice, ...]:
    """Return the first columns: the base, the wanted subject, the newest artifact.

    The wanted subject replaces the first of its kind; by default that is the newest one.
    """
    base = [one for one in choices if one.subject.of_base]
    steps = [one for one in choices if one.subject.checkpoint is not None]
    made = [one for one in choices if one not in base and one not in steps]
    if wanted is not None:
        steps = [one for one in steps if one.subject == wanted] or steps
        made = [one for one in made if one.subject.what == wanted.what] or made
    return tuple(group[0] for group in (base, steps, made) if group)


def make_turn(settings: ChatSettings, said: Sequence[tuple[str, str]], prompt: str) -> ChatTurn:
    """Return the turn to send to the model.

    Args:
        settings: generation settings.
        said: (prompt, answer) pairs so far.
        prompt: the new question.
    """
    messages: list[ChatMessage] = []
    if settings.system.strip():
        messages.append(ChatMessage(role="system", content=settings.system.strip()))
    # Each turn carries the whole conversation, so that a model can be loaded again anywhere.
    for asked, answer in said:
        messages.append(ChatMessage(role="user", content=asked))
        messages.append(ChatMessage(role="assistant", content=answer))
    messages.append(ChatMessage(role="user", content=prompt))
    return ChatTurn(
        messages=tuple(messages),
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
    )


def on_node(subject: Subject, node: str) -> Subject:
    """Return the subject on a chosen node; empty: any node that can load it."""
    return replace(subject, node=node or None)
