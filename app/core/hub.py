"""Actions on the Hugging Face token, on this PC and on nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from app.core.action import Action, Report, action

if TYPE_CHECKING:
    from app.core.state import CoreState
    from app.hub.hub_token import TokenPlace
    from app.hub.node_tokens import NodeToken
    from app.nodes.client import NodeClient


@action("hub.find_token")
class FindToken(Action["TokenPlace"]):
    """Return the source of this PC's hub token, without asking the hub."""

    async def perform(self, core: CoreState, report: Report) -> TokenPlace:
        # Imported on use, here and below: other actions start sooner.
        from app.hub.hub_token import find_token

        return await asyncio.to_thread(find_token)


@action("hub.describe_token")
class DescribeToken(Action[str]):
    """Return where this PC's token is stored, as part of a sentence; empty without a token."""

    async def perform(self, core: CoreState, report: Report) -> str:
        from app.hub.hub_token import describe_place

        return await asyncio.to_thread(describe_place)


@action("hub.save_token")
class SaveToken(Action[str]):
    """Verify a token with the hub, save it in the keyring or a file; return its owner.

    Raises:
        UserError: the hub does not accept it, or cannot be reached.
    """

    token: str = field(repr=False)

    async def perform(self, core: CoreState, report: Report) -> str:
        from app.hub.hub_token import keep_token

        # On a thread: it queries the hub, and the keyring may ask the user to unlock it.
        return await asyncio.to_thread(keep_token, self.token)


@action("hub.delete_token")
class DeleteToken(Action["tuple[NodeToken, ...]"]):
    """Delete the saved token from this PC, after deleting it from the nodes that have it.

    Returns:
        The state of each node; those that do not answer may still have it.

    Raises:
        UserError: no token is saved.
    """

    async def perform(self, core: CoreState, report: Report) -> tuple[NodeToken, ...]:
        from app.hub.hub_token import find_token, forget_token

        found = await asyncio.to_thread(find_token)
        # Nodes first: without the token here, its copies there could not be recognised. A token
        # from the environment is not ours to delete, and `forget_token` says so.
        asked = await RemoveToken().perform(core, report) if found in ("kept", "keyring") else ()
        await asyncio.to_thread(forget_token)
        return asked


@action("hub.node_tokens")
class ListNodeTokens(Action["tuple[NodeToken, ...]"]):
    """Return whether each node (default: all nodes) has this PC's hub token.

    Raises:
        UserError: this PC has no token, or a node is unknown.
    """

    names: Sequence[str] = ()

    async def perform(self, core: CoreState, report: Report) -> tuple[NodeToken, ...]:
        from app.hub.node_tokens import find_tokens

        return await find_tokens(*await _choose_clients(core, self.names))


@action("hub.send_token")
class SendToken(Action["tuple[NodeToken, ...]"]):
    """Send this PC's token to nodes (default: all) that have none; return their states.

    Raises:
        UserError: this PC has no token, or a node is unknown.
    """

    names: Sequence[str] = ()

    async def perform(self, core: CoreState, report: Report) -> tuple[NodeToken, ...]:
        from app.hub.node_tokens import give_token

        return await give_token(*await _choose_clients(core, self.names))


@action("hub.remove_token")
class RemoveToken(Action["tuple[NodeToken, ...]"]):
    """Delete this PC's token from nodes (default: all); return their states.

    Raises:
        UserError: this PC has no token, or a node is unknown.
    """

    names: Sequence[str] = ()

    async def perform(self, core: CoreState, report: Report) -> tuple[NodeToken, ...]:
        from app.hub.node_tokens import take_token

        return await take_token(*await _choose_clients(core, self.names))


async def _choose_clients(
    core: CoreState, names: Sequence[str]
) -> tuple[dict[str, NodeClient], str]:
    """Return the nodes to ask, and this PC's token."""
    from app.hub.hub_token import read_token
    from app.hub.node_tokens import choose_others

    # On a thread: the keyring may ask the user to unlock it.
    token = await asyncio.to_thread(read_token)
    chosen = choose_others(core.fleet.snapshots(), names)
    return {name: core.fleet.client(name) for name in chosen}, token
