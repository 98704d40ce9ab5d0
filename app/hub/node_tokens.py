"""Copy this PC's hub token to the nodes, which download models and data themselves.

A node that has its own token keeps it. This PC as a node shares the file with the window, so it is
skipped: its token need not be copied and must not be deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from agents.contract.hub import digest_of
from agents.contract.requests.hub import FoundToken, NodeTokenPlace, TokenWish
from app.errors import UserError
from app.events import NodeSnapshot
from app.text import show_list


class TokenAgent(Protocol):
    """The part of a node client that is used here."""

    async def ask(self, request: TokenWish) -> FoundToken: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeToken:
    node: str
    place: NodeTokenPlace | Literal["unknown"]
    problem: str = ""
    """Why the state is not known; empty: it is known."""


def choose_others(nodes: Sequence[NodeSnapshot], names: Sequence[str]) -> list[str]:
    """Return the named nodes (none named: all) without this PC."""
    here = {node.name for node in nodes if node.transport == "local"}
    return [name for name in names or [node.name for node in nodes] if name not in here]


async def find_tokens(agents: Mapping[str, TokenAgent], token: str) -> tuple[NodeToken, ...]:
    """Return which nodes have this PC's token."""
    # A digest is enough to compare, so that a question does not spread the token.
    return await _ask(agents, TokenWish(deed="find", digest=digest_of(token)))


async def give_token(agents: Mapping[str, TokenAgent], token: str) -> tuple[NodeToken, ...]:
    """Store the token on nodes that have none."""
    return await _ask(agents, TokenWish(deed="keep", token=token))


async def take_token(agents: Mapping[str, TokenAgent], token: str) -> tuple[NodeToken, ...]:
    """Delete the token from nodes; tokens of their own stay."""
    return await _ask(agents, TokenWish(deed="forget", digest=digest_of(token)))


def describe_tokens(found: tuple[NodeToken, ...]) -> str:
    """Describe in a sentence which nodes have the token.

    >>> describe_tokens((NodeToken(node="a", place="same"), NodeToken(node="b", place="other")))
    'On a. b has its own.'
    """

    def names(place: str) -> list[str]:
        return [one.node for one in found if one.place == place]

    parts = []
    if names("same"):
        parts.append(f"On {show_list(names('same'))}.")
    if names("none"):
        parts.append(f"Not on {show_list(names('none'))}.")
    if own := names("other"):
        parts.append(f"{show_list(own)} {'has its' if len(own) == 1 else 'have their'} own.")
    if names("unknown"):
        parts.append(f"{show_list(names('unknown'))} cannot be asked.")
    return " ".join(parts)


async def _ask(agents: Mapping[str, TokenAgent], wish: TokenWish) -> tuple[NodeToken, ...]:
    async def ask(name: str) -> NodeToken:
        try:
            return NodeToken(node=name, place=(await agents[name].ask(wish)).place)
        except UserError as error:
            return NodeToken(node=name, place="unknown", problem=str(error))

    return tuple(await asyncio.gather(*map(ask, agents)))
