"""A model stays loaded over several requests, and goes when it should."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agents.contract.requests.chats import ChatDevice, ChatJob, ChatMessage, ChatTurn
from agents.contract.wire import to_wire
from agents.state import Home, identify
from tests.agents.serve.test_server import Agent, serve_agent
from tests.agents.trainer.ranks import DEMO

GPU = "GPU-1"


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    yield from serve_agent(tmp_path)


def ask(agent: Agent, kind: str, **args: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the result, and the events that came before it."""
    line = {"type": "request", "id": 1, "kind": kind, "args": args}
    agent.write(json.dumps(line).encode() + b"\n")
    told = []
    while (message := agent.read())["type"] != "response":
        told.append(message["data"]["message"])
    assert message["error"] is None, message["error"]
    return message["result"], told


def open_demo(agent: Agent, **changes: Any) -> dict[str, Any]:
    job = ChatJob(chat="c", python=sys.executable, model=str(DEMO / "model"), **changes)
    return ask(agent, "chat.open", **to_wire(job))[0]


def make_turn(text: str = "Who founded Brenford?") -> dict[str, Any]:
    turn = ChatTurn(messages=(ChatMessage(role="user", content=text),))
    found: dict[str, Any] = to_wire(turn)
    return found


def take_gpu(home: Path) -> None:
    """Let a living process lease the GPU, as a run's supervisor does."""
    identity = identify(os.getpid())
    assert identity is not None
    file = Home(home).leases / f"{GPU}.lock"
    file.write_text(json.dumps({"run_id": "run-9", "attempt": 1, **identity.to_json()}))


def test_several_turns_and_then_it_is_closed(agent: Agent) -> None:
    opened = open_demo(agent)
    assert (opened["device"], opened["note"]) == ("cpu", "")
    for _ in range(2):
        reply, told = ask(agent, "chat.ask", chat="c", turn=make_turn())
        assert "".join(told).strip() == reply["answer"]["text"]
    error = agent.ask("chat.ask", chat="c", turn=make_turn("x " * 4000))["error"]
    assert "the model holds 1,024" in error["message"]
    assert ask(agent, "chat.stop", chat="c")[0] == {}
    assert ask(agent, "chat.ask", chat="c", turn=make_turn())[0]["answer"]["text"]
    assert ask(agent, "chat.close", chat="c")[0] == {}
    reply, _ = ask(agent, "chat.ask", chat="c", turn=make_turn())
    assert (reply["answer"], reply["ended"]) == (None, "the connection was lost in the meantime")


def test_a_run_that_wants_the_gpu_gets_it(agent: Agent, tmp_path: Path) -> None:
    place = ChatDevice(device="cuda:0", device_id=GPU)
    silent = tmp_path / "silent"
    silent.write_text(
        """#!/bin/sh
        echo '{"kind": "opened", "load_s": 1.0, "runtime": "x"}'
        exec cat > /dev/null
        """
    )
    silent.chmod(0o700)
    job = ChatJob(chat="c", python=str(silent), model="m", devices=(place,))
    opened, _ = ask(agent, "chat.open", **to_wire(job))
    assert (opened["device"], opened["note"]) == ("cuda:0", "")
    take_gpu(tmp_path)
    reply, _ = ask(agent, "chat.ask", chat="c", turn=make_turn())
    assert reply["ended"] == "run run-9 has taken the GPU"
    opened = open_demo(agent, devices=(place,))
    assert opened["device"] == "cpu"
    assert opened["note"] == "run run-9 uses the GPU, so this is the CPU"


def test_a_cancelled_request_ends_its_program(agent: Agent, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.write_text('#!/bin/sh\necho \'{"kind": "progress", "message": "on"}\'\nsleep 60\n')
    slow.chmod(0o700)
    job = ChatJob(chat="c", python=str(slow), model="m")
    line = {"type": "request", "id": 7, "kind": "chat.open", "args": to_wire(job)}
    agent.write(json.dumps(line).encode() + b"\n")
    assert agent.read()["data"]["message"] == "on"
    assert agent.ask("cancel", 8, request=7)["result"] == {}
    ended = agent.read()
    assert ended["id"] == 7
    assert "could not be loaded" in ended["error"]["message"]
    assert agent.ask("cancel", 9, request=7)["result"] == {}, "it is over"


def test_a_model_that_is_not_there_is_named(agent: Agent) -> None:
    job = ChatJob(chat="c", python=sys.executable, model="/nowhere/at/all")
    error = agent.ask("chat.open", **to_wire(job))["error"]
    assert "does not exist" in error["message"]
    error = agent.ask("chat.open", **{**to_wire(job), "python": "/bin/false"})["error"]
    assert "could not be loaded: the model's program failed" in error["message"]
