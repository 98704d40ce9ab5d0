"""A fleet for tests, and the events that it publishes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from app.events import Event, EventHub, NodeChanged, SampleArrived
from app.nodes.fleet import Fleet


class Seen:
    """Recorder of published events."""

    def __init__(self) -> None:
        self.hub = EventHub()
        self.events: list[Event] = []

    def samples(self) -> list[SampleArrived]:
        return [event for event in self.events if isinstance(event, SampleArrived)]

    def states(self) -> list[str]:
        """The states of all nodes in order, repetitions left out."""
        states: list[str] = []
        for event in self.events:
            if isinstance(event, NodeChanged) and [event.node.state] != states[-1:]:
                states.append(event.node.state)
        return states


@contextlib.asynccontextmanager
async def fleet_at(home: Path, seen: Seen) -> AsyncIterator[Fleet]:
    with seen.hub.listening(seen.events.append):
        async with Fleet(home, seen.hub) as fleet, asyncio.timeout(60):
            yield fleet
