"""Handlers of network probes: a free port, the link to a node, an all-reduce over all nodes."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

from agents.contract.node import LinkProbe
from agents.contract.requests.probes import (
    AllReduceProbe,
    ChoosePort,
    ChosenPort,
    ListenForProbe,
    ProbeDoor,
    ProbeLink,
)
from agents.contract.wire import to_wire
from agents.errors import ExpectedError
from agents.node.probes import answer_probe, make_greeting, open_listener, probe_link, read_greeting
from agents.node.probes import choose_port as choose_free_port
from agents.program import command
from agents.serve.channel import Call
from agents.serve.handlers import handles
from agents.shared.files.python_child import python_variables
from agents.state import archive_path

START_S = 60.0
"""Time to import torch, in addition to the probe's own deadline, in seconds."""


@handles(ChoosePort)
def choose_port(call: Call, request: ChoosePort) -> ChosenPort:
    """Return a free port at one of this node's addresses, and hold it until the master leaves."""
    return ChosenPort(port=choose_free_port(request.address, call.ports))


@handles(ListenForProbe)
def listen(call: Call, request: ListenForProbe) -> ProbeDoor:
    """Answer with a port and a greeting, then serve one probe of the peer that sends the
    greeting.
    """
    listener = open_listener(request.address)
    greeting = make_greeting()
    # The master needs the port before the other node can connect.
    serve = threading.Thread(
        target=answer_probe, args=(listener, greeting, request.timeout_s), daemon=True
    )
    serve.start()
    return ProbeDoor(port=listener.getsockname()[1], greeting=greeting.hex())


@handles(ProbeLink)
def connect(call: Call, request: ProbeLink) -> LinkProbe:
    """Measure the link to a listening node."""
    greeting = read_greeting(request.greeting)
    return probe_link(
        request.address, request.port, greeting, request.num_bytes, request.segment_bytes
    )


@handles(AllReduceProbe)
def allreduce(call: Call, probe: AllReduceProbe) -> dict[str, Any]:
    """Take part in one all-reduce, in a process of the training environment."""
    argv = command(probe.python, "agents.trainer.allreduce")
    # One thread: a probe must not slow down a run on this node.
    environ = {**python_variables(archive_path()), "OMP_NUM_THREADS": "1"}
    limit_s = probe.timeout_s + START_S
    try:
        # The credential goes through an anonymous file, since other users can read arguments.
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
