"""Find the nodes that can use a run's model and data in place, on a share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from agents.contract.requests.shared import PlaceQueries
from agents.contract.shares import SharedPlace
from app.library.bundles import Source
from app.library.shares import ask_for, require_answer
from app.progress import OnMessage, messages
from app.runs.services import Services
from app.text import show_list

if TYPE_CHECKING:
    from agents.contract.in_place import PlaceAnswer, PlaceQuery


Places = Mapping[tuple[str, str], SharedPlace]
"""Sources used in place, by node and by name in a sentence (`the model`)."""


async def find_places(
    services: Services,
    nodes: Sequence[str],
    sources: Mapping[str, Source],
    report: OnMessage = lambda line: None,
) -> Places:
    """Return the sources that the nodes use in place; they need copies of all others.

    Args:
        services: stores and nodes.
        nodes: nodes to ask.
        sources: sources that the nodes need, by name in a sentence.
        report: callback with the sources used in place, and the reasons for copies.

    Raises:
        UserError: a server does not answer this PC, or a node was lost.
    """
    asked = await asyncio.to_thread(_ask_for_all, sources)
    if not asked:
        return {}
    queries = tuple(asked.values())
    answers = await asyncio.gather(*(_ask(services, node, queries, report) for node in nodes))
    found: dict[tuple[str, str], SharedPlace] = {}
    for node, answered in zip(nodes, answers, strict=True):
        for what, place in zip(asked, answered, strict=True):
            if place.path is not None:
                found[node, what] = SharedPlace(path=place.path, share=place.share)
            elif place.problem:
                report(f"{node} gets a copy of {what}: {place.problem}")
    for what in asked:
        _say_places(nodes, what, found, report)
    return found


def _ask_for_all(sources: Mapping[str, Source]) -> dict[str, PlaceQuery]:
    require_answer(source.root for source in sources.values() if source.root is not None)
    found = {what: ask_for(source) for what, source in sources.items()}
    return {what: query for what, query in found.items() if query is not None}


async def _ask(
    services: Services, node: str, queries: Sequence[PlaceQuery], report: OnMessage
) -> tuple[PlaceAnswer, ...]:
    agent = services.pool.agent(node)
    return (
        await agent.ask(
            PlaceQueries(queries=tuple(queries)), messages(lambda line: report(f"{node}: {line}"))
        )
    ).answers


def _say_places(nodes: Sequence[str], what: str, places: Places, report: OnMessage) -> None:
    by_share: dict[str, list[str]] = {}
    for node in nodes:
        if (node, what) in places:
            by_share.setdefault(places[node, what].share, []).append(node)
    parts = [
        f"used in place from {share} on {show_list(names)}" for share, names in by_share.items()
    ]
    copied = [node for node in nodes if (node, what) not in places]
    if parts and copied:
        parts.append(f"copied to {show_list(copied)}")
    if parts:
        report(f"{what}: {', '.join(parts)}")


def record_places(
    services: Services, run_id: str, found: Mapping[str, Sequence[SharedPlace]]
) -> None:
    """Add an event to the run for each share that its nodes use in place."""
    by_share: dict[str, list[str]] = {}
    for node, places in found.items():
        for place in places:
            by_share.setdefault(place.share, []).append(node)
    for share, nodes in by_share.items():
        text = f"{share} is used in place on {show_list(nodes)}"
        services.runs.add_event(run_id, "setting", text)
