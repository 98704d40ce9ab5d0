"""Handle the question whether this node can use files where they lie on a share."""

from __future__ import annotations

import threading

from agents.contract.in_place import PlaceAnswer, PlaceAnswers, PlaceQueries, may_have
from agents.contract.json_text import read_said
from agents.contract.shares import read_mounts
from agents.contract.wire import WireError, from_wire, to_wire
from agents.errors import ExpectedError
from agents.node.files import job_folder
from agents.serve.channel import Call
from agents.serve.handlers.jobs import job_environ
from agents.state import agent_command, write_json


def find_places(call: Call) -> PlaceAnswers:
    """Return where this node has the files of each query, after it has compared their content.

    Raises:
        ExpectedError: the search ended without an answer.
    """
    args = from_wire(PlaceQueries, call.args, "args")
    if not may_have(args.queries, read_mounts()):
        return PlaceAnswers(answers=(PlaceAnswer(),) * len(args.queries))
    with job_folder(call.home) as folder:
        job = folder / "job.json"
        write_json(job, to_wire(args))
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

    # A thread, since a program that waits for a server may not end even when it is killed.
    threading.Thread(target=run, daemon=True).start()
    ended.wait()
    if not found:
        raise ExpectedError(f"The search for shared files ended without an answer: {last[0][:400]}")
    return found[0]
