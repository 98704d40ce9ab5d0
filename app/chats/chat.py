"""Conversations with a run's model, its base model, or an artifact on this PC, run on a node.

A model is loaded once and stays on its node until the conversation is closed. No port is opened,
since turns travel over the agent's connection. If the node has unloaded the model (it was idle, a
run needed its GPU, or the connection was lost), the next question loads it again.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

from agents.contract.formats import EXPORTS
from agents.contract.node import NodeFacts
from agents.contract.requests import chats
from agents.contract.requests.node import ReadFacts
from agents.contract.run_layout import checkpoint_path
from agents.shared.files.folder_files import read_regular
from agents.shared.files.full_disk import name_disk_error
from app import conversation
from app.artifacts.bundle import bundle_artifact, read_artifact, read_origin
from app.artifacts.exports.export import bring_packages, find_whole
from app.artifacts.record import find_artifact, folder_here, look_at_folders
from app.errors import RacklessError, UsageError, UserError
from app.progress import OnMessage, messages
from app.provisioning.environment import python_of
from app.runs.inputs.run_inputs import recall_inputs, send
from app.runs.nodes.node_pool import NodeAgent
from app.runs.services import Services


@dataclass(slots=True)
class _Talk:
    subject: conversation.Subject
    loaded: conversation.Loaded
    is_asked: bool = False


class Chats:
    """Conversations of one master, which end with it."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._talks: dict[int, _Talk] = {}
        self._keys = itertools.count(1)
        # One answer at a time per node, so that measured speeds are comparable.
        self._queues: dict[str, asyncio.Lock] = {}

    async def open(self, subject: conversation.Subject, tell: OnMessage) -> conversation.Loaded:
        """Load a model.

        Raises:
            UserError: there is no such model, or it cannot be loaded.
        """
        found = await _load(self._services, subject, tell, next(self._keys))
        self._talks[found.key] = _Talk(subject, found)
        return found

    async def ask(
        self, key: int, turn: chats.ChatTurn, tell: OnMessage, say: OnMessage
    ) -> chats.ChatAnswer:
        """Return the answer of a loaded model; `say` is called with each piece.

        Cancelling the call also stops the answer on the node.

        Raises:
            UserError: the conversation is closed, too long, or the node cannot be asked.
        """
        talk = self._talk(key)
        # One retry after loading the model again; a second loss means that the node is busy.
        for _ in range(2):
            node = talk.loaded.node
            async with self._queues.setdefault(node, asyncio.Lock()):
                talk.is_asked = True
                try:
                    agent = self._services.pool.agent(node)
                    reply = await agent.ask(
                        chats.AskChat(chat=talk.loaded.chat, turn=turn), messages(say)
                    )
                except asyncio.CancelledError:
                    # Before `is_asked` is reset, else `stop` does nothing; shielded, since this
                    # task is already being cancelled.
                    await asyncio.shield(self.stop(key))
                    raise
                finally:
                    talk.is_asked = False
            if reply.answer is not None:
                return reply.answer
            tell(f"{reply.ended}; loading the model again")
            subject = replace(talk.subject, node=talk.loaded.node)
            # The caller keeps its key; only the id on the node is new.
            talk.loaded = await _load(self._services, subject, tell, key)
        raise UserError(
            f"{talk.loaded.node} unloaded the model before it answered: {reply.ended}",
            "Wait until that PC is free, or choose another node.",
        )

    async def stop(self, key: int) -> None:
        """Stop the answer that is being generated."""
        talk = self._talk(key)
        if talk.is_asked:
            await self._services.pool.agent(talk.loaded.node).ask(
                chats.StopChat(chat=talk.loaded.chat)
            )

    async def close(self, key: int) -> None:
        """Unload a model; a node that does not answer unloads it by itself."""
        talk = self._talks.pop(key, None)
        if talk is None:
            return
        try:
            await self._services.pool.agent(talk.loaded.node).ask(
                chats.CloseChat(chat=talk.loaded.chat)
            )
        except RacklessError:
            return  # the node unloads the model when the connection ends or the model is idle

    def _talk(self, key: int) -> _Talk:
        if key not in self._talks:
            raise UserError("this conversation is closed", "Start a new one.")
        return self._talks[key]


async def _load(
    services: Services, subject: conversation.Subject, tell: OnMessage, key: int
) -> conversation.Loaded:
    folder = await asyncio.to_thread(find_folder, services, subject.what)
    if folder is not None:
        return await _load_artifact(services, folder, subject, tell, key)
    return await _load_run(services, services.runs.get(subject.what).run_id, subject, tell, key)


def find_folder(services: Services, what: str) -> Path | None:
    """Return the folder that `what` names or that holds the artifact `what`; None: it is a run.

    Raises:
        UserError: there is such an artifact, but no copy of it on this PC.
    """
    # A slash means a path; a bare name is a folder here, else an artifact, else a run.
    path = Path(os.path.expanduser(what))
    if "/" in what or path.is_dir():
        return path.absolute()
    name = what.partition(":")[0]
    if not services.artifacts.versions(name):
        return None
    return folder_here(look_at_folders(find_artifact(services, what)))


