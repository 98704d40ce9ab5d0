"""What a person does with the token of the Hugging Face hub, on this PC and on nodes."""

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
    """Part of `app.core.core.Core`."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def find_token(self) -> TokenPlace:
        """Tell whether this PC has a token of the hub; the hub is not asked."""
        from app.hub.hub_token import find_token

        return await asyncio.to_thread(find_token)

    async def save_token(self, token: str) -> str:
        """Have the hub check a token, keep it where the hub's tools do; return whose it is.

        Raises:
            UserError: the hub does not know it, or cannot be reached.
        """
        from app.hub.hub_token import keep_token

        return await asyncio.to_thread(keep_token, token)

    async def delete_token(self) -> tuple[NodeToken, ...]:
        """Delete the token that is kept on this PC, and before it from nodes that were given it.

        Returns:
            How the nodes stand; those that could not be asked may still have it.

        Raises:
            UserError: none is kept.
        """
        from app.hub.hub_token import find_token, forget_token

        found = await asyncio.to_thread(find_token)
        asked = await self.remove_token() if found == "kept" else ()
        await asyncio.to_thread(forget_token)
        return asked

    async def node_tokens(self, names: Sequence[str] = ()) -> tuple[NodeToken, ...]:
        """Return which nodes (none named: all) have this PC's token of the hub.

        Raises:
            UserError: this PC has none, or a node is not known.
        """
        from app.hub import hub_token, node_tokens

        token = await asyncio.to_thread(hub_token.read_token)
        return await node_tokens.find_tokens(self._choose_clients(names), token)

    async def send_token(self, names: Sequence[str] = ()) -> tuple[NodeToken, ...]:
        """Keep this PC's token on nodes (none named: all) that have none; return how they stand.

        Raises:
            UserError: this PC has none, or a node is not known.
        """
        from app.hub import hub_token, node_tokens

        token = await asyncio.to_thread(hub_token.read_token)
        return await node_tokens.give_token(self._choose_clients(names), token)

    async def remove_token(self, names: Sequence[str] = ()) -> tuple[NodeToken, ...]:
        """Delete this PC's token from nodes (none named: all); return how they stand.

        Raises:
            UserError: this PC has none, or a node is not known.
        """
        from app.hub import hub_token, node_tokens

        token = await asyncio.to_thread(hub_token.read_token)
        return await node_tokens.take_token(self._choose_clients(names), token)

    def _choose_clients(self, names: Sequence[str]) -> dict[str, NodeClient]:
        from app.hub.node_tokens import choose_others

        return {
            name: self._fleet.client(name) for name in choose_others(self._fleet.snapshots(), names)
        }
