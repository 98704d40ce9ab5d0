"""Actions on the Hugging Face hub: search, download, caches, and the token of this PC and nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from agents.contract.requests.hub import CachedKind
from app.core.action import Action, Report, action, as_progress
from app.errors import RacklessError, UsageError, UserError

if TYPE_CHECKING:
    from agents.contract.spec import RunSpec
    from app.core.state import CoreState
    from app.hub.hub_item import FetchedRepo, HubFit, HubResults, PcCache
    from app.hub.hub_token import TokenPlace
    from app.hub.node_tokens import NodeToken
    from app.nodes.client import NodeClient
    from app.planning.candidate import Plan


@action("hub.search")
class SearchHub(Action["HubResults"]):
    """Search the hub; without a connection, this PC's cache, with the reason.

    Raises:
        UserError: the hub refuses, or its answer cannot be read.
    """

    kind: CachedKind
    words: str = ""
    """Part of the name; empty: everything."""
    limit: int = 20

    async def perform(self, core: CoreState, report: Report) -> HubResults:
        return await core.hub_search.search(self.kind, self.words, self.limit)


@action("hub.judge")
class JudgeFits(Action["tuple[HubFit, ...]"]):
    """Judge by the planner which of these models fit the nodes; report each verdict at once.

    Of a model that this PC does not know, only the config is fetched.
    """

    models: Sequence[str]

    async def perform(self, core: CoreState, report: Report) -> tuple[HubFit, ...]:
        from app.forecasts.hub_fit import judge_fit, say_unknown
        from app.hub.hub_item import HubFit

        nodes = core.fleet.snapshots()
        if any(node.facts is None for node in nodes):
            nodes = await core.fleet.reach()
        names = tuple(node.name for node in nodes if node.facts is not None)
        found = []
        for model in self.models:
            if not names:
                text = "No node answers" if nodes else "There is no node yet"
                fit = HubFit(model=model, verdict="unknown", text=text)
            else:
                try:
                    config = await _find_config(core, model)
                    fit = await judge_fit(
                        model, config, len(nodes), lambda spec: _plan(core, spec, names)
                    )
                except UserError as error:
                    fit = say_unknown(model, error)
            found.append(fit)
            report(fit)
        return tuple(found)


async def _find_config(core: CoreState, model: str) -> Mapping[str, Any]:
    configs = core.services.configs
    found = await asyncio.to_thread(configs.find_here, model)
    if found is None:
        found = await core.hub_search.threads.run(lambda: configs.fetch(model))
    return found.config


async def _plan(core: CoreState, spec: RunSpec, names: Sequence[str]) -> Plan:
    from app.core.runs import PlanRun

    asked = replace(spec, nodes=tuple(names))
    return await PlanRun(spec=asked, ask_remote=False, check_data=False).perform(
        core, lambda event: None
    )


@action("hub.fetch")
class FetchFromHub(Action["FetchedRepo"]):
    """Download a model or data set into the cache of this PC or of a node; report the progress.

    If cancelled, what has arrived is kept, and the next download continues it.

    Raises:
        UserError: the name is no hub id, the hub refuses, or the disk is full.
    """

    kind: CachedKind
    name: str
    """Hub id; a data set may have a part, as in `org/name:part`."""
    node: str = ""
    """Node that downloads; empty: this PC."""
    revision: str = ""
    """Branch, tag or commit; empty: the newest."""

    async def perform(self, core: CoreState, report: Report) -> FetchedRepo:
        from agents.contract.requests.hub import FetchData, FetchSnapshot
        from app.hub.hub_item import FetchedRepo
        from app.progress import messages
        from app.runs.inputs.hub_download import download_here

        request: FetchSnapshot | FetchData
        if self.kind == "model":
            request = FetchSnapshot(model=self.name, revision=self.revision)
        else:
            request = FetchData(data=self.name, revision=self.revision)
        try:
            request.check_foreign()
        except ValueError as error:
            raise UsageError(str(error), "Write it as on the hub, such as org/name.") from error
        say, folder = as_progress(report), ""
        if not self.node:
            folder = await download_here(request, core.services.paths.home, say)
        elif isinstance(request, FetchSnapshot):
            folder = (await core.fleet.client(self.node).ask(request, messages(say))).folder
        else:
            await core.fleet.client(self.node).ask(request, messages(say))
        return FetchedRepo(kind=self.kind, name=self.name, pc=self.node, folder=folder)


@action("hub.cached")
class ListCaches(Action["tuple[PcCache, ...]"]):
    """List what this PC and the nodes have from the hub; the hub is not asked."""

    kind: CachedKind
    names: Sequence[str] | None = None
    """Nodes to ask instead of all of them and this PC."""

    async def perform(self, core: CoreState, report: Report) -> tuple[PcCache, ...]:
        import os

        from agents.shared.files.hub_cache import list_cache
        from app.hub.hub_item import PcCache

        # This PC as a node has the same cache.
        here = {node.name for node in core.fleet.snapshots() if node.transport == "local"}
        chosen = [n for n in core.fleet.names() if n not in here] if self.names is None else []
        found = await asyncio.gather(
            *(_list_node(core, self.kind, name) for name in self.names or chosen)
        )
        if self.names is not None:
            return tuple(found)
        own = await asyncio.to_thread(list_cache, os.environ)
        repos = tuple(repo for repo in own if repo.kind == self.kind)
        return (PcCache(pc="", repos=repos), *found)


async def _list_node(core: CoreState, kind: CachedKind, name: str) -> PcCache:
    from agents.contract.requests.hub import ListCached
    from app.hub.hub_item import PcCache

    client = core.fleet.client(name)  # an unknown name is an error of the whole
    try:
        repos = (await client.ask(ListCached())).repos
    except RacklessError as error:
        return PcCache(pc=name, problem=str(error))
    return PcCache(pc=name, repos=tuple(repo for repo in repos if repo.kind == kind))


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
