"""Ask a run's model or an artifact on this PC one question, on a node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from agents.artifacts import ChatAnswer, ChatJob
from agents.protocol import NodeFacts
from app.errors import UsageError, UserError
from app.library.artifacts import bundle_artifact, read_artifact
from app.runs.export import bring_packages, find_whole
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
    nodes = services.cluster.names() if question.node is None else (question.node,)
    copy = (await find_whole(services, run.run_id, nodes))[0]
    model = await send(services, copy.node, inputs.model)
    checkpoint = f"runs/{run.run_id}/checkpoints/step-{copy.info.step:08d}"
    what = "the base model" if question.of_base else f"step {copy.info.step}"
    tell(f"loading {what} on {copy.node}")
    found = None if question.of_base else checkpoint
    in_4_bits = run.spec.adapter.kind == "qlora"
    facts = await services.cluster.agent(copy.node).facts()
    job = _make_job(copy.node, facts, question, model)
    job = replace(job, checkpoint=found, in_4_bits=in_4_bits and bool(facts.gpus))
    return await services.cluster.agent(copy.node).chat(job, say)


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
    node, facts = await _choose_node(services, question.node)
    agent = services.cluster.agent(node)
    packages = await bring_packages(agent, python_of(node, facts), artifact.method, tell)
    tell(f"loading {folder.name} on {node}")
    job = _make_job(node, facts, question, await send(services, node, source))
    return await agent.chat(replace(job, packages=packages), say)


def _make_job(node: str, facts: NodeFacts, question: Question, model: str) -> ChatJob:
    return ChatJob(
        python=python_of(node, facts),
        model=model,
        system=question.system,
        prompt=question.prompt,
        max_tokens=question.max_tokens,
        temperature=question.temperature,
        device="cuda:0" if facts.gpus else "cpu",
    )


async def _choose_node(services: Services, wanted: str | None) -> tuple[str, NodeFacts]:
    """Return the wanted node, or the first that answers with an environment, and its facts."""
    names = services.cluster.names()
    if wanted is not None and wanted not in names:
        raise UsageError(f"there is no node {wanted}", "Look at them: rackless nodes list")
    problem = UserError("there are no nodes yet", "Add one: rackless nodes add NAME --local")
    for name in (wanted,) if wanted is not None else names:
        try:
            facts = await services.cluster.agent(name).facts()
            python_of(name, facts)
        except UserError as error:
            problem = error
            continue
        return name, facts
    raise problem
