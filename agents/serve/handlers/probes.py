"""Handle requests that probe the network: free port, link to a node, all-reduce over all."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass
from typing import Any

from agents.contract.names import MAX_WAIT_S, check_number
from agents.contract.node import AllReduceProbe, LinkProbe
from agents.contract.wire import from_wire, to_wire
from agents.errors import ExpectedError
from agents.node.probes import (
    answer_probe,
    make_greeting,
    open_listener,
    probe_link,
    read_greeting,
)
from agents.node.probes import choose_port as choose_free_port
from agents.program import command
from agents.serve.channel import Call
from agents.shared.files.python_child import python_variables
from agents.state import archive_path

MAX_PROBE_BYTES = 1 << 30
"""Number of bytes that a probe may send over a link."""
MIN_SEGMENT_BYTES = 88
"""Smallest payload of a packet that Linux lets a program ask for."""
START_S = 60.0
"""Time for importing torch, on top of the probe's own deadline, in seconds."""


@dataclass(frozen=True)
class PortArgs:
    address: str


@dataclass(frozen=True)
class ListenArgs:
    address: str
    timeout_s: float = 30.0

    def check_foreign(self) -> None:
        check_number("timeout_s", self.timeout_s, 0, MAX_WAIT_S)


@dataclass(frozen=True)
class Listening:
    port: int
    greeting: str
    """What the other node has to send first, in hex; known only to whom the master gives it."""


@dataclass(frozen=True)
class ConnectArgs:
    address: str
    port: int
    greeting: str
    num_bytes: int = 0
    segment_bytes: int | None = None

    def check_foreign(self) -> None:
        check_number("port", self.port, 1, 65535)
        check_number(
            "segment_bytes", self.segment_bytes or MIN_SEGMENT_BYTES, MIN_SEGMENT_BYTES, 65535
        )
        check_number("num_bytes", self.num_bytes, 0, MAX_PROBE_BYTES)


def choose_port(call: Call) -> dict[str, Any]:
    """Return a free port of one of this node's addresses."""
    return {"port": choose_free_port(from_wire(PortArgs, call.args, "args").address)}


def listen(call: Call) -> Listening:
    """Answer with a port and a greeting, then serve one probe of whoever sends that greeting."""
    args = from_wire(ListenArgs, call.args, "args")
    listener = open_listener(args.address)
    greeting = make_greeting()
    # The master needs the port before the other node can connect.
    serve = threading.Thread(
        target=answer_probe, args=(listener, greeting, args.timeout_s), daemon=True
    )
    serve.start()
    return Listening(listener.getsockname()[1], greeting.hex())


def connect(call: Call) -> LinkProbe:
    """Measure the link to a listening node."""
    args = from_wire(ConnectArgs, call.args, "args")
    greeting = read_greeting(args.greeting)
    return probe_link(args.address, args.port, greeting, args.num_bytes, args.segment_bytes)


def allreduce(call: Call) -> dict[str, Any]:
    """Take part in one all-reduce, in the training environment's own process."""
    probe = from_wire(AllReduceProbe, call.args, "args")
    argv = command(probe.python, "agents.trainer.allreduce")
    environ = {**python_variables(archive_path()), "OMP_NUM_THREADS": "1"}
    limit_s = probe.timeout_s + START_S
    try:
        # In a file without a name: arguments, which can be read by others, must not hold a key.
        with os.fdopen(os.memfd_create("probe"), "w+", encoding="ascii") as stdin:
            json.dump(to_wire(probe), stdin)
            stdin.seek(0)
            _, lines = call.children.run(
                argv, environ=environ, timeout_s=limit_s, stdin=stdin.fileno()
            )
    except TimeoutError as error:
        raise ExpectedError(
            f"The all-reduce of rank {probe.rank} did not finish within {probe.timeout_s:g} s.",
            "One of the ranks hangs; check the links between the nodes: rackless check",
        ) from error
    return _read_answer(probe, lines)


def _read_answer(probe: AllReduceProbe, lines: list[str]) -> dict[str, Any]:
    # torch may print warnings before and after the answer.
    for line in reversed(lines):
        if line.startswith("RACKLESS "):
            answer: dict[str, Any] = json.loads(line.partition(" ")[2])
            if "message" in answer:
                raise ExpectedError(answer["message"], answer.get("hint", ""))
            return answer
    said = lines[-1] if lines else "nothing"
    raise ExpectedError(
        f"The all-reduce of rank {probe.rank} did not run with {probe.python}; it said: "
        f"{said[:300]}",
        "Build the training environment again: rackless nodes setup NAME",
    )
