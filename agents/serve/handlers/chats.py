"""Handlers of requests about chats: load a model, ask it, stop an answer, unload it."""

from __future__ import annotations

from typing import Any

from agents.contract.json_text import read_said
from agents.contract.requests.chats import (
    AskChat,
    ChatAnswer,
    ChatDevice,
    ChatJob,
    ChatOpened,
    ChatReply,
    CloseChat,
    StopChat,
)
from agents.contract.wire import from_wire, to_wire
from agents.errors import ExpectedError
from agents.node.files import job_folder
from agents.program import command
from agents.serve.channel import Call
from agents.serve.chats import Chat
from agents.serve.handlers import handles
from agents.serve.programs import job_environ
from agents.state import Home, write_json
from agents.supervisor.leases import announce, find_holder

_CPU = ChatDevice(device="cpu", device_id="cpu")


@handles(ChatJob)
def open_chat(call: Call, job: ChatJob) -> ChatOpened:
    """Load a model; it stays until it is closed, is idle, or other work leases its GPU."""
    place, note = _choose_device(call.home, job)
    packages = [str(call.home.path / job.packages)] if job.packages else []
    # Registered before it is loaded, so that a close can end the loading.
    chat = call.chats[job.chat] = Chat(
        lambda: _find_taker(call.home, place),
        lambda: announce(call.home, place.device_id, "a chat"),
    )
    with job_folder(call.home) as folder:
        file = folder / "job.json"
        on_gpu = place.device != "cpu"
        write_json(
            file, {**to_wire(job), "device": place.device, "in_4_bits": job.in_4_bits and on_gpu}
        )
        argv = command(job.python, "agents.quantizers.chat", str(file))
        # On the CPU the program must not see a GPU, since initializing CUDA takes GPU memory.
        shown = None if on_gpu else place.device
        chat.start(call.children, argv, job_environ(call.home, packages, shown), read_said)
        said = _wait_for(chat, call, "opened")
    if said is None:
        # A failed load leaves nothing to close or ask.
        call.chats.pop(job.chat, None)
        raise ExpectedError(f"The model could not be loaded: {chat.ended}.", "Try another node")
    return from_wire(ChatOpened, {**said, "device": place.device, "note": note}, "opened")


@handles(AskChat)
def ask(call: Call, request: AskChat) -> ChatReply:
    """Let a loaded model continue a conversation."""
    chat = call.chats.get(request.chat)
    if chat is None:
        return ChatReply(answer=None, ended="the connection was lost in the meantime")
    # Messages carry no question id, so a second listener would receive the first one's answer.
    if not chat.asking.acquire(blocking=False):
        raise ExpectedError(
            "The model is still answering the previous question.", "Stop that answer first"
        )
    try:
        chat.send({"kind": "ask", "turn": to_wire(request.turn)})
        said = _wait_for(chat, call, "answer")
    finally:
        chat.asking.release()
    if said is None:
        return ChatReply(answer=None, ended=chat.ended)
    return ChatReply(answer=from_wire(ChatAnswer, said, "answer"))


@handles(StopChat)
def stop(call: Call, request: StopChat) -> None:
    """Cut the current answer short."""
    chat = call.chats.get(request.chat)
    # A chat that is gone has no answer to stop.
    if chat is not None:
        chat.send({"kind": "stop"})


@handles(CloseChat)
def close(call: Call, request: CloseChat) -> None:
    """Unload a model."""
    chat = call.chats.pop(request.chat, None)
    if chat is not None:
        chat.end("it was closed")


def _wait_for(chat: Chat, call: Call, kind: str) -> dict[str, Any] | None:
    """Return the next message of this kind from the program, or None if it has ended."""
    for said in chat.listen():
        if said.get("kind") == kind:
            return said
        if said.get("kind") == "failed":
            raise ExpectedError(str(said.get("message", "")), str(said.get("hint", "")))
        if said.get("kind") in ("progress", "piece"):
            call.progress(str(said.get("message", "")))
    return None


def _choose_device(home: Home, job: ChatJob) -> tuple[ChatDevice, str]:
    """Return the device for the model, and why it is the CPU although GPUs were requested."""
    holders = {place: find_holder(home, place.device_id) for place in job.devices}
    free = [place for place, holder in holders.items() if holder is None]
    if free:
        return free[0], ""
    names = sorted({holder.name for holder in holders.values() if holder is not None})
    if not names:
        return _CPU, ""
    use = "uses" if len(names) == 1 else "use"
    return _CPU, f"{' and '.join(names)} {use} the GPU, so this is the CPU"


def _find_taker(home: Home, place: ChatDevice) -> str | None:
    holder = None if place.device == "cpu" else find_holder(home, place.device_id)
    return None if holder is None else holder.name
