"""Find nodes whose agents have one folder, as with a home on a shared drive.

Each node keeps its recorder, leases, attempts and logs there, so that nodes with one folder would
take the other's processes for their own dead ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Protocol

from agents.contract.node import NodeFacts
from agents.contract.requests import Answer, NodeRequest
from agents.contract.requests.storage import FindMarks, MarkHome
from app.errors import RacklessError, UserError
from app.text import show_list

OWN_FOLDER = (
    "sudo install -d -o $USER /var/lib/rackless-$USER && "
    "echo RACKLESS_AGENT_HOME=/var/lib/rackless-$USER | sudo tee -a /etc/environment"
)
"""Commands that give the agent of a PC a folder on its own disk, from the next login on."""


class Asked(Protocol):
    async def ask(self, request: NodeRequest[Answer]) -> Answer:
        """Send a request to a node and return its answer."""
        ...


async def find_shared_homes(
    agents: Mapping[str, Asked], facts: Mapping[str, NodeFacts]
) -> tuple[tuple[str, ...], ...]:
    """Return the groups of nodes with one folder.

    Args:
        agents: handles of the nodes, by name.
        facts: present facts of the same nodes.
    """
    suspects: dict[str, list[str]] = {}
    for name, known in facts.items():
        if known.home_id:
            suspects.setdefault(known.home_id, []).append(name)
    found = [
        await _compare({name: agents[name] for name in names})
        for names in suspects.values()
        if len(names) > 1
    ]
    return tuple(group for groups in found for group in groups)


async def _compare(agents: Mapping[str, Asked]) -> list[tuple[str, ...]]:
    """Return the groups of nodes that find the marks of each other."""
    marks = {name: f"{secrets.token_hex(16)}" for name in agents}
    try:
        await _ask_all(agents, {name: MarkHome(mark=mark) for name, mark in marks.items()})
        looks = dict.fromkeys(agents, FindMarks(marks=tuple(marks.values())))
        answers = await _ask_all(agents, looks)
    finally:
        removals = {name: MarkHome(mark=mark, removes=True) for name, mark in marks.items()}
        await asyncio.shield(_ask_all(agents, removals))
    groups: list[tuple[str, ...]] = []
    for name, answer in answers.items():
        if answer is None or any(name in group for group in groups):
            continue
        group = (name, *(one for one in marks if one != name and marks[one] in answer.marks))
        if len(group) > 1:
            groups.append(group)
    return groups


async def _ask_all(
    agents: Mapping[str, Asked], requests: Mapping[str, NodeRequest[Answer]]
) -> dict[str, Answer | None]:
    """Return the answer of each node, or None if it gave none, as with a full disk."""

    async def ask(name: str) -> Answer | None:
        with contextlib.suppress(RacklessError):
            return await agents[name].ask(requests[name])
        return None

    answers = await asyncio.gather(*map(ask, agents))
    return dict(zip(agents, answers, strict=True))


def explain_shared_home(names: Sequence[str], facts: Mapping[str, NodeFacts]) -> tuple[str, str]:
    """Return the problem with a group of `find_shared_homes`, and what to do."""
    place = facts[names[0]].agent_home or "the agent's folder"
    text = (
        f"{show_list(names)} have one folder for the agent, {place}, as with a home on a shared "
        "drive; each node needs its own"
    )
    return text, _own_folder(f"On {show_list(names[1:])}")


def explain_held_home(name: str) -> tuple[str, str]:
    """Return the problem with a folder that another PC uses, whichever that is, and what to do."""
    text = f"another PC uses the agent's folder of {name}, as with a home on a shared drive"
    return text, _own_folder(f"On {name}")


def _own_folder(where: str) -> str:
    return f"{where}, set RACKLESS_AGENT_HOME to a folder on its own disk, such as: {OWN_FOLDER}"


async def require_own_homes(agents: Mapping[str, Asked], facts: Mapping[str, NodeFacts]) -> None:
    """Check that no other PC uses the folder of the agent on these nodes.

    Raises:
        UserError: one does; the message says which, and what to set.
    """
    for names in await find_shared_homes(agents, facts):
        raise UserError(*explain_shared_home(names, facts), where=names[1], topic="shared-home")
    for name, known in facts.items():
        if known.recorder == "elsewhere":
            raise UserError(*explain_held_home(name), where=name, topic="shared-home")
