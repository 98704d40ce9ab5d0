"""Ask a run's model or an artifact on this PC one question, on a node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agents.artifacts import ChatAnswer, ChatJob
from app.errors import UsageError, UserError
from app.library.artifacts import bundle_artifact, read_artifact
from app.runs.export import bring_packages, choose_copy
from app.runs.inputs import recall_inputs, send
from app.runs.readiness import python_of
from app.runs.services import Services

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked, and how the answer is made."""

    prompt: str
    system: str = ""
    max_tokens: int = 256
    temperature: float = 0.0
    of_base: bool = False
    """Ask the model as it was before the run."""
    type: str | None = None
    """Which file of a GGUF artifact; None: the first."""
    node: str | None = None
    """None: of a run the node with its newest checkpoint; of an artifact the first that answers."""

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise ValueError("prompt is empty; it must be a question")


async def answer(
    services: Services, what: str, question: Question, tell: Say, say: Say
) -> ChatAnswer:
    """Ask what `what` names: a folder on this PC, or a run by its id or its beginning.

    Raises:
        UserError: there is no such thing, or it cannot answer.
    """
    folder = await asyncio.to_thread(_find_folder, what)
    if folder is not None:
        return await ask_artifact(services, folder, question, tell, say)
    return await ask_run(services, services.book.get(what).run_id, question, tell, say)


def _find_folder(what: str) -> Path | None:
    path = Path(what).expanduser()
    return path.absolute() if "/" in what or path.is_dir() else None


async def ask_run(
    services: Services, run_id: str, question: Question, tell: Say, say: Say
) -> ChatAnswer:
    """Ask the model of a run's newest checkpoint.

    Raises:
        UserError: no whole checkpoint is there, or the node cannot answer.
    """
    run = services.book.get(run_id)
    inputs = await asyncio.to_thread(recall_inputs, services, run)
    copy = await choose_copy(services, run.run_id, None, node=question.node)
    model = await send(services, copy.node, inputs.model)
    checkpoint = f"runs/{run.run_id}/checkpoints/step-{copy.info.step:08d}"
    what = "the base model" if question.of_base else f"step {copy.info.step}"
    tell(f"loading {what} on {copy.node}")
    found = None if question.of_base else checkpoint
    in_4_bits = run.spec.adapter.kind == "qlora"
    return await _ask(services, copy.node, question, model, found, None, say, in_4_bits=in_4_bits)


async def ask_artifact(
    services: Services, folder: Path, question: Question, tell: Say, say: Say
) -> ChatAnswer:
    """Ask an artifact in a folder on this PC, which is sent to a node if that lacks it.

    Raises:
        UserError: it is no artifact, no node answers, or the node cannot run it.
    """
    if question.of_base:
        raise UsageError("an artifact has no base with it", "Ask the base through its run.")
    artifact = await asyncio.to_thread(read_artifact, folder)
    source = await asyncio.to_thread(bundle_artifact, artifact, question.type, services.hashes)
    node = await _choose_node(services, question.node)
    agent = services.cluster.agent(node)
    python = python_of(node, await agent.facts())
    packages = await bring_packages(agent, python, artifact.method, tell)
    tell(f"loading {folder.name} on {node}")
    model = await send(services, node, source)
    return await _ask(services, node, question, model, None, packages, say)


async def _ask(
    services: Services,
    node: str,
    question: Question,
    model: str,
    checkpoint: str | None,
    packages: str | None,
    say: Say,
    *,
    in_4_bits: bool = False,
) -> ChatAnswer:
    agent = services.cluster.agent(node)
    facts = await agent.facts()
    job = ChatJob(
        python=python_of(node, facts),
        packages=packages,
        model=model,
        checkpoint=checkpoint,
        in_4_bits=in_4_bits and bool(facts.gpus),
        system=question.system,
        prompt=question.prompt,
        max_tokens=question.max_tokens,
        temperature=question.temperature,
        device="cuda:0" if facts.gpus else "cpu",
    )
    return await agent.chat(job, say)


async def _choose_node(services: Services, wanted: str | None) -> str:
    names = services.cluster.names()
    if wanted is not None:
        if wanted not in names:
            raise UsageError(f"there is no node {wanted}", "Look at them: rackless nodes list")
        return wanted
    problem: UserError | None = None
    for name in names:
        try:
            python_of(name, await services.cluster.agent(name).facts())
        except UserError as error:
            problem = error
            continue
        return name
    if problem is not None:
        raise problem
    raise UserError("there are no nodes yet", "Add one: rackless nodes add NAME --local")
