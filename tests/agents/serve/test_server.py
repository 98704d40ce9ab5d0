"""One request in, one response out: through a real process, and through the loop with any bytes."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agents.contract.messages import (
    MAX_LINE_BYTES,
    PROTOCOL_VERSION,
    Event,
    Hello,
    Request,
    Response,
    WireError,
    decode,
)
from agents.contract.wire import from_wire
from agents.errors import ExpectedError
from agents.serve.channel import AgentChannel, Call
from agents.serve.server import Server, read_lines
from agents.state import Home, boot_id, identity_from, read_json

REPOSITORY = Path(__file__).parents[3]


class Agent:
    """A served agent as a master sees it."""

    def __init__(self, home: Path, nonce: str = "n0") -> None:
        environ = {**os.environ, "RACKLESS_AGENT_HOME": str(home), "PYTHONPATH": str(REPOSITORY)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "agents", "serve", nonce],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
        )
        self.first = self.read_line()

    def read_line(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def read(self) -> Any:
        return json.loads(self.read_line())

    def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def ask(self, kind: str, request_id: int = 1, **args: Any) -> Any:
        """Return the response; events before it are passed over."""
        line = {"type": "request", "id": request_id, "kind": kind, "args": args}
        self.write(json.dumps(line).encode() + b"\n")
        while (message := self.read())["type"] != "response":
            pass
        assert message["id"] == request_id
        return message

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        code = self.process.wait(10)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return code


def serve_agent(home: Path) -> Iterator[Agent]:
    """Serve an agent; at the end its recorder ends too, which would sample for another 15 min."""
    made = Agent(home)
    assert made.read()["kind"] == "hello"
    yield made
    made.end()
    recorder = identity_from(read_json(home / "telemetry" / "recorder.json"))
    if recorder is not None and recorder.is_alive():
        os.kill(recorder.pid, signal.SIGTERM)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    yield from serve_agent(tmp_path / "home")


def test_nonce_comes_first_then_hello(tmp_path: Path) -> None:
    agent = Agent(tmp_path / "home", "secret-7")
    assert agent.first == b"RACKLESS secret-7\n"
    hello = agent.read()
    assert (hello["type"], hello["kind"]) == ("event", "hello")
    told = from_wire(Hello, hello["data"])
    assert set(hello["data"]) == {field.name for field in dataclasses.fields(Hello)}
    assert told.version == PROTOCOL_VERSION
    assert told.agent_home == str(tmp_path / "home")
    assert told.pid == agent.process.pid
    assert told.boot_id == boot_id()
    assert agent.end() == 0


def test_home_that_cannot_be_made_is_a_fatal_event(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    agent = Agent(tmp_path / "file" / "home")
    assert agent.first == b"RACKLESS n0\n"
    fatal = agent.read()
    assert fatal["kind"] == "fatal"
    assert fatal["data"]["kind"] == "user"
    assert f"preparing the agent's home folder {tmp_path}/file/home" in fatal["data"]["message"]
    assert agent.process.wait(10) == 1


def test_ping(agent: Agent) -> None:
    result = agent.ask("ping")["result"]
    assert abs(result["wall_s"] - time.time()) < 5
    assert abs(result["monotonic_s"] - time.monotonic()) < 5


def test_unknown_request(agent: Agent) -> None:
    error = agent.ask("coffee.make")["error"]
    assert error["kind"] == "unknown_request"
    assert "'coffee.make'" in error["message"]


@pytest.mark.parametrize(
    ("kind", "args", "named"),
    [
        ("attempt.status", {}, "args.run_id is missing"),
        ("attempt.status", {"run_id": "a", "attempt": "1"}, "args.attempt: expected int, got str"),
        ("attempt.stop", {"run_id": "a", "attempt": 1, "grace_s": "x"}, "args.grace_s"),
        ("attempt.launch", {"run_id": "a"}, "intent.attempt is missing"),
        ("stream.follow", {"run_id": "a", "attempt": 1, "offsets": [1]}, "args.offsets"),
        ("bundle.status", {"destination": "data/x", "files": [{"path": 1}]}, "args.files[0].path"),
        ("telemetry.follow", {"after_s": "now"}, "args.after_s"),
    ],
)
def test_bad_arguments_name_the_field(
    agent: Agent, kind: str, args: dict[str, Any], named: str
) -> None:
    error = agent.ask(kind, **args)["error"]
    assert error["kind"] == "bad_request"
    assert named in error["message"]
    assert kind in error["message"]


def test_user_error_has_a_message(agent: Agent) -> None:
    error = agent.ask("attempt.status", run_id="nope", attempt=1)["error"]
    assert error["kind"] == "user"
    assert error["message"] == "This node has no attempt 1 of run nope."


def test_garbage_and_oversize_lines_are_skipped(agent: Agent) -> None:
    agent.write(b"\x00\xff not json\n[1,2]\n{}\n\n")
    agent.write(b"x" * (3 * MAX_LINE_BYTES) + b"\n")
    agent.write(b'{"type":"request","id":"seven","kind":"ping"}\n')
    line = b'{"type":"request","id":5,"kind":"ping"}\n'
    agent.write(line)
    messages = [agent.read() for _ in range(6)]
    assert [m["kind"] for m in messages[:5]] == ["bad_line"] * 5
    assert "more than 1048576 bytes" in messages[3]["data"]["message"]
    assert messages[5]["id"] == 5
    with open(f"/proc/{agent.process.pid}/status") as file:
        peak = next(line for line in file if line.startswith("VmHWM"))
    assert int(peak.split()[1]) < 40 * 1024


@pytest.mark.alone
def test_slow_request_does_not_hold_up_ping(agent: Agent, tmp_path: Path) -> None:
    slow = tmp_path / "slow-python"
    slow.write_text("#!/bin/sh\nsleep 2\n")
    slow.chmod(0o755)
    query = {"lock_sha256": "0", "requirements": {}, "python": str(slow)}
    line = {"type": "request", "id": 90, "kind": "environment.find", "args": query}
    agent.write(json.dumps(line).encode() + b"\n")
    began_s = time.monotonic()
    for number in range(20):
        agent.ask("ping", number)
    assert time.monotonic() - began_s < 1.8
    message = agent.read()
    assert message["id"] == 90
    assert "does not work as a Python interpreter" in message["error"]["message"]


def test_shutdown_answers_then_ends(agent: Agent) -> None:
    assert agent.ask("shutdown")["result"] == {}
    assert agent.process.wait(10) == 0


def test_children_of_a_request_end_with_the_connection(agent: Agent, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    slow = tmp_path / "slow-python"
    slow.write_text(
        f"#!/bin/sh\necho $$ > {pid_file}.half; mv {pid_file}.half {pid_file}\nsleep 99\n"
    )
    slow.chmod(0o755)
    query = {"lock_sha256": "0", "requirements": {}, "python": str(slow)}
    line = {"type": "request", "id": 1, "kind": "environment.find", "args": query}
    agent.write(json.dumps(line).encode() + b"\n")
    deadline = time.monotonic() + 10
    while not pid_file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert agent.end() == 0
    assert not Path(f"/proc/{int(pid_file.read_text())}").exists()


# ---------------------------------------------------------------- the loop, in this process


class Loop:
    """A Server fed with bytes; collects what it sends."""

    def __init__(self, home: Path) -> None:
        self._read, self._out = os.pipe()
        self.channel = AgentChannel(self._out)
        self.server = Server(Home(home), self.channel)

    def feed(self, data: bytes) -> list[Any]:
        """Return the messages sent for these bytes, once all threads are done."""
        source, sink = os.pipe()
        os.set_blocking(self._read, False)
        writer = threading.Thread(target=_write_all, args=(sink, data))
        writer.start()
        before = set(threading.enumerate())
        self.server.run(source, lambda: None)
        writer.join()
        os.close(source)
        for thread in set(threading.enumerate()) - before:
            thread.join(10)
        with os.fdopen(os.dup(self._read), "rb") as file:
            return [decode(line) for line in (file.read() or b"").splitlines()]

    def close(self) -> None:
        os.close(self._read)
        os.close(self._out)


def _write_all(sink: int, data: bytes) -> None:
    with os.fdopen(sink, "wb") as file:
        file.write(data)


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    made = Loop(tmp_path)
    yield made
    made.close()


def request(kind: str, number: int, **args: Any) -> bytes:
    return (
        json.dumps({"type": "request", "id": number, "kind": kind, "args": args}).encode() + b"\n"
    )


def test_bug_in_a_handler_becomes_an_answer_with_traceback(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(call: Call) -> None:
        raise ZeroDivisionError(f"in {call.request.kind}")

    monkeypatch.setattr("agents.serve.server.find_handler", lambda kind: broken)
    answers = loop.feed(request("facts", 3))
    assert len(answers) == 1
    error = answers[0].error
    assert error.kind == "bug"
    assert error.message == "facts: ZeroDivisionError: in facts"
    assert "def broken" in error.traceback or "in broken" in error.traceback


@pytest.mark.parametrize("result", [object(), {"x": b"bytes"}, {"x": "y" * MAX_LINE_BYTES}])
def test_answer_that_cannot_be_sent_becomes_an_error(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, result: Any
) -> None:
    monkeypatch.setattr("agents.serve.server.find_handler", lambda kind: lambda call: result)
    answers = loop.feed(request("facts", 3))
    assert [answer.id for answer in answers] == [3]
    assert answers[0].error is not None


def test_more_requests_than_slots_are_refused(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agents.serve.server.MAX_REQUESTS", 2)
    gate = threading.Event()
    crowded = Loop(Path("/"))

    def slow(call: Call) -> dict[str, Any]:
        gate.wait(10)
        return {}

    monkeypatch.setattr("agents.serve.server.find_handler", lambda kind: slow)
    threading.Timer(0.3, gate.set).start()
    answers = crowded.feed(b"".join(request("facts", n) for n in range(5)))
    crowded.close()
    assert sorted(answer.id for answer in answers) == [0, 1, 2, 3, 4]
    refused = [answer for answer in answers if answer.error is not None]
    assert len(refused) == 3
    assert refused[0].error.message == "this node is already handling 2 requests"


def test_work_after_the_answer_is_dropped_when_the_answer_is_an_error(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []

    def handler(call: Call) -> dict[str, Any]:
        call.afterwards.append(lambda: ran.append(call.request.id))
        if call.request.id == 1:
            raise ExpectedError("no")
        return {}

    monkeypatch.setattr("agents.serve.server.find_handler", lambda kind: handler)
    loop.feed(request("facts", 1) + request("facts", 2))
    assert ran == [2]


def test_broken_way_out_ends_the_loop(tmp_path: Path) -> None:
    reader, out = os.pipe()
    os.close(reader)
    channel = AgentChannel(out)
    source, sink = os.pipe()
    os.write(sink, request("ping", 1) + request("ping", 2))
    Server(Home(tmp_path), channel).run(source, lambda: None)  # the sink stays open
    assert channel.broken.is_set()
    for file in (out, source, sink):
        os.close(file)


@pytest.mark.parametrize("cancelled", [False, True])
def test_the_end_waits_until_what_a_killed_program_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    left, killed = tmp_path / "left", threading.Event()

    def handler(call: Call) -> dict[str, Any]:
        try:
            call.children.run(["sh", "-c", f"touch {left}; exec sleep 60"])
        finally:
            killed.set()
            time.sleep(0.3)
            left.unlink()
        return {}

    monkeypatch.setattr("agents.serve.server.find_handler", lambda kind: handler)
    source, sink = os.pipe()

    def write() -> None:
        os.write(sink, request("facts", 1))
        while not left.exists():
            time.sleep(0.01)
        if cancelled:
            os.write(sink, request("cancel", 2, request=1))
            killed.wait(10)
        os.close(sink)

    writer = threading.Thread(target=write)
    writer.start()
    with open(os.devnull, "wb") as out:
        Server(Home(tmp_path), AgentChannel(out.fileno())).run(source, lambda: None)
    assert not left.exists()
    writer.join()
    os.close(source)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
envelopes = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["request", "response", "event", "x", 1]),
        "id": st.integers(0, 99) | json_values,
        "kind": st.sampled_from(["ping", "attempt.status", "stream.read", "checkpoint.verify"])
        | st.text(max_size=10),
        "args": json_values,
    },
).map(lambda body: json.dumps(body).encode())


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(lines=st.lists(envelopes | st.binary(max_size=60), max_size=6))
def test_any_lines_are_survived_and_each_request_is_answered_once(
    loop: Loop, lines: list[bytes]
) -> None:
    messages = loop.feed(b"".join(line.replace(b"\n", b"") + b"\n" for line in lines))
    expected, num_bad = [], 0
    for line in lines:
        try:
            message = decode(line.replace(b"\n", b""))
        except WireError:
            num_bad += bool(line.strip())
        else:
            expected += [message.id] if isinstance(message, Request) else []
    answered = [message.id for message in messages if isinstance(message, Response)]
    assert sorted(answered) == sorted(expected)
    complaints = [m for m in messages if isinstance(m, Event) and m.kind == "bad_line"]
    assert len(complaints) == num_bad
    bugs = [m.error for m in messages if isinstance(m, Response) and m.error]
    assert not [error for error in bugs if error.kind == "bug"]


@settings(max_examples=100, deadline=None)
@given(
    lines=st.lists(st.binary(max_size=40).map(lambda b: b.replace(b"\n", b"")), max_size=8),
    cuts=st.lists(st.integers(1, 30), max_size=20),
)
def test_lines_come_out_as_they_went_in_however_they_are_cut(
    lines: list[bytes], cuts: list[int]
) -> None:
    data = b"".join(line + b"\n" for line in lines) + b"unfinished"
    source, sink = os.pipe()

    def write() -> None:
        rest = data
        for cut in cuts:
            os.write(sink, rest[:cut])
            rest = rest[cut:]
        os.write(sink, rest)
        os.close(sink)

    writer = threading.Thread(target=write)
    writer.start()
    assert list(read_lines(source, lambda: None)) == lines
    writer.join()
    os.close(source)
