"""Parts that the core knows or asks for: runs with their events, nodes with facts and logs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from agents.contract.messages import to_wire
from app.core.core import Core
from app.core.nodes import ListNodes, ReadNodeLogs, RefreshNode
from app.core.runs import ListRuns, ReadRunEvents
from app.doctor.part import ReportPart, json_part, keep_end, problem_part
from app.errors import RacklessError, UserError, describe_error
from app.progress import OnMessage

NODE_TIMEOUT_S = 30.0
"""Time in which a node has to answer, in seconds; first contact sends the agent, too."""
MAX_RUNS = 10
MAX_EVENTS = 200


async def collect_cluster(home: Path, node: str | None, progress: OnMessage) -> list[ReportPart]:
    """Return the parts about runs and nodes, or one that says why the store cannot be opened.

    Args:
        home: folder of this PC's files.
        node: only this node; None: all.
        progress: called with a sentence before each step that takes time.

    Raises:
        UserError: there is no such node.
    """
    try:
        async with Core.open(home) as core:
            names = [one.name for one in await core.do(ListNodes())]
            if node is not None and node not in names:
                raise NoSuchNode(node, names)
            parts = [ReportPart(name="store.txt", what="the store", text=_describe_store(core))]
            parts += await _collect_runs(core, node)
            asked = [node] if node is not None else names
            answers = await asyncio.gather(*(_ask_node(core, one, progress) for one in asked))
            return [*parts, *(part for answer in answers for part in answer)]
    except NoSuchNode:
        raise
    except (RacklessError, OSError) as error:
        why = describe_error(error) if isinstance(error, RacklessError) else str(error)
        return [problem_part("store.txt", "the store, runs and answers of nodes", why)]


class NoSuchNode(UserError):
    """Raised when the node to report on is not in the list."""

    def __init__(self, name: str, known: list[str]) -> None:
        nodes = ", ".join(known) or "none"
        super().__init__(f"there is no node {name}", f"Nodes: {nodes}", where=name)


def _describe_store(core: Core) -> str:
    return f"opened{': ' + core.notice if core.notice else ''}\n"


async def _collect_runs(core: Core, node: str | None) -> list[ReportPart]:
    known = await core.do(ListRuns())
    rows: list[dict[str, Any]] = []
    for run in [run for run in known if node is None or node in run.nodes][:MAX_RUNS]:
        events = await core.do(ReadRunEvents(run_id=run.run_id))
        newest = [to_wire(event) for event in events[-MAX_EVENTS:]]
        rows.append({"run": to_wire(run), "events": newest})
    return [json_part("runs.json", "newest runs: settings, states, errors and events", rows)]


async def _ask_node(core: Core, name: str, progress: OnMessage) -> list[ReportPart]:
    progress(f"asking {name}")
    file, what = f"nodes/{name}.json", f"facts and environment of {name}"
    try:
        async with asyncio.timeout(NODE_TIMEOUT_S):
            found = await core.do(RefreshNode(name=name))
            tails = await core.do(ReadNodeLogs(name=name))
    except TimeoutError:
        why = f"{name} did not answer within {NODE_TIMEOUT_S:.0f} s"
        return [problem_part(file, what, why)]
    except RacklessError as error:
        return [problem_part(file, what, describe_error(error))]
    parts = [json_part(file, what, to_wire(found))]
    for tail in tails:
        log = f"nodes/{name}/{tail.run_id}-{tail.attempt}-{tail.name}"
        _, _, whole_lines = tail.text.partition("\n")
        is_cut = tail.size_bytes > len(tail.text.encode("utf-8"))
        text = keep_end(whole_lines if is_cut else tail.text)
        parts.append(ReportPart(name=log, what=f"end of a log on {name}", text=text))
    return parts
