"""The hub's token of this PC on the nodes, which fetch models and data themselves.

A node with a token of its own keeps it. This PC as a node shares the file with the window, so it is
left out: what is there needs not be given, and must not be taken back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from agents.contract.hub import digest_of
from agents.contract.node import NodeTokenPlace, TokenWish
from app.errors import UserError
from app.events import NodeSnapshot
from app.text import show_list


class TokenAgent(Protocol):
    """What can be asked of a node."""

    async def hub_token(self, wish: TokenWish) -> NodeTokenPlace:
        """Find, keep or forget the token; return how it stands then."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeToken:
    node: str
    place: NodeTokenPlace | Literal["unknown"]
    problem: str = ""
    """Why it is not known."""


def choose_others(nodes: Sequence[NodeSnapshot], names: Sequence[str]) -> list[str]:
    """Return which nodes are meant (none named: all), without this PC."""
    here = {node.name for node in nodes if node.transport == "local"}
    return [name for name in names or [node.name for node in nodes] if name not in here]


async def find_tokens(agents: Mapping[str, TokenAgent], token: str) -> tuple[NodeToken, ...]:
    """Return which nodes have this PC's token."""
    return await _ask(agents, TokenWish(deed="find", digest=digest_of(token)))


async def give_token(agents: Mapping[str, TokenAgent], token: str) -> tuple[NodeToken, ...]:
    """Keep the token on nodes that have none."""
    return await _ask(agents, TokenWish(deed="keep", token=token))


async def take_token(agents: Mapping[str, TokenAgent], token: str) -> tuple[NodeToken, ...]:
    """Delete the token from nodes; those of their own stay."""
    return await _ask(agents, TokenWish(deed="forget", digest=digest_of(token)))


def describe_tokens(found: tuple[NodeToken, ...]) -> str:
    """Return in words who has the token.

    >>> describe_tokens((NodeToken(node="a", place="same"), NodeToken(node="b", place="other")))
    'On a. b has its own.'
    """

    def names(place: str) -> list[str]:
        return [one.node for one in found if one.place == place]

    told = []
    if names("same"):
        told.append(f"On {show_list(names('same'))}.")
    if names("none"):
        told.append(f"Not on {show_list(names('none'))}.")
    if own := names("other"):
        told.append(f"{show_list(own)} {'has its' if len(own) == 1 else 'have their'} own.")
    if names("unknown"):
        told.append(f"{show_list(names('unknown'))} cannot be asked.")
    return " ".join(told)


async def _ask(agents: Mapping[str, TokenAgent], wish: TokenWish) -> tuple[NodeToken, ...]:
    async def ask(name: str) -> NodeToken:
        try:
            return NodeToken(node=name, place=await agents[name].hub_token(wish))
        except UserError as error:
            return NodeToken(node=name, place="unknown", problem=str(error))

    return tuple(await asyncio.gather(*map(ask, agents)))