def find_project(services: Services, what: str) -> conversation.Project:
    """Return the base model and data of the run or artifact `what`.

    Raises:
        UserError: there is no such run or artifact.
    """
    folder = find_folder(services, what)
    if folder is None:
        spec = services.runs.get(what).spec
        return conversation.Project(base=spec.model, data=spec.data.train)
    origin = read_origin(folder)
    if origin is None:
        # An artifact made elsewhere is a project of its own.
        return conversation.Project(base=str(folder), data="")
    return conversation.Project(base=origin.base, data=origin.data)


def read_prompt_file(path: Path) -> tuple[str, ...]:
    """Return the prompts in a file, one per line.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        return conversation.read_prompts(read_regular(path).decode("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}", "Name a file of plain text.") from error


def write_comparison(
    project: conversation.Project, found: conversation.AnswerComparison, path: Path
) -> None:
    """Write a comparison as Markdown.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        path.write_text(conversation.to_markdown(project, found), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {name_disk_error(error)}", "Name another file."
        ) from error


async def _load_run(
    services: Services, run_id: str, subject: conversation.Subject, tell: OnMessage, key: int
) -> conversation.Loaded:
    if subject.type is not None:
        raise UsageError("a run has no types; only an artifact has", "Leave --type out.")
    run = services.runs.get(run_id)
    inputs = await asyncio.to_thread(recall_inputs, services, run)
    nodes = services.pool.names() if subject.node is None else (subject.node,)
    copy = (await find_whole(services, run.run_id, nodes, subject.checkpoint))[0]
    model = await send(services, copy.node, inputs.model, is_model=True)
    checkpoint = checkpoint_path(run.run_id, copy.info.step)
    what = "base" if subject.of_base else f"step {copy.info.step}"
    tell(f"loading {what} on {copy.node}")
    facts = await services.pool.agent(copy.node).ask(ReadFacts())
    job = replace(
        _make_job(copy.node, facts, model),
        checkpoint=None if subject.of_base else checkpoint,
        # An adapter trained on 4-bit weights would answer differently on 16-bit ones.
        in_4_bits=run.spec.adapter.kind == "qlora",
    )
    opened = await _open(services.pool.agent(copy.node), job, tell)
    return conversation.Loaded(
        key=key, chat=job.chat, title=f"{run.name}, {what}", node=copy.node, opened=opened
    )


async def _load_artifact(
    services: Services, folder: Path, subject: conversation.Subject, tell: OnMessage, key: int
) -> conversation.Loaded:
    if subject.of_base:
        raise UsageError(
            "an artifact does not include its base model", "Name the run to chat with its base."
        )
    if subject.checkpoint is not None:
        raise UsageError(
            "an artifact has a single checkpoint", "Name the run to use another checkpoint."
        )
    artifact = await asyncio.to_thread(read_artifact, folder)
    if subject.type is not None and not EXPORTS[artifact.method].joins_types:
        raise UsageError(f"{artifact.method} has no types to choose from", "Leave --type out.")
    source = await asyncio.to_thread(bundle_artifact, artifact, subject.type, services.hashes)
    node, facts = await _choose_node(services, subject.node)
    agent = services.pool.agent(node)
    packages = await bring_packages(agent, python_of(node, facts), artifact.method, tell)
    tell(f"loading {folder.name} on {node}")
    job = _make_job(node, facts, await send(services, node, source))
    opened = await _open(agent, replace(job, packages=packages), tell)
    kind = subject.type or (artifact.types[0] if artifact.types else "")
    title = f"{folder.name} {kind}".strip()
    return conversation.Loaded(key=key, chat=job.chat, title=title, node=node, opened=opened)


def _make_job(node: str, facts: NodeFacts, model: str) -> chats.ChatJob:
    gpus = [chats.ChatDevice(device=f"cuda:{gpu.index}", device_id=gpu.uuid) for gpu in facts.gpus]
    return chats.ChatJob(
        chat=uuid.uuid4().hex, python=python_of(node, facts), model=model, devices=tuple(gpus)
    )


async def _open(agent: NodeAgent, job: chats.ChatJob, tell: OnMessage) -> chats.ChatOpened:
    """Load the model; if the caller is cancelled, unload it."""
    try:
        return await agent.ask(job, messages(tell))
    except asyncio.CancelledError:
        # The master chose the id, so it can close the chat although no answer has come.
        await asyncio.shield(agent.ask(chats.CloseChat(chat=job.chat)))
        raise


async def _choose_node(services: Services, wanted: str | None) -> tuple[str, NodeFacts]:
    """Return the wanted node, or the first usable one that answers, with its facts."""
    names = services.pool.names()
    if wanted is not None and wanted not in names:
        raise UsageError(f"there is no node {wanted}", "List them: rackless nodes list")
    problem = UserError("there are no nodes yet", "Add one: rackless nodes add NAME --local")
    for name in (wanted,) if wanted is not None else names:
        try:
            facts = await services.pool.agent(name).ask(ReadFacts())
            python_of(name, facts)
        except UserError as error:
            problem = error  # shown if no other node is usable
            continue
        return name, facts
    raise problem
