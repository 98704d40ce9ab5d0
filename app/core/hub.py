"""Actions on the Hugging Face token, on this PC and on nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.nodes.client import NodeClient
from app.nodes.fleet import Fleet

if TYPE_CHECKING:
    from app.hub.hub_token import TokenPlace
    from app.hub.node_tokens import NodeToken


class CoreHub:
    """`core.hub`."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def find_token(self) -> TokenPlace:
        """Return where this PC's token of the hub comes from, without asking the hub."""
        # Imported on use, here and below: commands that do not need it start sooner.
        from app.hub.hub_token import find_token

        return await asyncio.to_thread(find_token)

    async def describe_token(self) -> str:
        """Return where this PC's token lies, for a sentence; empty: there is none."""
        from app.hub.hub_token import describe_place

        return await asyncio.to_thread(describe_place)

    async def save_token(self, token: str) -> str:
        """Verify a token with the hub, save it in the keyring or a file; return its owner.

        Raises:
            UserError: the hub does not accept it, or cannot be reached.
        """
        from app.hub.hub_token import keep_token

        return await asyncio.to_thread(keep_token, token)

    async def delete_token(self) -> tuple[NodeToken, ...]:
        """Delete the saved token from this PC, after deleting it from the nodes that have it.

        Returns:
            The state of each node; those that do not answer may still have it.

        Raises:
            UserError: no token is saved.
        """
        from app.hub.hub_token import find_token, forget_token

        found = await asyncio.to_thread(find_token)
        # Nodes first: without the token here, its copies there could not be recognised. A token
        # from the environment is not ours to delete, and `forget_token` says so.
        asked = await self.remove_token() if found in ("kept", "keyring") else ()
        await asyncio.to_thread(forget_token)
        return asked

    async def node_tokens(self, names: Sequence[str] = ()) -> tuple[NodeToken, ...]:
        """Return which nodes (default: all) have this PC's token of the hub.

        Raises:
            UserError: this PC has no token, or a node is unknown.
        """
        from app.hub import hub_token, node_tokens

        token = await asyncio.to_thread(hub_token.read_token)
        return await node_tokens.find_tokens(self._choose_clients(names), token)

    async def send_token(self, names: Sequence[str] = ()) -> tuple[NodeToken, ...]:
        """Send this PC's token to nodes (default: all) that have none; return their states.

        Raises:
            UserError: this PC has no token, or a node is unknown.
        """
        from app.hub import hub_token, node_tokens

        token = await asyncio.to_thread(hub_token.read_token)
        return await node_tokens.give_token(self._choose_clients(names), token)

    async def remove_token(self, names: Sequence[str] = ()) -> tuple[NodeToken, ...]:
        """Delete this PC's token from nodes (default: all); return their states.

        Raises:
            UserError: this PC has no token, or a node is unknown.
        """
        from app.hub import hub_token, node_tokens

        token = await asyncio.to_thread(hub_token.read_token)
        return await node_tokens.take_token(self._choose_clients(names), token)

    def _choose_clients(self, names: Sequence[str]) -> dict[str, NodeClient]:
        from app.hub.node_tokens import choose_others

        return {
            name: self._fleet.client(name) for name in choose_others(self._fleet.snapshots(), names)
        }
