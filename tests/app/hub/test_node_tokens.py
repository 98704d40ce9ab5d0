"""The hub's token of this PC on nodes, of which some have one of their own and some are away."""

from __future__ import annotations

import asyncio

from agents.contract.hub import digest_of
from agents.contract.requests.hub import FoundToken, TokenWish
from app.errors import NodeUnreachable
from app.events import NodeSnapshot
from app.hub.node_tokens import (
    NodeToken,
    choose_others,
    describe_tokens,
    find_tokens,
    give_token,
    take_token,
)

OURS = "hf_" + "o" * 34


class Node:
    """Keeps a token as an agent does; None: it cannot be reached."""

    def __init__(self, token: str | None = "") -> None:
        self.token = token
        self.heard: list[TokenWish] = []

    async def ask(self, request: TokenWish) -> FoundToken:
        if self.token is None:
            raise NodeUnreachable("it is off", "Start it.")
        self.heard.append(request)
        if request.deed == "keep":
            self.token = self.token or request.token
        elif request.deed == "forget" and digest_of(self.token) == request.digest:
            self.token = ""
        if not self.token:
            return FoundToken(place="none")
        return FoundToken(place="same" if self.token == OURS else "other")


def test_it_is_given_told_of_and_taken_back() -> None:
    nodes = {"alpha": Node(), "beta": Node("hf_own"), "gamma": Node(None)}

    def places(found: tuple[NodeToken, ...]) -> list[str]:
        assert [one.node for one in found] == list(nodes)
        return [one.place for one in found]

    async def run() -> None:
        assert places(await find_tokens(nodes, OURS)) == ["none", "other", "unknown"]
        given = await give_token(nodes, OURS)
        assert places(given) == ["same", "other", "unknown"]
        assert given[2].problem == "it is off"
        assert describe_tokens(given) == "On alpha. beta has its own. gamma cannot be asked."
        assert places(await take_token(nodes, OURS)) == ["none", "other", "unknown"]

    asyncio.run(run())
    assert nodes["beta"].token == "hf_own"
    assert [wish.token for wish in nodes["alpha"].heard] == ["", OURS, ""], "it travels to be kept"


def test_many_are_told_of_in_a_sentence() -> None:
    found = tuple(
        NodeToken(node=name, place=place)  # type: ignore[arg-type]
        for name, place in zip(
            "abcdef", ("same", "same", "none", "none", "other", "other"), strict=True
        )
    )
    assert describe_tokens(found) == "On a and b. Not on c and d. e and f have their own."
    assert describe_tokens(()) == ""


def test_this_pc_as_a_node_is_left_out() -> None:
    """It has the window's own file, which taking back would delete."""
    nodes = [
        NodeSnapshot(name=name, transport=transport, address="x", state="online")  # type: ignore[arg-type]
        for name, transport in (("here", "local"), ("distro", "wsl"), ("alpha", "ssh"))
    ]
    assert choose_others(nodes, ()) == ["distro", "alpha"]
    assert choose_others(nodes, ("alpha", "here")) == ["alpha"]
    assert choose_others(nodes, ("unknown",)) == ["unknown"], "whose client is refused"
