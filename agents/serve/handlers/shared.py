"""Handler of the request for the places at which this node can read files of a share."""

from __future__ import annotations

import threading

from agents.contract.in_place import PlaceAnswer, may_have
from agents.contract.json_text import read_said
from agents.contract.requests.shared import PlaceAnswers, PlaceQueries
from agents.contract.shares import read_mounts
from agents.contract.wire import WireError, from_wire, to_wire
from agents.errors import ExpectedError
from agents.node.files import job_folder
from agents.serve.channel import Call
from agents.serve.handlers import handles
from agents.serve.programs import job_environ
from agents.state import agent_command, write_json


@handles(PlaceQueries)
def find_places(call: Call, request: PlaceQueries) -> PlaceAnswers:
    """Return where this node has the files of each query, after comparing their content.

    Raises:
        ExpectedError: the search ended without an answer.
    """
    # Mounts are read from a local table; a server that hangs is not contacted for this.
    if not may_have(request.queries, read_mounts()):
        return PlaceAnswers(answers=(PlaceAnswer(),) * len(request.queries))
    with job_folder(call.home) as folder:
        job = folder / "job.json"
        write_json(job, to_wire(request))
        return _search(call, [*agent_command(), "shared", str(job)])


def _search(call: Call, argv: list[str]) -> PlaceAnswers:
    found: list[PlaceAnswers] = []
    last, ended = [""], threading.Event()

    def hear(line: str) -> None:
        said = read_said(line)
        if said.get("kind") == "progress":
            call.progress(str(said.get("message", "")))
        elif said.get("kind") == "places":
            found.append(from_wire(PlaceAnswers, said, "places"))
            ended.set()
        last[0] = line

    def run() -> None:
        try:
            call.children.run(argv, environ=job_environ(call.home), on_line=hear)
        except (ExpectedError, WireError) as error:
            last[0] = str(error)
        finally:
            ended.set()

    # A thread, since a program that waits for a dead server may survive SIGKILL.
    threading.Thread(target=run, daemon=True).start()
    ended.wait()
    if not found:
        raise ExpectedError(f"The search for shared files ended without an answer: {last[0][:400]}")
    return found[0]
