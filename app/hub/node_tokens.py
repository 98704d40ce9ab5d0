"""Copy this PC's hub token to the nodes, which download models and data themselves.

A node that has its own token keeps it. If this PC is a node, it is skipped: it shares the token
with the window, so the token need not be copied and must not be deleted.
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
    """Reason why the state is not known; empty: it is known."""


def choose_others(nodes: Sequence[NodeSnapshot], names: Sequence[str]) -> list[str]:
    """Return the named nodes, by default all, without this PC."""
    here = {node.name for node in nodes if node.transport == "local"}
    return [name for name in names or [node.name for node in nodes] if name not in here]


async def find_tokens(agents: Mapping[str, TokenAgent], token: str) -> tuple[NodeToken, ...]:
    """Return the state of this PC's token on each node."""
    # A digest is enough to compare, so the query does not spread the token.
    return await _ask(agents, TokenWish(deed="find", digest=digest_of(token)))


async def give_token(agents: Mapping[str, TokenAgent], token: str) -> tuple[NodeToken, ...]:
    """Store the token on nodes without a token."""
    return await _ask(agents, TokenWish(deed="keep", token=token))


async def take_token(agents: Mapping[str, TokenAgent], token: str) -> tuple[NodeToken, ...]:
    """Delete the token from nodes; other tokens stay."""
    return await _ask(agents, TokenWish(deed="forget", digest=digest_of(token)))


def describe_tokens(found: tuple[NodeToken, ...]) -> str:
    """Describe the state of the token on the nodes in sentences.

    >>> describe_tokens((NodeToken(node="a", place="same"), NodeToken(node="b", place="other")))
    'On a. b has its own.'
    """

    def names(place: str) -> list[str]:
        return [token.node for token in found if token.place == place]

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
